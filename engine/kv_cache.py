"""The memory that keys and values live in on the transformers route, and how much of it there is on any.

A token's place is its slot, block_id * block_size + offset. A layer's memory is a CppCache where the C++ kernels run
and can serve its heads, and a TorchCache elsewhere; both take the same number of bytes.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.errors import OutOfMemory
from engine.kernels import cpp_attention
from engine.kernels.cpp_attention import CppCache
from engine.kernels.ops import HeadShape
from engine.kernels.torch_attention import TorchCache

GIB = 1 << 30

_FREE_SHARE_CPU = 0.25
"""Of the memory that is free once the weights are loaded: a host's workers and their neighbours share it."""
_FREE_SHARE_GPU = 0.9


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer stores per token."""

    kv_heads: int
    key_dim: int
    value_dim: int


Cache = CppCache | TorchCache


def make_caches(
    layers: dict[int, LayerShape],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    level: str | None = None,
) -> dict[int, Cache]:
    """Each layer's memory. `level`: that of the C++ kernels, whose operations are loaded; None: torch for all."""
    caches: dict[int, Cache] = {}
    for layer, shape in layers.items():
        heads = HeadShape(shape.kv_heads, shape.kv_heads, shape.key_dim)
        if level is not None and shape.key_dim == shape.value_dim:
            # A ValueError: the kernels can't serve such a layer.
            with contextlib.suppress(ValueError):
                caches[layer] = cpp_attention.make_cache(num_blocks, block_size, heads, dtype)
                continue
        caches[layer] = TorchCache(num_blocks, block_size, heads, dtype, device, shape.value_dim)
    return caches


def bytes_per_block(layers: dict[int, LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block in all layers together."""
    per_token = sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in layers.values())
    return per_token * block_size * dtype.itemsize


def free_bytes(device: torch.device) -> int:
    """Memory that can be taken now: the GPU's, or the host's within its control group's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = _meminfo_available()
    limited = _control_group_free()
    return free if limited is None else min(free, limited)


def _meminfo_available(path: Path = Path("/proc/meminfo")) -> int:
    try:
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 * GIB  # a system that doesn't say: small enough for any host


def _control_group_free(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes left under a container's limit (cgroup v2, then v1); None if there is no limit."""
    for limit_name, usage_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit = int((root / limit_name).read_text())
            used = int((root / usage_name).read_text()) - _droppable(root / usage_name)
            return max(0, limit - used)
        except (OSError, ValueError):
            continue
    return None


def _droppable(usage: Path) -> int:
    """Bytes of file cache that count as used but give way under pressure."""
    try:
        lines = usage.with_name("memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


@dataclass(frozen=True, slots=True)
class MemoryRequest:
    """What is asked of the pool's size; the first that is set decides."""

    num_blocks: int | None = None
    kv_cache_gib: float | None = None


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """What decides the pool's size."""

    free: int
    """bytes, the weights already loaded"""
    free_share: int
    """bytes of them that the pool takes unasked"""
    block_bytes: int
    block_size: int
    max_model_len: int
    max_sequences: int

    @property
    def blocks_per_sequence(self) -> int:
        return -(-self.max_model_len // self.block_size)


def plan_num_blocks(request: MemoryRequest, facts: MemoryFacts) -> int:
    """How many blocks to hold.

    Unasked: the share of what is free, at least one sequence of full length and at most `max_sequences` of them.
    Raises OutOfMemory with the numbers if that, or what was asked for, is more than is free.
    """
    if request.num_blocks is not None:
        num_blocks = request.num_blocks
    elif request.kv_cache_gib is not None:
        num_blocks = int(request.kv_cache_gib * GIB) // facts.block_bytes
    else:
        affordable = max(facts.free_share // facts.block_bytes, facts.blocks_per_sequence)
        num_blocks = min(affordable, facts.max_sequences * facts.blocks_per_sequence)
    needed = max(num_blocks, 1) * facts.block_bytes
    if num_blocks >= 1 and needed <= facts.free:
        return num_blocks
    asked = f", {request.kv_cache_gib:.3f} GiB were asked for" if request.kv_cache_gib is not None else ""
    affordable_len = facts.free_share // facts.block_bytes * facts.block_size
    raise OutOfMemory(
        f"the KV cache doesn't fit: {max(num_blocks, 1)} blocks of {facts.block_size} tokens need "
        f"{needed / GIB:.3f} GiB ({facts.block_bytes / 1024:.0f} KiB each{asked}), and {facts.free / GIB:.3f} GiB are "
        f"free after the weights; one sequence of {facts.max_model_len} tokens needs "
        f"{facts.blocks_per_sequence * facts.block_bytes / GIB:.3f} GiB, a --max-model-len up to {affordable_len} fits"
    )


def memory_facts(
    device: torch.device, *, block_bytes: int, block_size: int, max_model_len: int, max_sequences: int
) -> MemoryFacts:
    """Look at what is free now."""
    free = free_bytes(device)
    share = int(free * (_FREE_SHARE_CPU if device.type == "cpu" else _FREE_SHARE_GPU))
    return MemoryFacts(free, share, block_bytes, block_size, max_model_len, max_sequences)


def require_weights_fit(weight_bytes: int, kv_bytes: int, device: torch.device) -> None:
    """Raise OutOfMemory, with the numbers, if weights and the smallest useful pool exceed what is free now."""
    free = free_bytes(device)
    if weight_bytes + kv_bytes > free:
        raise OutOfMemory(
            f"the model doesn't fit on {device}: {free / GIB:.3f} GiB are available, the weights need "
            f"{weight_bytes / GIB:.3f} GiB and the KV cache at least {kv_bytes / GIB:.3f} GiB"
        )
