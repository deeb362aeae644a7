"""A model folder's weight files: are they all there and whole, how many parameters, and which content.

safetensors: 8 bytes of little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data
(https://huggingface.co/docs/safetensors). Sharded folders list each tensor's file in `model.safetensors.index.json`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from engine.errors import IncompleteModel

_SINGLE = ("model.safetensors", "pytorch_model.bin")
_INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_HEADER_LIMIT = 100 << 20
_SAMPLES = 64
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Weight files in order, all present and whole."""

    paths: tuple[Path, ...]
    num_parameters: int

    def content_id(self, config: Path) -> str:
        """16 hex digits over the configuration, the files' sizes and a sample of their bytes.

        Sampled, not read whole: reading tens of gigabytes would double the time to start, and a fine-tuned model
        differs from its base nearly everywhere.
        """
        digest = hashlib.sha256(config.read_bytes())
        for path in self.paths:
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                for sample in range(_SAMPLES):
                    file.seek(sample * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
        return digest.hexdigest()[:16]


def find_weight_files(folder: Path) -> WeightFiles:
    """Raises IncompleteModel naming the file that is missing or cut short."""
    for index_name in _INDEX:
        if (folder / index_name).is_file():
            names = _indexed_files(folder / index_name)
            break
    else:
        names = [name for name in _SINGLE if (folder / name).is_file()][:1]
        if not names:
            raise IncompleteModel(f"{folder} has no weights: neither {_SINGLE[0]} nor {_INDEX[0]}")
    paths = tuple(folder / name for name in names)
    for path in paths:
        if not path.is_file():
            raise IncompleteModel(f"the weight file {path.name}, which the index lists, is missing from {folder}")
    return WeightFiles(paths, sum(_count_parameters(path) for path in paths))


def _indexed_files(index: Path) -> list[str]:
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise IncompleteModel(f"{index} can't be read: {error!r}") from error


def _count_parameters(path: Path) -> int:
    if path.suffix != ".safetensors":
        return path.stat().st_size // 2  # a pickle's shapes aren't known without loading it; taken as 16 bit
    header = _read_header(path)
    return sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def _read_header(path: Path) -> dict[str, Any]:
    """A safetensors header; raises IncompleteModel if the file is shorter than the header says."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(size, _HEADER_LIMIT):
                raise ValueError("its header is cut short")
            header: dict[str, Any] = json.loads(file.read(length))
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IncompleteModel(f"the weight file {path} is damaged: {error}") from error
    if size != 8 + length + end:
        raise IncompleteModel(f"the weight file {path} is cut short: {size} bytes instead of {8 + length + end}")
    return header
