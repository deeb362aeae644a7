"""Paged attention on a GPU: decode rows, chunks of prompts and verifications in one launch.

Words: a *tile* is 16 lines, each one query of one row for one query head; the heads of a tile share a KV head. A
*partition* is 512 key positions, a *key tile* 64 of them (float32: 32); both begin at multiples of their size.

    grid x: tiles of queries           lines of a tile, with 4 query heads to a KV head:
    grid y: KV heads (× head tiles)        q0h0 q0h1 q0h2 q0h3 q1h0 … q3h3
    grid z: partitions of split rows

    a program           for each partition: a fresh (peak, sum, values), over its key tiles in order
                        state ← merge(state, partition), partitions in ascending order
    split row           each program has one partition; `finish_kernel` merges their states in the same order
    other row           one program has all partitions; there is one state
    finish_kernel       the sink joins, values / sum, rounded to A

A row is split when it has at most SPLIT_QUERIES queries: a decode row or a verification, where one row alone must keep
the whole GPU busy. That decides who merges, not what: `merge` is the same chain of separately rounded operations in
both kernels (neither is compiled with fusion), merging into an empty state changes no bit of a partition's (exp2(−inf)
is 0 and exp2(0) is 1), and all programs run the same compiled code, as the number of tokens, rows and partitions are
plain arguments.

What a line doesn't see is a no-op for it: its peak stays, its sum gets 0, its values are multiplied by 1. So neither
the other lines of the tile, nor key tiles that only they need, nor how many partitions a launch has, changes a bit.

Exponentials are of base 2; log2 e is part of the scale.

Cache: keys and values A [blocks, kv_heads, block_size, head_dim]; always finite (`triton_rotary`), so a weight of 0
gives 0. State: float32 [T, num_heads, splits, …], partition p at p % splits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.ops import AttentionRule, HeadShape, StepPlan
from engine.kernels.triton_math import operand, rounded, softcapped

PARTITION = 512
LINES = 16
SPLIT_QUERIES = 16
"""a row of at most so many queries may be split"""
_KEY_TILES = {torch.bfloat16: 64, torch.float32: 32}
_MAX_STATE_BYTES = 256 << 20
"""no step is split if that would take more memory; with so many tokens and keys the tiles alone fill a GPU"""
_LOG2_E = math.log2(math.e)


@triton.jit
def _last_at_most(values, count, wanted, DIVISOR: tl.constexpr, SLOPE: tl.constexpr):
    """The greatest r in [0, count) with values[r] // DIVISOR + SLOPE · r ≤ wanted; the left side never falls."""
    low = 0
    high = count
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(values + middle) // DIVISOR + SLOPE * middle <= wanted:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _merge(peak, total, values, more_peak, more_total, more_values):
    """Two states over disjoint keys as one; an empty one has peak −inf and zeros. values have one more dimension."""
    new_peak = tl.maximum(peak, more_peak)
    reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    factor = tl.exp2(peak - reference)
    more_factor = tl.exp2(more_peak - reference)
    new_total = total * factor + more_total * more_factor
    new_values = values * factor[:, None] + more_values * more_factor[:, None]
    return new_peak, new_total, new_values


