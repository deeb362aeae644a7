"""A distilled draft on disk: a folder of a few megabytes that is of use beside its target only.

    config.json         which target, how many layers, the decoder's settings, how the draft was made and how it does
    draft.safetensors   head_token_ids   int32 [V]: the target's ids that the draft can guess, ascending
                        lens             from the draft's last hidden state to what the target's head takes
                        model.…          layers and final norm, under the target's own names

A matrix is int8 with a float32 scale for each row, `NAME` and `NAME.scale`; vectors are float32. The embedding and the
head's rows are the target's, so they are read from the target's folder; a digest of the embedding tells whether it is
the right one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from engine.errors import IncompleteModel, UnsupportedModel

FORMAT = "tandem-draft"
VERSION = 1
CONFIG, WEIGHTS = "config.json", "draft.safetensors"
HEAD_TOKEN_IDS, LENS = "head_token_ids", "lens.weight"
_DIGEST_STRIDE = 61
"""every so many rows of an embedding make its digest"""


@dataclass(frozen=True, slots=True)
class DraftFolder:
    """A draft, read."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    """float32, scales applied; head_token_ids int64"""

    @property
    def decoder(self) -> dict[str, Any]:
        """The settings of its layers, as a transformers configuration."""
        settings: dict[str, Any] = self.config["decoder"]
        return settings

    @property
    def target(self) -> dict[str, Any]:
        """What its target is like."""
        target: dict[str, Any] = self.config["target"]
        return target

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Raises IncompleteModel if it isn't there or has another shape."""
        path = self.folder / WEIGHTS
        tensor = self.tensors.get(name)
        if tensor is None:
            raise IncompleteModel(f"{path} lacks {name}")
        if tensor.shape != shape:
            raise IncompleteModel(f"{path}: {name} is {list(tensor.shape)} instead of {list(shape)}")
        return tensor


def is_draft_folder(folder: Path) -> bool:
    """Whether it says of itself that it holds a distilled draft."""
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("format") == FORMAT


def embedding_digest(embedding: torch.Tensor) -> str:
    """sha256 of some rows of [vocab, hidden], as bfloat16."""
    rows = embedding[::_DIGEST_STRIDE].to(torch.bfloat16).contiguous()
    return hashlib.sha256(rows.view(torch.uint8).numpy().tobytes()).hexdigest()


def write_draft(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Make or replace a draft; `tensors` float, and head_token_ids. Each file is whole or as before."""
    folder.mkdir(parents=True, exist_ok=True)
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name == HEAD_TOKEN_IDS:
            stored[name] = tensor.to(torch.int32)
        elif tensor.dim() == 2:
            scale = tensor.float().abs().amax(1).clamp(min=1e-12) / 127
            stored[name] = (tensor.float() / scale[:, None]).round().to(torch.int8).contiguous()
            stored[f"{name}.scale"] = scale
        else:
            stored[name] = tensor.float().contiguous()
    partial = folder / f".partial-{WEIGHTS}"
    save_file({name: tensor.cpu() for name, tensor in sorted(stored.items())}, partial)
    partial.chmod(0o644)
    partial.rename(folder / WEIGHTS)
    partial = folder / f".partial-{CONFIG}"
    partial.write_text(json.dumps({"format": FORMAT, "version": VERSION, **config}, indent=1) + "\n", "utf-8")
    partial.rename(folder / CONFIG)


def read_draft(folder: Path) -> DraftFolder:
    """Raises ModelError naming the file and the field that is wrong."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise IncompleteModel(f"{folder} has no {CONFIG}") from None
    except (OSError, ValueError) as error:
        raise IncompleteModel(f"{path} can't be read: {error}") from error
    _check(path, config)
    return DraftFolder(folder, config, _read_tensors(folder / WEIGHTS, config["target"]["vocab_size"]))


def _check(path: Path, config: Any) -> None:
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise UnsupportedModel(f"{path}: format is no {FORMAT!r}")
    if config.get("version") != VERSION:
        raise UnsupportedModel(f"{path}: version is {config.get('version')!r}; this release reads {VERSION}")
    for name in ("target", "decoder"):
        if not isinstance(config.get(name), dict):
            raise IncompleteModel(f"{path}: {name} is missing")
    for name, kind in (("model_type", str), ("hidden_size", int), ("vocab_size", int), ("embedding_sha256", str)):
        if not isinstance(config["target"].get(name), kind):
            raise IncompleteModel(f"{path}: target.{name} is missing")


def _read_tensors(path: Path, vocab_size: int) -> dict[str, torch.Tensor]:
    try:
        stored = load_file(path)
    except FileNotFoundError:
        raise IncompleteModel(f"{path.parent} has no {path.name}") from None
    except (OSError, SafetensorError) as error:
        raise IncompleteModel(f"{path} can't be read: {error}") from error
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith(".scale"):
            continue
        if tensor.dtype != torch.int8:
            tensors[name] = tensor
            continue
        scale = stored.get(f"{name}.scale")
        if scale is None or scale.shape != tensor.shape[:1]:
            raise IncompleteModel(f"{path}: {name}.scale is missing or has another length than {name}")
        tensors[name] = tensor.float() * scale[:, None]
    ids = tensors.get(HEAD_TOKEN_IDS)
    if ids is None or ids.dim() != 1 or not len(ids):
        raise IncompleteModel(f"{path}: {HEAD_TOKEN_IDS} is missing or no list")
    ids = tensors[HEAD_TOKEN_IDS] = ids.long()
    if ids[0] < 0 or ids[-1] >= vocab_size or bool((ids.diff() <= 0).any()):
        raise IncompleteModel(f"{path}: {HEAD_TOKEN_IDS} isn't ascending within 0 … {vocab_size - 1}")
    return tensors
