"""The engine that runs a transformers model: `ModelRunner` implements `engine.batch.Engine`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers

from engine.attention import PagedStep
from engine.attention_plan import KEY_TILE, PRODUCTS_PER_GROUP, QUERY_BLOCK, AttentionPlan
from engine.batch import Batch, EngineInfo
from engine.errors import UnsupportedModel
from engine.kv_cache import (
    KvCache,
    MemoryRequest,
    bytes_per_block,
    memory_facts,
    plan_num_blocks,
    require_weights_fit,
)
from engine.linear import TILE_ROWS, padded_rows
from engine.loading import ModelFacts, check_supported
from engine.model import TiledModel, load_transformers_model
from engine.progress import Progress

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """How to run a model."""

    dtype: str = "bfloat16"
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto: a GPU if there is one"""
    kv_cache_gib: float | None = None
    num_blocks: int | None = None
    """overrides kv_cache_gib"""
    block_size: int = 16
    max_sequences: int = 256
    max_model_len: int | None = None
    """None: the model's own"""
    threads: int | None = None
    """CPU threads of a product; None: torch's choice"""


class ModelRunner:
    """One model on one device with its KV cache. Not thread-safe."""

    def __init__(self, model: TiledModel, facts: ModelFacts, options: RunnerOptions) -> None:
        if KEY_TILE % options.block_size:
            raise ValueError(f"block_size {options.block_size} must divide {KEY_TILE}")
        max_model_len = resolve_max_model_len(facts, options.max_model_len)
        memory = memory_facts(
            model.device,
            block_bytes=bytes_per_block(model.layers, options.block_size, model.dtype),
            block_size=options.block_size,
            max_model_len=max_model_len,
            max_sequences=options.max_sequences,
        )
        num_blocks = plan_num_blocks(MemoryRequest(options.num_blocks, options.kv_cache_gib), memory)
        self._model = model
        self._max_kv_heads = max(shape.kv_heads for shape in model.layers.values())
        self._cache = KvCache(model.layers, num_blocks, options.block_size, model.dtype, model.device)
        self.facts = facts
        self._info = EngineInfo(
            fingerprint=fingerprint(model, facts, max_model_len),
            vocab_size=model.vocab_size,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=options.block_size,
            max_sequences=options.max_sequences,
        )

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        dtype: str = "bfloat16",
        device: str = "auto",
        kv_cache_gib: float | None = None,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_sequences: int = 256,
        max_model_len: int | None = None,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> ModelRunner:
        """Check, load and lay out the model in `folder`. Raises a `ModelError` that says what is wrong with it."""
        options = RunnerOptions(
            dtype, device, kv_cache_gib, num_blocks, block_size, max_sequences, max_model_len, threads
        )
        if threads:
            torch.set_num_threads(threads)
        facts = check_supported(Path(folder))
        torch_dtype, torch_device = resolve_dtype(dtype), resolve_device(device)
        # What the pool needs is known exactly only once the model is there; this is refused before reading gigabytes.
        require_weights_fit(
            facts.num_parameters * torch_dtype.itemsize,
            facts.kv_bytes_per_token(torch_dtype.itemsize) * resolve_max_model_len(facts, max_model_len),
            torch_device,
        )
        model = load_transformers_model(facts.folder, torch_dtype, torch_device, progress)
        if progress:
            progress("laying out the KV cache", None)
        return cls(TiledModel(model, resolve_max_model_len(facts, max_model_len)), facts, options)

    @property
    def info(self) -> EngineInfo:
        return self._info

    def forward(self, batch: Batch) -> torch.Tensor:
        """See `Engine.forward`."""
        device = self._model.device
        num_padded = padded_rows(len(batch.token_ids))
        plan = AttentionPlan(batch, num_padded, self._info.block_size, self._max_kv_heads, device)
        return self._model.forward(
            torch.from_numpy(_padded(batch.token_ids, num_padded)).to(device),
            torch.from_numpy(_padded(batch.positions, num_padded)).to(device),
            torch.from_numpy(np.ascontiguousarray(batch.logit_indices, dtype=np.int64)).to(device),
            int(batch.positions.max()),
            PagedStep(plan, self._cache),
        )


def _padded(values: np.ndarray, length: int) -> np.ndarray:
    out = np.zeros(length, dtype=np.int64)
    out[: len(values)] = values
    return out


def resolve_dtype(name: str) -> torch.dtype:
    """Raises ValueError for a name that isn't served."""
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def resolve_device(name: str) -> torch.device:
    """Raises UnsupportedModel if the device that was asked for isn't there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedModel(f"device {name!r} was asked for, but torch {torch.__version__} sees no CUDA GPU")
    return device


def resolve_max_model_len(facts: ModelFacts, asked: int | None) -> int:
    """Raises UnsupportedModel if more is asked than the model has positions."""
    if asked is None:
        return facts.max_model_len
    if asked < 1 or asked > facts.max_model_len:
        raise UnsupportedModel(
            f"max_model_len {asked} is outside 1 … {facts.max_model_len}, the positions that {facts.model_type} has"
        )
    return asked


def fingerprint(model: TiledModel, facts: ModelFacts, max_model_len: int) -> str:
    """Everything that can change a bit of the logits."""
    if model.device.type == "cuda":
        place = f"{torch.cuda.get_device_name(model.device)}/cuda{torch.version.cuda}"
    else:
        # Products may be split over threads differently for another number of them.
        place = f"cpu-{torch.backends.cpu.get_cpu_capability()}/threads{torch.get_num_threads()}"
    parts = [
        f"route=tiled{TILE_ROWS}x{QUERY_BLOCK}x{KEY_TILE}x{PRODUCTS_PER_GROUP}",
        f"dtype={str(model.dtype).removeprefix('torch.')}",
        f"device={place}",
        f"torch={torch.__version__}",
        f"transformers={transformers.__version__}",
        f"model={facts.content_id}",
    ]
    if facts.rope_depends_on_length:
        parts.append(f"max_model_len={max_model_len}")
    return " ".join(parts)