@triton.jit(do_not_specialize=["num_rows", "num_splits", "table_width"])
def attention_kernel(
    queries,  # A [T, num_heads, head_dim]
    keys,
    values,
    positions,
    query_starts,
    block_tables,
    peaks,  # float32 [T, num_heads, splits]
    totals,  # float32 [T, num_heads, splits]
    results,  # float32 [T, num_heads, splits, head_dim]
    num_rows,
    num_splits,
    table_width,
    scale,  # log2 e included, where there is no cap
    softcap,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    CAP: tl.constexpr,
    GROUP_TILE: tl.constexpr,  # query heads in a tile
    BLOCK_DIM: tl.constexpr,
    TILE_LINES: tl.constexpr,
    KEY_TILE: tl.constexpr,
    PARTITION_KEYS: tl.constexpr,
    SPLIT_LIMIT: tl.constexpr,
    LOG2_E: tl.constexpr,
):
    TILE_QUERIES: tl.constexpr = TILE_LINES // GROUP_TILE
    GROUP: tl.constexpr = NUM_HEADS // KV_HEADS
    HEAD_TILES: tl.constexpr = (GROUP + GROUP_TILE - 1) // GROUP_TILE
    row = _last_at_most(query_starts, num_rows, tl.program_id(0), TILE_QUERIES, 1)
    row_start = tl.load(query_starts + row)
    num_queries = tl.load(query_starts + row + 1) - row_start
    first_query = (tl.program_id(0) - (row_start // TILE_QUERIES + row)) * TILE_QUERIES
    is_split = (num_queries <= SPLIT_LIMIT) & (num_splits > 1)
    if (first_query >= num_queries) | ((tl.program_id(2) > 0) & (is_split == 0)):
        return
    kv_head = tl.program_id(1) // HEAD_TILES

    lines = tl.arange(0, TILE_LINES)
    query = first_query + lines // GROUP_TILE
    in_group = tl.program_id(1) % HEAD_TILES * GROUP_TILE + lines % GROUP_TILE
    own_lines = (query < num_queries) & (in_group < GROUP)
    head_line = (row_start + query).to(tl.int64) * NUM_HEADS + kv_head * GROUP + in_group
    dims = tl.arange(0, BLOCK_DIM)
    own_dims = dims < HEAD_DIM
    query_mask = own_lines[:, None] & own_dims[None, :]
    q = operand(tl.load(queries + head_line[:, None] * HEAD_DIM + dims[None, :], query_mask, other=0.0))
    position = tl.load(positions + row_start + query, own_lines, other=-1)
    end = tl.max(position, 0) + 1
    begin = end * 0
    if WINDOW > 0:
        begin = tl.maximum(tl.min(tl.where(own_lines, position, end), 0) - (WINDOW - 1), 0)

    first_partition = begin // PARTITION_KEYS
    end_partition = (end + PARTITION_KEYS - 1) // PARTITION_KEYS
    if is_split:
        skipped = (tl.program_id(2) - first_partition % num_splits + num_splits) % num_splits
        first_partition += skipped
        end_partition = tl.minimum(end_partition, first_partition + 1)
    peak = tl.full((TILE_LINES,), float("-inf"), tl.float32)
    total = tl.full((TILE_LINES,), 0.0, tl.float32)
    result = tl.full((TILE_LINES, BLOCK_DIM), 0.0, tl.float32)
    tables_at = block_tables + row.to(tl.int64) * table_width
    for partition in range(first_partition, end_partition):
        part_peak = tl.full((TILE_LINES,), float("-inf"), tl.float32)
        part_total = tl.full((TILE_LINES,), 0.0, tl.float32)
        part_result = tl.full((TILE_LINES, BLOCK_DIM), 0.0, tl.float32)
        part_begin = tl.maximum(partition * PARTITION_KEYS, begin // KEY_TILE * KEY_TILE)
        part_end = tl.minimum((partition + 1) * PARTITION_KEYS, end)
        for key_start in range(part_begin, part_end, KEY_TILE):
            key = key_start + tl.arange(0, KEY_TILE)
            exists = key < end
            block = tl.load(tables_at + key // BLOCK_SIZE, exists, other=0).to(tl.int64)
            line = (block * KV_HEADS + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE
            kv_at = line[:, None] * HEAD_DIM + dims[None, :]
            kv_mask = exists[:, None] & own_dims[None, :]
            k = operand(tl.load(keys + kv_at, kv_mask, other=0.0))
            v = operand(tl.load(values + kv_at, kv_mask, other=0.0))
            scores = tl.dot(q, k.T, input_precision="ieee") * scale
            if CAP:
                scores = softcapped(scores, softcap) * LOG2_E
            seen = key[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
            new_peak = tl.maximum(part_peak, tl.max(scores, 1))
            reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp2(scores - reference[:, None])
            factor = tl.exp2(part_peak - reference)
            part_total = part_total * factor + tl.sum(weights, 1)
            weights = operand(rounded(weights, queries.dtype.element_ty))
            part_result = tl.dot(weights, v, part_result * factor[:, None], input_precision="ieee")
            part_peak = new_peak
        peak, total, result = _merge(peak, total, result, part_peak, part_total, part_result)

    if first_partition < end_partition:
        state_at = head_line * num_splits + tl.program_id(2)
        tl.store(peaks + state_at, peak, own_lines)
        tl.store(totals + state_at, total, own_lines)
        tl.store(results + state_at[:, None] * HEAD_DIM + dims[None, :], result, query_mask)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def finish_kernel(
    peaks,
    totals,
    results,
    positions,
    query_starts,
    sinks,  # float32 [num_heads]; anything where SINKS isn't set
    out,  # A [T, num_heads · head_dim]
    num_rows,
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PARTITION_KEYS: tl.constexpr,
    SPLIT_LIMIT: tl.constexpr,
    LOG2_E: tl.constexpr,
):
    token = tl.program_id(0)
    head = tl.program_id(1)
    head_line = token.to(tl.int64) * NUM_HEADS + head
    row = _last_at_most(query_starts, num_rows, token, 1, 0)
    num_queries = tl.load(query_starts + row + 1) - tl.load(query_starts + row)
    position = tl.load(positions + token)
    begin = position * 0
    if WINDOW > 0:
        begin = tl.maximum(position - (WINDOW - 1), 0)
    first_partition = begin // PARTITION_KEYS
    end_partition = position // PARTITION_KEYS + 1
    if (num_queries > SPLIT_LIMIT) | (num_splits <= 1):
        first_partition = position * 0
        end_partition = first_partition + 1

    one = tl.arange(0, 1)
    dims = tl.arange(0, BLOCK_DIM)
    own_dims = (one[:, None] == 0) & (dims < HEAD_DIM)[None, :]
    peak = tl.full((1,), float("-inf"), tl.float32)
    total = tl.full((1,), 0.0, tl.float32)
    result = tl.full((1, BLOCK_DIM), 0.0, tl.float32)
    for partition in range(first_partition, end_partition):
        state_at = head_line * num_splits + partition % num_splits + one
        values = tl.load(results + state_at[:, None] * HEAD_DIM + dims[None, :], own_dims, other=0.0)
        more_peak, more_total = tl.load(peaks + state_at), tl.load(totals + state_at)
        peak, total, result = _merge(peak, total, result, more_peak, more_total, values)
    if SINKS:
        sink = tl.load(sinks + head + one) * LOG2_E
        nothing = tl.full((1, BLOCK_DIM), 0.0, tl.float32)
        peak, total, result = _merge(peak, total, result, sink, tl.full((1,), 1.0, tl.float32), nothing)
    result = result / total[:, None]
    out_at = out + head_line * HEAD_DIM + dims[None, :] + one[:, None]
    tl.store(out_at, rounded(result, out.dtype.element_ty), own_dims)


@dataclass(frozen=True, slots=True)
class _State:
    """Memory for the states of one call; comes from torch's allocator, so that a captured graph owns its own."""

    peaks: torch.Tensor
    totals: torch.Tensor
    results: torch.Tensor
    num_splits: int


def num_splits_of(num_tokens: int, heads: HeadShape, plan: StepPlan, window: int | None) -> int:
    """How many partitions may be computed side by side for one query; 1: rows aren't split."""
    splits = -(-plan.max_context_len // PARTITION)
    if window is not None:
        splits = min(splits, (window + SPLIT_QUERIES - 2) // PARTITION + 2)
    state_bytes = num_tokens * heads.num_heads * splits * (heads.head_dim + 2) * 4
    return splits if splits > 1 and state_bytes <= _MAX_STATE_BYTES else 1


def attend(
    queries: torch.Tensor,
    heads: HeadShape,
    rule: AttentionRule,
    plan: StepPlan,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """See `ops.Ops.attend`."""
    num_tokens, num_rows = len(queries), len(plan.context_lens)
    if not num_tokens:
        return
    group = heads.num_heads // heads.kv_heads
    group_tile = min(triton.next_power_of_2(group), LINES)
    block_dim = max(16, triton.next_power_of_2(heads.head_dim))
    state = _new_state(num_tokens, heads, num_splits_of(num_tokens, heads, plan, rule.window), queries.device)
    num_tiles = num_tokens // (LINES // group_tile) + num_rows
    grid = (num_tiles, heads.kv_heads * triton.cdiv(group, group_tile), state.num_splits)
    attention_kernel[grid](
        queries,
        keys,
        values,
        plan.positions,
        plan.query_starts,
        plan.block_tables,
        state.peaks,
        state.totals,
        state.results,
        num_rows,
        state.num_splits,
        plan.block_tables.shape[1],
        rule.scale if rule.softcap else rule.scale * _LOG2_E,
        rule.softcap or 0.0,
        NUM_HEADS=heads.num_heads,
        KV_HEADS=heads.kv_heads,
        HEAD_DIM=heads.head_dim,
        BLOCK_SIZE=keys.shape[2],
        WINDOW=rule.window or 0,
        CAP=bool(rule.softcap),
        GROUP_TILE=group_tile,
        BLOCK_DIM=block_dim,
        TILE_LINES=LINES,
        KEY_TILE=_KEY_TILES[queries.dtype],
        PARTITION_KEYS=PARTITION,
        SPLIT_LIMIT=SPLIT_QUERIES,
        LOG2_E=_LOG2_E,
        num_warps=4,
        num_stages=2,
        enable_fp_fusion=False,
    )
    finish_kernel[(num_tokens, heads.num_heads)](
        state.peaks,
        state.totals,
        state.results,
        plan.positions,
        plan.query_starts,
        state.peaks if rule.sinks is None else rule.sinks,
        out,
        num_rows,
        state.num_splits,
        NUM_HEADS=heads.num_heads,
        HEAD_DIM=heads.head_dim,
        WINDOW=rule.window or 0,
        SINKS=rule.sinks is not None,
        BLOCK_DIM=block_dim,
        PARTITION_KEYS=PARTITION,
        SPLIT_LIMIT=SPLIT_QUERIES,
        LOG2_E=_LOG2_E,
        num_warps=1,
        enable_fp_fusion=False,
    )


def _new_state(num_tokens: int, heads: HeadShape, num_splits: int, device: torch.device) -> _State:
    shape = (num_tokens, heads.num_heads, num_splits)
    return _State(
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.empty((*shape, heads.head_dim), dtype=torch.float32, device=device),
        num_splits,
    )
