"""The folder that converted models and packed weights are kept in, filled atomically.

An entry is a folder that appears by one rename when it is whole; whatever is half done lives under a `.partial-` name
and is swept up by the next writer. A lock file makes processes that want the same entry wait for the first.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import OutOfMemory

_PARTIAL = ".partial-"


def cache_folder() -> Path:
    """`$TANDEM_CACHE`, or `~/.cache/tandem`."""
    configured = os.environ.get("TANDEM_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "tandem"


def cached_model(
    name: str, cache: Path | None, needed_bytes: int, fill: Callable[[Path], None], shelf: str = "models"
) -> Path:
    """The entry `name` of a shelf, made by `fill(empty folder)` if it isn't there.

    Raises OutOfMemory before filling if the disk has less than `needed_bytes` free; what `fill` raises passes through
    and leaves nothing behind.
    """
    models = (cache or cache_folder()) / shelf
    entry = models / name
    if entry.is_dir():
        return entry
    models.mkdir(parents=True, exist_ok=True)
    with _locked(models / ".lock"):
        if entry.is_dir():
            return entry
        for leftover in models.glob(f"{_PARTIAL}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        free = shutil.disk_usage(models).free
        if free < needed_bytes:
            raise OutOfMemory(
                f"no disk space for {name}: it needs {needed_bytes / 1e9:.2f} GB in {models}, "
                f"{free / 1e9:.2f} GB are free (TANDEM_CACHE names another place)"
            )
        partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=models))
        try:
            fill(partial)
            for path in (partial, *partial.rglob("*")):  # temporary folders and safetensors are private by default
                path.chmod(0o755 if path.is_dir() else 0o644)
                _sync(path)
            partial.rename(entry)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return entry


def _sync(path: Path) -> None:
    """Have it on the disk: after a power cut, a name that was written before its bytes would stand on zeros."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
