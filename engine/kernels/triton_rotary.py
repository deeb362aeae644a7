"""Norms of heads, rotation and the write into the cache on a GPU: one program per token and head.

    qkv row   [ q0 | q1 | … | k0 | … | v0 | … ]      head h < num_heads: a query; then keys; then values
                └┬─┘
                 └─ normed (if the model does) → rotated (its first rotary_dim elements) → queries, or the cache

Element i of a pair (i, p) becomes x_i · cos ∓ x_p · sin; both elements are read from qkv by whoever writes one of them.
Products are rounded on their own (no fusion), so that they are the same as in the other implementations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.ops import HeadNorms, HeadShape, Rotary, StepPlan
from engine.kernels.triton_math import rounded


@triton.jit
def _write_finite(at, values, mask):
    """values, rounded; what isn't finite then, as 0: a value that no query weighs must not spoil a sum with 0 · inf."""
    written = rounded(values, at.dtype.element_ty)
    finite = tl.abs(written.to(tl.float32)) < float("inf")
    tl.store(at, tl.where(finite, written, 0.0).to(at.dtype.element_ty), mask)


@triton.jit
def _norm_weight(query_norm, key_norm, at, mask, is_query):
    of_query = tl.load(query_norm + at, mask & is_query, other=0.0)
    return tl.where(is_query, of_query, tl.load(key_norm + at, mask & (is_query == 0), other=0.0))


@triton.jit
def rotate_write_kernel(
    qkv,  # float32 [T, (num_heads + 2 · kv_heads) · head_dim], rows qkv_stride apart
    query_norm,
    key_norm,  # float32 [head_dim]; anything where NORMED isn't set
    table,  # float32 [positions, rotary_dim]; anything where ROTARY_DIM is 0
    positions,
    slots,
    queries,  # A [T, num_heads, head_dim]
    keys,
    values,  # A [blocks, kv_heads, block_size, head_dim]
    qkv_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    own = at < HEAD_DIM
    head_at = qkv + token * qkv_stride + head * HEAD_DIM
    x = tl.load(head_at + at, own, other=0.0)
    is_query = head < NUM_HEADS
    is_value = head >= NUM_HEADS + KV_HEADS
    factor = 1.0
    if NORMED:
        factor = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / HEAD_DIM + eps)
        normed = x * factor * _norm_weight(query_norm, key_norm, at, own, is_query)
        x = tl.where(is_value, x, normed)
    if ROTARY_DIM > 0:
        HALF: tl.constexpr = ROTARY_DIM // 2
        turned = at < ROTARY_DIM
        if INTERLEAVED:
            pair, partner, is_first = at // 2, at ^ 1, at % 2 == 0
        else:
            is_first = at < HALF
            pair, partner = tl.where(is_first, at, at - HALF), tl.where(is_first, at + HALF, at - HALF)
        other = tl.load(head_at + partner, turned, other=0.0)
        if NORMED:
            other = other * factor * _norm_weight(query_norm, key_norm, partner, turned, is_query)
        row = table + tl.load(positions + token).to(tl.int64) * ROTARY_DIM
        cosine = tl.load(row + pair, turned, other=1.0)
        sine = tl.load(row + HALF + pair, turned, other=0.0)
        crossed = other * sine
        rotated = x * cosine + tl.where(is_first, -crossed, crossed)
        x = tl.where(turned & (is_value == 0), rotated, x)
    if is_query:
        query_at = queries + (token * NUM_HEADS + head) * HEAD_DIM + at
        tl.store(query_at, rounded(x, queries.dtype.element_ty), own)
    else:
        kv_head = tl.where(is_value, head - NUM_HEADS - KV_HEADS, head - NUM_HEADS)
        slot = tl.load(slots + token)
        line = ((slot // BLOCK_SIZE) * KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
        if is_value:
            _write_finite(values + line * HEAD_DIM + at, x, own)
        else:
            _write_finite(keys + line * HEAD_DIM + at, x, own)


def rotate_write(
    qkv: torch.Tensor,
    heads: HeadShape,
    norms: HeadNorms | None,
    rotary: Rotary | None,
    plan: StepPlan,
    keys: torch.Tensor,
    values: torch.Tensor,
    queries: torch.Tensor,
) -> None:
    """See `ops.Ops.rotate_write`; keys and values are [blocks, kv_heads, block_size, head_dim]."""
    if not len(qkv):
        return
    rotate_write_kernel[(len(qkv), heads.num_heads + 2 * heads.kv_heads)](
        qkv,
        qkv if norms is None else norms.query,
        qkv if norms is None else norms.key,
        qkv if rotary is None else rotary.table,
        plan.positions,
        plan.slots,
        queries,
        keys,
        values,
        qkv.stride(0),
        0.0 if norms is None else norms.eps,
        NUM_HEADS=heads.num_heads,
        KV_HEADS=heads.kv_heads,
        HEAD_DIM=heads.head_dim,
        BLOCK_SIZE=keys.shape[2],
        ROTARY_DIM=0 if rotary is None else rotary.rotary_dim,
        INTERLEAVED=rotary is not None and rotary.interleaved,
        NORMED=norms is not None,
        BLOCK=triton.next_power_of_2(heads.head_dim),
        num_warps=1,
        enable_fp_fusion=False,
    )
