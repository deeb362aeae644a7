"""Packed weights in a file that all workers of a host map: packed once, held in memory once.

    <cache>/packed/<content id>-<dtype>-<layout>/
        weights.bin      tensors one after the other, each at a multiple of 64 bytes
        index.json       {"size": bytes of weights.bin, "written_ns": when, "sha256": …,
                          "weights": {name: where each part lies, and a linear's shape}}

A file that was written to since then, as its time of modification says, is read through and compared with its digest
before it is used, at about 1.5 GB/s. So is one that was copied without its times; an untouched one costs nothing.

The folder appears by one rename (`engine.model_cache`), so it is whole or absent. Mapped pages belong to the system's
file cache: a second worker takes none of its own, and under pressure they are dropped and read again. Entries that
weren't used for longest are forgotten once all together exceed `LIMIT_BYTES`; a process that has one mapped keeps it.

Where that can't be done (no disk space, a read-only cache) weights are packed into memory of the process's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from engine.decoder_weights import Weight
from engine.errors import OutOfMemory
from engine.kernels.ops import PackedLinear
from engine.model_cache import cache_folder, cached_model

logger = logging.getLogger(__name__)

SHELF = "packed"
LIMIT_BYTES = 64 << 30
WORTH_MAPPING = 32 << 20
"""Bytes: smaller models are packed anew, which takes no time."""
_ALIGNMENT = 64
_BIG_PAGE = 2 << 20
"""Bytes. The file is written in whole ones: a system whose file cache can hold such pages then does, and maps them as
they are. A product reads its weights in one stream, which small pages interrupt."""
_FORMAT = 2
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.uint8)}


def entry_name(content_id: str, dtype: torch.dtype, layout: str) -> str:
    """The folder's name; `layout` is whatever decides how the ops pack."""
    digest = hashlib.sha256(f"{_FORMAT} {layout}".encode()).hexdigest()[:12]
    return f"{content_id}-{str(dtype).removeprefix('torch.')}-{digest}"


def mapped_weights(
    name: str, num_bytes: int, pack: Callable[[], Iterable[tuple[str, Weight]]], cache: Path | None = None
) -> Mapping[str, Weight]:
    """The entry's weights, packed first if there is none; `num_bytes` is about how much room that takes."""
    shelf = (cache or cache_folder()) / SHELF
    try:
        folder = cached_model(name, cache, num_bytes + (num_bytes >> 4), lambda path: _write(path, pack()), SHELF)
        weights = _read(folder)
        with contextlib.suppress(OSError):  # a read-only cache can be read all the same
            os.utime(folder)
            _forget_oldest(shelf, keep=folder)
    except (OSError, OutOfMemory) as error:
        logger.warning("packed weights aren't shared between processes: %s", error)
        return dict(pack())
    return weights


def _write(folder: Path, weights: Iterable[tuple[str, Weight]]) -> None:
    index: dict[str, Any] = {}
    path = folder / "weights.bin"
    with path.open("wb", buffering=_BIG_PAGE) as file:
        for name, weight in weights:
            if isinstance(weight, PackedLinear):
                index[name] = {
                    "data": _append(file, weight.data),
                    "bias": None if weight.bias is None else _append(file, weight.bias),
                    "in_features": weight.in_features,
                    "out_features": weight.out_features,
                    "gated": weight.gated,
                }
            else:
                index[name] = {"data": _append(file, weight)}
        size = file.tell()
    facts = {"size": size, "written_ns": path.stat().st_mtime_ns, "sha256": _digest(path)}
    (folder / "index.json").write_text(json.dumps({**facts, "weights": index}))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _append(file: BinaryIO, tensor: torch.Tensor) -> dict[str, Any]:
    file.write(b"\0" * (-file.tell() % _ALIGNMENT))
    offset = file.tell()
    left = tensor.contiguous().flatten().view(torch.uint8).numpy().data
    while left:
        room = _BIG_PAGE - file.tell() % _BIG_PAGE
        file.write(left[:room])
        left = left[room:]
    return {"offset": offset, "shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def _read(folder: Path) -> dict[str, Weight]:
    """Raises OSError if the entry was damaged after it was made; it is removed then."""
    path = folder / "weights.bin"
    try:
        index = json.loads((folder / "index.json").read_text())
        found = path.stat()
        if found.st_size != index["size"]:
            raise OSError(f"{path} was cut short")
        if found.st_mtime_ns != index["written_ns"] and _digest(path) != index["sha256"]:
            raise OSError(f"{path} was altered")
        mapping = _mapped(path, index["size"])
        return {name: _weight(mapping, entry) for name, entry in index["weights"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise OSError(f"{folder} is damaged: {error!r}") from error


def _mapped(path: Path, size: int) -> torch.Tensor:
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)  # torch wants what it could write to
    with contextlib.suppress(OSError, AttributeError):  # where a system has no such advice, small pages do
        mapping.madvise(mmap.MADV_HUGEPAGE)  # for what isn't in memory yet and is read from the disk
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _weight(mapping: torch.Tensor, entry: dict[str, Any]) -> Weight:
    data = _part(mapping, entry["data"])
    if "in_features" not in entry:
        return data
    bias = None if entry["bias"] is None else _part(mapping, entry["bias"])
    return PackedLinear(data, bias, entry["in_features"], entry["out_features"], entry["gated"])


def _part(mapping: torch.Tensor, place: dict[str, Any]) -> torch.Tensor:
    dtype, shape = _DTYPES[place["dtype"]], torch.Size(place["shape"])
    return mapping[place["offset"] : place["offset"] + shape.numel() * dtype.itemsize].view(dtype).view(shape)


def _forget_oldest(shelf: Path, keep: Path) -> None:
    """Remove entries, the longest unused first, until the rest fits the limit."""
    entries = sorted(
        ((path.stat().st_mtime, _size(path), path) for path in shelf.iterdir() if (path / "index.json").is_file()),
        reverse=True,
    )
    total = 0
    for _, size, path in entries:
        total += size
        if total > LIMIT_BYTES and path != keep:
            shutil.rmtree(path, ignore_errors=True)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())
