"""What holds for every test: settings before anything is imported, and kernels compiled before any clock runs."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

import pytest

# Triton looks at it once, when it is first imported, which transformers does. Its kernels are tested in its
# interpreter, on the CPU; `make gpu-check` tests them on a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """A first build takes longer than a test may; a fresh clone has it from `make setup` already."""
    if any("engine" in item.path.parts for item in session.items) and not session.config.option.collectonly:
        from engine.kernels import build

        with contextlib.suppress(build.NoKernels):
            build.library()


@pytest.fixture
def restored_process() -> Iterator[None]:
    """For tests that run a service's `main` here: how it logs and how its threads take turns ends with the test."""
    root, interval_s = logging.getLogger(), sys.getswitchinterval()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    sys.setswitchinterval(interval_s)
