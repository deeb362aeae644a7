"""Shared fixtures: the folder of a model without weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cases.cell import write_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake model, with some tokens of several bytes."""
    return write_model(tmp_path_factory.mktemp("model"))
