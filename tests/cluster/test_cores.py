"""Who shares cores with whom."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cluster.cores import own_cores

PRINT = "from cluster.cores import own_cores; print(own_cores())"


def said(before: str = "") -> str:
    run = subprocess.run([sys.executable, "-c", before + PRINT], capture_output=True, text=True, check=True)
    return run.stdout.strip()


def test_processes_on_the_same_cores_say_the_same() -> None:
    assert said() == own_cores() != ""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core can't be left out")
def test_pinned_apart_they_do_not() -> None:
    pinned = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}});"
    assert said(pinned) != own_cores()
