"""Paged attention in plain torch: keys and values of a layer, and what queries make of them.

**Memory.** Two tensors [num_blocks, kv_heads, block_size, head_dim], where values may have a width of their own: a
head's part of a block is one run of memory. Blocks start as zeros and only finite values are written, so a hidden key's
weight of 0 times what an earlier owner left behind is 0.

**Pieces.** Tokens of one row that follow each other form query blocks of at most QUERY_BLOCK; keys come in tiles of
KEY_TILE positions, aligned to the sequence's start. A piece is one query block against one tile:

    positions        0 ........ 63 | 64 ....... 127 | 128 ...
    row 0, block 0   [  tile 0   ]   [   tile 1   ]              pieces 0, 1
    row 0, block 1   [  tile 0   ]   [   tile 1   ]  [ tile 2 ]  pieces 2, 3, 4
    row 1, block 0   [  tile 0   ]                               piece  5

Every piece is a pair of products of one shape, and they are multiplied in groups of one size, so a query's bits are its
own. Its tiles are merged in the order of positions by a chain of single additions and multiplications, in which a tile
that isn't there adds 0. With tile j's scores s: m_j = max s, l_j = Σ e^(s − m_j), o_j = Σ e^(s − m_j) v and
M = max_j m_j the result is Σ_j e^(m_j − M) o_j / Σ_j e^(m_j − M) l_j (Milakov & Gimelshein, arXiv:1805.02867).

Everything is float32, whatever the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import torch

from engine.kernels.ops import AttentionRule, HeadShape, StepPlan
from engine.kernels.pages import zero_pages
from engine.kernels.torch_tiles import PRODUCTS_PER_GROUP, apply, grouped_products, row_sums, softcapped

QUERY_BLOCK = 8
"""Queries per piece; a decode row has one and pays for all."""
KEY_TILE = 64
"""Key positions per piece."""

_MAX_WAVE_PRODUCTS = 512
"""Pieces × KV heads computed at a time: 8 MiB of keys at head_dim 64."""


class TorchCache:
    """Keys and values of one layer."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        heads: HeadShape,
        dtype: torch.dtype,
        device: torch.device,
        value_dim: int | None = None,
    ) -> None:
        """value_dim: elements of a head's value; None: as many as of its key."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a cache of {num_blocks} blocks of {block_size} tokens can't be served")
        if heads.num_heads % heads.kv_heads:
            raise ValueError(f"{heads.num_heads} query heads aren't a multiple of {heads.kv_heads} KV heads")
        self.block_size = block_size
        self.run = gcd(block_size, KEY_TILE)
        """keys fetched at a time: a piece of a block that lies in one tile"""
        shape = (num_blocks, heads.kv_heads, block_size)
        self.keys = _zeros((*shape, heads.head_dim), dtype, device)
        self.values = _zeros((*shape, value_dim or heads.head_dim), dtype, device)

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """slots int64 [T]; keys [T, kv_heads, head_dim] and values of any float dtype. What isn't finite becomes 0."""
        blocks, offsets = slots // self.block_size, slots % self.block_size
        for memory, new in ((self.keys, keys), (self.values, values)):
            memory[blocks, :, offsets] = torch.nan_to_num(new.to(memory.dtype), nan=0.0, posinf=0.0, neginf=0.0)

    def read(self, runs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """runs int64 [n, KEY_TILE / run], each (block * kv_heads + head) * runs per block + index → float32 copies
        [n, KEY_TILE, head_dim].
        """
        return self._read(self.keys, runs), self._read(self.values, runs)

    def _read(self, memory: torch.Tensor, runs: torch.Tensor) -> torch.Tensor:
        width = memory.shape[-1]
        return memory.view(-1, self.run * width).index_select(0, runs.view(-1)).float().view(-1, KEY_TILE, width)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return zero_pages(shape, dtype)


@dataclass(frozen=True, slots=True)
class _Wave:
    """Some query blocks (q) with all their pieces (n), computed at a time.

    Products are (piece, KV head), filled up to whole groups with repetitions of the first.
    """

    blocks: slice
    num_pieces: int
    queries: torch.Tensor
    """int64 [products]: query block of each, counted from the wave's first, * kv_heads + head"""
    runs: torch.Tensor
    """int64 [products, KEY_TILE / run]: where each one's keys lie, as `TorchCache.read` takes it"""
    hidden: torch.Tensor
    """bool [n, 1, QUERY_BLOCK, 1, KEY_TILE]: the keys that a query may not see"""
    merge_order: torch.Tensor
    """int64 [tiles, q]: each query block's pieces in order; where it has no more, its first"""
    absent: torch.Tensor
    """bool [tiles, q, 1, 1, 1]: there is no such piece"""


class QueryBlocks:
    """A step's tokens in query blocks (b), and each block's pieces, for caches of one shape."""

    def __init__(self, plan: StepPlan, cache: TorchCache) -> None:
        self._block_size, self._run = cache.block_size, cache.run
        starts = plan.query_starts.to(torch.int64)
        lengths = starts.diff()
        per_row = -(-lengths // QUERY_BLOCK)
        self._row = torch.repeat_interleave(per_row)
        """int64 [b]"""
        ordinal = torch.arange(len(self._row), device=starts.device) - (per_row.cumsum(0) - per_row)[self._row]
        first = starts[:-1][self._row] + ordinal * QUERY_BLOCK
        end = torch.minimum(first + QUERY_BLOCK, starts[1:][self._row])
        # A place without a token of its own repeats the block's last, so that every query sees at least one key.
        places = torch.arange(QUERY_BLOCK, device=starts.device)
        self.tokens = torch.minimum(first[:, None] + places, end[:, None] - 1)
        """int64 [b, QUERY_BLOCK]: the flat token at each place"""
        self.real = (first[:, None] + places < end[:, None]).view(-1)
        """bool [b * QUERY_BLOCK]: the places with a token of their own, which are in the tokens' order"""
        self._positions = plan.positions.to(torch.int64)[self.tokens]
        self._tables = plan.block_tables.to(torch.int64)
        self._waves: dict[tuple[int | None, int], list[_Wave]] = {}
        self._last_block = -(-plan.context_lens.to(torch.int64) // cache.block_size) - 1

    def waves(self, window: int | None, kv_heads: int) -> list[_Wave]:
        """All pieces of layers whose queries see their last `window` positions (None: all). Layers share them."""
        if (window, kv_heads) not in self._waves:
            self._waves[window, kv_heads] = list(self._cut_waves(window, kv_heads))
        return self._waves[window, kv_heads]

    def _cut_waves(self, window: int | None, kv_heads: int) -> Iterator[_Wave]:
        last_tile = self._positions.amax(dim=1) // KEY_TILE
        first_tile = torch.zeros_like(last_tile)
        if window is not None:
            first_tile = (self._positions.amin(dim=1) - window + 1).clamp_(min=0) // KEY_TILE
        num_tiles = last_tile - first_tile + 1
        start, pieces, max_pieces = 0, 0, max(1, _MAX_WAVE_PRODUCTS // kv_heads)
        counts = num_tiles.tolist()
        for stop, count in enumerate(counts):
            if pieces and pieces + count > max_pieces:
                yield self._wave(slice(start, stop), first_tile, num_tiles, window, kv_heads)
                start, pieces = stop, 0
            pieces += count
        yield self._wave(slice(start, len(counts)), first_tile, num_tiles, window, kv_heads)

    def _wave(
        self, blocks: slice, first_tile: torch.Tensor, num_tiles: torch.Tensor, window: int | None, kv_heads: int
    ) -> _Wave:
        first_tile, num_tiles = first_tile[blocks], num_tiles[blocks]
        first_piece = num_tiles.cumsum(0) - num_tiles
        piece_block = torch.repeat_interleave(num_tiles)
        ordinal = torch.arange(len(piece_block), device=piece_block.device) - first_piece[piece_block]
        tile = first_tile[piece_block] + ordinal
        keys = tile[:, None] * KEY_TILE + torch.arange(KEY_TILE, device=tile.device)
        distance = self._positions[blocks][piece_block][:, :, None] - keys[:, None, :]
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        steps = torch.arange(int(num_tiles.max()), device=tile.device)[:, None]
        absent = steps >= num_tiles
        queries, runs = self._products(piece_block, self._row[blocks][piece_block], tile, kv_heads)
        return _Wave(
            blocks=blocks,
            num_pieces=len(piece_block),
            queries=queries,
            runs=runs,
            hidden=hidden[:, None, :, None, :],
            merge_order=torch.where(absent, 0, steps) + first_piece,
            absent=absent[:, :, None, None, None],
        )

    def _products(
        self, piece_block: torch.Tensor, rows: torch.Tensor, tiles: torch.Tensor, kv_heads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`_Wave.queries` and `runs` of pieces int64 [n]; keys beyond a context are taken from its last block."""
        per_tile, per_block = KEY_TILE // self._run, self._block_size // self._run
        heads = torch.arange(kv_heads, device=tiles.device)
        runs = tiles[:, None] * per_tile + torch.arange(per_tile, device=tiles.device)
        blocks = torch.minimum(runs // per_block, self._last_block[rows][:, None])
        blocks = self._tables[rows[:, None], blocks][:, None] * kv_heads + heads[:, None]
        runs = (blocks * per_block + (runs % per_block)[:, None]).flatten(0, 1)
        queries = (piece_block[:, None] * kv_heads + heads).view(-1)
        spare = -len(queries) % PRODUCTS_PER_GROUP
        return torch.cat((queries, queries[:1].expand(spare))), torch.cat((runs, runs[:1].expand(spare, -1)))


def attend(
    queries: torch.Tensor, heads: HeadShape, rule: AttentionRule, blocks: QueryBlocks, cache: TorchCache
) -> torch.Tensor:
    """queries [T, num_heads, head_dim], T > 0 → float32 [T, num_heads * value_dim]."""
    group = heads.num_heads // heads.kv_heads
    # [blocks, kv_heads, QUERY_BLOCK * group, head_dim]: places and heads that share a KV head are a product's rows
    rows = queries[blocks.tokens].float().mul_(rule.scale)
    rows = rows.view(-1, QUERY_BLOCK, heads.kv_heads, group, heads.head_dim).transpose(1, 2)
    rows = rows.reshape(-1, heads.kv_heads, QUERY_BLOCK * group, heads.head_dim)
    waves = blocks.waves(rule.window, heads.kv_heads)
    out = torch.cat([_attend_wave(wave, rows[wave.blocks], rule, cache) for wave in waves])
    # [blocks, kv_heads, QUERY_BLOCK, group, value_dim] → [T, num_heads * value_dim]
    return out.transpose(1, 2).reshape(len(blocks.real), -1)[blocks.real]


def _attend_wave(wave: _Wave, queries: torch.Tensor, rule: AttentionRule, cache: TorchCache) -> torch.Tensor:
    """queries float32 [q, kv_heads, rows, D] → float32 [q, kv_heads, QUERY_BLOCK, group, D]."""
    kv_heads, num_rows = queries.shape[1], queries.shape[2]
    shape = (wave.num_pieces, kv_heads, QUERY_BLOCK, num_rows // QUERY_BLOCK)
    num_products = wave.num_pieces * kv_heads  # the rest fills the last group
    keys, values = cache.read(wave.runs)
    scores = grouped_products(queries.flatten(0, 1)[wave.queries], keys.transpose(1, 2))
    if rule.softcap is not None:
        scores = softcapped(scores, rule.softcap)
    visible = scores[:num_products].view(*shape, KEY_TILE)
    visible.masked_fill_(wave.hidden, -torch.inf)
    peaks = scores.amax(dim=-1, keepdim=True)
    # A tile that a query doesn't see has no peak; its weights are exp(-inf) = 0 whatever is subtracted.
    weights = apply(torch.exp, scores.sub_(peaks.clamp(min=torch.finfo(torch.float32).min)))
    sums = row_sums(weights)
    partial = grouped_products(weights, values)
    return _merged(
        wave,
        peaks[:num_products].view(shape),
        sums[:num_products].view(shape),
        partial[:num_products].view(*shape, -1),
        rule.sinks,
    )


def _merged(
    wave: _Wave, peaks: torch.Tensor, sums: torch.Tensor, partial: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Pieces to results: peaks and sums [n, kv_heads, QB, G], partial [n, kv_heads, QB, G, D] → as partial, n now q."""
    tile_peaks = peaks[wave.merge_order].masked_fill_(wave.absent, -torch.inf)
    peak = tile_peaks.amax(dim=0)
    total = torch.zeros_like(peak)
    if sinks is not None:
        sink = sinks.float().view(1, peak.shape[1], 1, peak.shape[3])
        peak = torch.maximum(peak, sink)
        total += apply(torch.exp, sink - peak)
    weights = apply(torch.exp, tile_peaks - peak)
    out = partial.new_zeros((len(peak), *partial.shape[1:]))
    for step, pieces in enumerate(wave.merge_order):
        total += weights[step] * sums[pieces]
        out += weights[step][..., None] * partial[pieces]
    return out / total[..., None]
