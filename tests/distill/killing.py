"""`python -P killing.py TARGET OUT`: `tandem distill`, again and again: killed each time it writes its second file.

Prints the exit statuses. A process of its own, so that forks copy neither threads nor locks.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import transformers.models.llama.modeling_llama  # noqa: F401 - once, not in every child

import distill.pipeline
from cli.__main__ import main

FLAGS = (
    *("--answer-tokens=900", "--held-out-prompts=4", "--max-answer-tokens=24", "--batch-size=16", "--threads=1"),
    *("--layers=1", "--head-tokens=200", "--steps=6", "--batch-tokens=2048", "--device=cpu"),
)


def kill_at_second(function: Callable[..., None]) -> Callable[..., None]:
    """Files are written, brought to the disk, renamed: at the second, right before it gets its name."""
    calls = 0

    def counted(*args: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        function(*args)

    return counted


def kill_once_after(function: Callable[..., None], marker: Path) -> Callable[..., None]:
    """The draft is there, but nobody has been told."""

    def called(*args: object) -> None:
        function(*args)
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return called


def attempt(target: str, out: Path) -> int:
    """In a child; its exit status."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    torch.set_num_threads(1)
    os.fsync = kill_at_second(os.fsync)
    distill.pipeline.export = kill_once_after(distill.pipeline.export, out.with_name("exported"))
    status = main(["distill", f"--target={target}", f"--out={out}", *FLAGS])
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    statuses = [attempt(sys.argv[1], Path(sys.argv[2]))]
    while statuses[-1] == -signal.SIGKILL and len(statuses) < 40:
        statuses.append(attempt(sys.argv[1], Path(sys.argv[2])))
    print("statuses", *statuses)
