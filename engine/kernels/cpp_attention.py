"""A layer's memory for the C++ kernels, and their calls: rotation with writing, writing alone, attention.

Layouts are drawn in csrc/attention_cache.h. `level` is that of `build.level_number`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache as once

import torch

from engine.kernels.build import library
from engine.kernels.ops import AttentionRule, HeadNorms, HeadShape, Rotary, StepPlan
from engine.kernels.pages import zero_pages

DTYPES = (torch.float32, torch.bfloat16)
MAX_HEAD_DIM = 256
_CHUNK = 16
"""keys that lie side by side, if the block size allows"""


@dataclass(frozen=True, slots=True)
class CppCache:
    """Keys and values of one layer."""

    keys: torch.Tensor
    """[num_blocks, kv_heads, block_size / run, head_dim / per word, run, per word]"""
    values: torch.Tensor
    """[num_blocks, kv_heads, block_size / per word, head_dim, per word]"""
    block_size: int


def make_cache(num_blocks: int, block_size: int, heads: HeadShape, dtype: torch.dtype) -> CppCache:
    """A layer's memory, zeros, of 2 · head_dim elements per slot and KV head.

    Raises ValueError for a shape that can't be served (the block size and head_dim must be even, head_dim at most
    MAX_HEAD_DIM), and `build.NoKernels`.
    """
    load_operations()
    _require(num_blocks >= 1, f"num_blocks {num_blocks} is less than 1")
    _require(block_size >= 2 and block_size % 2 == 0, f"block_size {block_size} is not an even number")
    _require(
        2 <= heads.head_dim <= MAX_HEAD_DIM and heads.head_dim % 2 == 0,
        f"head_dim {heads.head_dim} is not an even number up to {MAX_HEAD_DIM}",
    )
    _require(
        heads.kv_heads >= 1 and heads.num_heads % heads.kv_heads == 0,
        f"{heads.num_heads} query heads are not a multiple of {heads.kv_heads} KV heads",
    )
    _require(dtype in DTYPES, f"dtype {dtype} is neither float32 nor bfloat16")
    per_word = 4 // dtype.itemsize
    run = min(_CHUNK, block_size & -block_size)
    size = (num_blocks, heads.kv_heads)
    keys = zero_pages((*size, block_size // run, heads.head_dim // per_word, run, per_word), dtype)
    values = zero_pages((*size, block_size // per_word, heads.head_dim, per_word), dtype)
    return CppCache(keys, values, block_size)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def rotate_write(
    level: int,
    qkv: torch.Tensor,
    heads: HeadShape,
    norms: HeadNorms | None,
    rotary: Rotary | None,
    plan: StepPlan,
    cache: CppCache,
    queries: torch.Tensor,
) -> None:
    """See `Ops.rotate_write`."""
    torch.ops.tandem.rotate_write.default(
        level,
        qkv,
        None if norms is None else norms.query,
        None if norms is None else norms.key,
        0.0 if norms is None else norms.eps,
        None if rotary is None else rotary.table,
        rotary is not None and rotary.interleaved,
        plan.positions,
        plan.slots,
        cache.keys,
        cache.values,
        queries,
    )


def write(level: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, cache: CppCache) -> None:
    """keys and values [T, kv_heads, head_dim] of the cache's dtype, in any order of tokens and heads, go to slots
    int64 [T]; what isn't finite as 0.
    """
    torch.ops.tandem.write_cache.default(level, keys, values, slots, cache.keys, cache.values)


def attend(
    level: int, queries: torch.Tensor, rule: AttentionRule, plan: StepPlan, cache: CppCache, out: torch.Tensor
) -> None:
    """See `Ops.attend`; queries [T, num_heads, head_dim] may have tokens and heads in any order."""
    torch.ops.tandem.attend.default(
        level,
        queries,
        cache.keys,
        cache.values,
        plan.positions,
        plan.query_starts,
        plan.block_tables,
        rule.scale,
        rule.window or 0,
        rule.softcap or 0.0,
        rule.sinks,
        out,
    )


@once
def load_operations() -> str:
    """Load the library, tell torch how the operations behave on tensors without data, and return the best level.

    Raises `build.NoKernels`.
    """
    level = library()
    for name in ("rotate_write", "write_cache", "attend"):
        torch.library.register_fake(f"tandem::{name}", _fake_writing)
    return level


def _fake_writing(*args: object, **kwargs: object) -> None:
    """They only write into arguments."""
