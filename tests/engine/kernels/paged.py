"""Sequences in a paged cache, for one implementation, and what float64 makes of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from engine.kernels.ops import AttentionRule, HeadNorms, HeadShape, LayerCache, Ops, Rotary, StepPlan
from tests.engine.kernels.conftest import Implementation
from tests.engine.kernels.oracle import FUNCTION_BOUND, HALF_STEP, UNIT, attention, rms_norm, rotate, sum_bound

Row = tuple[int, int, int]
"""sequence, first position, end"""


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer's attention is."""

    heads: HeadShape
    rule: AttentionRule
    dtype: torch.dtype
    norms: HeadNorms | None = None
    rotary: Rotary | None = None


@dataclass(slots=True)
class Paged:
    """Sequences' products, and the cache that a step writes and reads; tokens beyond every context are rubbish."""

    implementation: Implementation
    layer: Layer
    lengths: list[int]
    block_size: int = 16
    seed: int = 0
    """of where the blocks lie; the sequences are the same for every one"""
    qkv: list[torch.Tensor] = field(init=False)
    """per sequence float32 [length, (num_heads + 2 kv_heads) head_dim]"""
    tables: list[list[int]] = field(init=False)
    ops: Ops = field(init=False)
    cache: LayerCache = field(init=False)
    spare: list[int] = field(init=False)
    """blocks that no sequence has"""

    def __post_init__(self) -> None:
        self.ops, heads = self.implementation.ops, self.layer.heads
        width = (heads.num_heads + 2 * heads.kv_heads) * heads.head_dim
        random = torch.Generator().manual_seed(len(self.lengths))
        self.qkv = [torch.randn((length, width), generator=random) for length in self.lengths]
        needed = [-(-length // self.block_size) for length in self.lengths]
        num_blocks = sum(needed) + 3
        self.cache = self.ops.make_cache(num_blocks, self.block_size, heads, self.layer.dtype)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(self.seed)).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in needed]
        self.spare = order
        everything = torch.arange(num_blocks * self.block_size)
        zeros = torch.zeros(len(everything), dtype=torch.int32)
        rubbish = torch.randn((len(everything), width), generator=random) * 100
        plan = StepPlan(zeros, zeros, everything, zeros, zeros, zeros[:, None], everything, 1, 1)
        queries = torch.empty(len(everything), heads.num_heads, heads.head_dim, dtype=self.layer.dtype)
        self.ops.rotate_write(rubbish, heads, None, None, plan, self.cache, queries)

    def plan(self, rows: list[Row]) -> StepPlan:
        """Tables are padded with blocks that hold rubbish."""
        positions = [position for _, first, end in rows for position in range(first, end)]
        slots = [
            self.tables[index][position // self.block_size] * self.block_size + position % self.block_size
            for index, first, end in rows
            for position in range(first, end)
        ]
        ends = [0]
        for _, first, end in rows:
            ends.append(ends[-1] + end - first)
        visible = [self.tables[index][: -(-end // self.block_size)] for index, _, end in rows]
        width = max(map(len, visible), default=0) + 2
        padded = [table + [self.spare[0]] * (width - len(table)) for table in visible]
        int32 = torch.int32
        return StepPlan(
            token_ids=torch.zeros(len(positions), dtype=int32),
            positions=torch.tensor(positions, dtype=int32),
            slots=torch.tensor(slots, dtype=torch.int64),
            query_starts=torch.tensor(ends, dtype=int32),
            context_lens=torch.tensor([end for _, _, end in rows], dtype=int32),
            block_tables=torch.tensor(padded, dtype=int32).view(len(rows), width),
            logit_indices=torch.tensor([], dtype=torch.int64),
            max_query_len=max((end - first for _, first, end in rows), default=0),
            max_context_len=max((end for _, _, end in rows), default=0),
        )

    def write(self, rows: list[Row]) -> tuple[StepPlan, torch.Tensor]:
        """Write the rows' keys and values; the plan and the queries A [T, num_heads, head_dim]."""
        heads, plan = self.layer.heads, self.plan(rows)
        parts = [self.qkv[index][first:end] for index, first, end in rows]
        # Rows of something wider, as a product that computes more than these may leave them.
        wide = torch.full((len(plan.positions), parts[0].shape[1] + 8), torch.nan) if parts else torch.empty(0, 8)
        qkv = wide[:, : wide.shape[1] - 8]
        qkv.copy_(torch.cat(parts))
        queries = torch.full((len(qkv), heads.num_heads, heads.head_dim), torch.nan, dtype=self.layer.dtype)
        self.ops.rotate_write(qkv, heads, self.layer.norms, self.layer.rotary, plan, self.cache, queries)
        return plan, queries

    def attend(self, rows: list[Row]) -> torch.Tensor:
        """Write, then attend: A [T, num_heads, head_dim]."""
        plan, queries = self.write(rows)
        heads = self.layer.heads
        guarded = torch.full((len(queries) + 2, heads.num_heads * heads.head_dim), 7.0, dtype=self.layer.dtype)
        self.ops.attend(queries, heads, self.layer.rule, plan, self.cache, guarded[1:-1])
        assert (guarded[0] == 7).all()
        assert (guarded[-1] == 7).all()
        return guarded[1:-1].view(queries.shape)

    def parts(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The sequence's queries, keys and values as attention reads them, float64 [length, heads, head_dim]."""
        layer, heads = self.layer, self.layer.heads
        all_heads = self.qkv[index].double().unflatten(1, (-1, heads.head_dim))
        query, key, value = all_heads.split((heads.num_heads, heads.kv_heads, heads.kv_heads), dim=1)
        if layer.norms:
            query = rms_norm(query, layer.norms.query, layer.norms.eps)
            key = rms_norm(key, layer.norms.key, layer.norms.eps)
        if layer.rotary:
            half = layer.rotary.rotary_dim // 2
            table = layer.rotary.table[: len(query)]
            query, key = (rotate(x, table[:, :half], table[:, half:], layer.rotary.interleaved) for x in (query, key))
        finite = [torch.where(torch.isfinite(x), x, 0.0).to(layer.dtype).double() for x in (key, value)]
        return query, finite[0], finite[1]

    def expected(self, row: Row, queries: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of one row in float64 [n, num_heads, head_dim], and what float32 may be off."""
        index, first, end = row
        own, keys, values = self.parts(index)
        queries = own[first:end].to(self.layer.dtype).double() if queries is None else queries.double()
        rule, positions = self.layer.rule, torch.arange(first, end)
        arguments = (positions, rule.scale, rule.window, rule.softcap, rule.sinks)
        exact = attention(queries, keys[:end], values[:end], *arguments)
        magnitude = attention(queries, keys[:end], values[:end].abs(), *arguments)
        group = queries.shape[1] // keys.shape[1]
        sizes = torch.einsum("nhd,chd->nhc", queries.abs(), keys[:end].abs().repeat_interleave(group, dim=1))
        score_error = sum_bound(sizes.amax(-1, keepdim=True) * rule.scale, queries.shape[2])
        if rule.softcap is not None:
            score_error += FUNCTION_BOUND * rule.softcap
        # A score's error is its weight's relative one; it enters above and below the fraction's line.
        error = 2 * score_error + sum_bound(torch.tensor(1.0), end) + 2 * FUNCTION_BOUND + 8 * UNIT
        if self.layer.dtype != torch.float32:
            error += HALF_STEP[self.layer.dtype]  # weights may be rounded; half of it above the line, half below
        return exact, magnitude * error
