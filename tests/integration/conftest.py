"""One cluster of real processes per module; tests that hurt it start their own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.integration.harness import Cluster, running


@pytest.fixture
def cluster_options() -> dict[str, Any]:
    """What a test's own cluster is made of; parametrise to change."""
    return {}


@pytest.fixture
async def cluster(tmp_path: Any, cluster_options: dict[str, Any]) -> AsyncIterator[Cluster]:
    """A fresh cluster."""
    async with running(tmp_path, **cluster_options) as started:
        yield started
