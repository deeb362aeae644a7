"""A folder that runs are killed in at any moment: one run at a time, and every file is whole or absent."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from distill.errors import Refused

_PARTIAL = ".partial-"


@contextmanager
def claimed(folder: Path, part: int = 0, parts: int = 1) -> Iterator[None]:
    """The folder, made if need be, is ours while the context lasts; of several parts, the part is.

    Raises Refused if another process has it.
    """
    _make(folder)
    with ExitStack() as stack:
        if parts > 1:
            _lock(stack, folder / ".lock", fcntl.LOCK_SH, folder)
            _lock(stack, folder / f".lock-{part}-of-{parts}", fcntl.LOCK_EX, folder)
        else:
            _lock(stack, folder / ".lock", fcntl.LOCK_EX, folder)
            # Nobody else is here: these are of processes that were killed.
            for path in folder.rglob(f"*{_PARTIAL}*"):
                path.unlink()
        yield


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` make a file, then give it its name: after a power cut, too, it's all there or as before."""
    partial = path.with_name(f"{path.name}{_PARTIAL}{os.getpid()}")
    write(partial)
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.rename(path)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused("work", f"{folder} can't be a folder: {error.strerror}") from error


def _lock(stack: ExitStack, path: Path, kind: int, folder: Path) -> None:
    try:
        file = stack.enter_context(path.open("ab+"))
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Refused("work", f"another run is at work in {folder}") from None
    except OSError as error:
        raise Refused("work", f"{path} can't be written: {error.strerror}") from error
