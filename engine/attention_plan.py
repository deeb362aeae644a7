"""From a batch to the fixed-shape pieces that attention multiplies.

Tokens of one row that follow each other form *query blocks* of at most QUERY_BLOCK; keys come in *tiles* of KEY_TILE
positions, aligned to the sequence's start. A *piece* is one query block against one tile:

    positions        0 ........ 63 | 64 ....... 127 | 128 ...
    row 0, block 0   [  tile 0   ]   [   tile 1   ]              pieces 0, 1
    row 0, block 1   [  tile 0   ]   [   tile 1   ]  [ tile 2 ]  pieces 2, 3, 4
    row 1, block 0   [  tile 0   ]                               piece  5

Every piece has the same shape, so a token's products have the same bits in any batch; its tiles are merged in the order
of their positions. Keys that a query may not see weigh exactly 0, so it doesn't matter who shares its block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from engine.batch import Batch
from engine.kernels.ops import StepPlan
from engine.kernels.torch_tiles import PRODUCTS_PER_GROUP
from engine.kv_cache import places
from engine.step_plan import StepPlanBuilder

QUERY_BLOCK = 8
"""Queries per piece. A decode row has one and pays for all, a verified draft of four has five, and a prefill fetches
its keys once per block: with eight, fetching and multiplying cost about the same."""
KEY_TILE = 64
"""Key positions per piece; block_size must divide it."""

_MAX_WAVE_PRODUCTS = 512
"""Pieces × KV heads computed at a time: 8 MiB of keys at head_dim 64, which stays in cache."""


class Wave:
    """Some query blocks with all their pieces (n), computed at a time."""

    def __init__(
        self,
        query_blocks: slice,
        piece_query_block: torch.Tensor,
        kv_blocks: torch.Tensor,
        partly_hidden: torch.Tensor,
        hidden: torch.Tensor,
        merge_order: torch.Tensor,
        absent: torch.Tensor,
    ) -> None:
        self.query_blocks = query_blocks
        self.num_pieces = len(piece_query_block)
        self.partly_hidden = partly_hidden
        """int64 [m]: the pieces in which a query may not see every key; mostly the last of each query block"""
        self.hidden = hidden
        """bool [m, QUERY_BLOCK, KEY_TILE]: which keys"""
        self.merge_order = merge_order
        """int64 [tiles, query blocks]: each query block's pieces in order; where it has no more, its first"""
        self.absent = absent
        """bool, as merge_order: there is no such piece"""
        self._piece_query_block = piece_query_block
        """int64 [n], relative to the wave's first query block"""
        self._kv_blocks = kv_blocks
        """int64 [n, KEY_TILE / block_size]: the cache blocks of each piece's tile"""
        self._product_indices: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def product_indices(self, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Which operands each product takes, for layers of so many heads; products are (piece, head), filled up to
        whole groups with repetitions of the first.

        Returns query rows int64 [products], each query_block * kv_heads + head, and cache runs
        int64 [products * KEY_TILE / block_size], each block_id * kv_heads + head.
        """
        if kv_heads not in self._product_indices:
            heads = torch.arange(kv_heads, device=self._kv_blocks.device)
            queries = (self._piece_query_block[:, None] * kv_heads + heads).view(-1)
            runs = (self._kv_blocks[:, None, :] * kv_heads + heads[:, None]).view(len(queries), -1)
            spare = -len(queries) % PRODUCTS_PER_GROUP
            queries = torch.cat((queries, queries[:1].expand(spare)))
            runs = torch.cat((runs, runs[:1].expand(spare, -1)))
            self._product_indices[kv_heads] = queries, runs.view(-1)
        return self._product_indices[kv_heads]


@dataclass(frozen=True, slots=True)
class _QueryBlocks:
    """A batch's tokens in query blocks; n of them."""

    row: np.ndarray
    """[n]: the batch's row of each"""
    tokens: np.ndarray
    """[n, QUERY_BLOCK]: a place without a token of its own repeats the block's last, so that every query sees a key"""
    positions: np.ndarray
    """int64, as tokens"""


class AttentionPlan:
    """One batch's index arrays, shared by all layers with the same window, and each made when first asked for."""

    def __init__(self, batch: Batch, num_padded: int, block_size: int, max_kv_heads: int, device: torch.device) -> None:
        """`num_padded`: tokens after padding, at least the batch's own."""
        self._batch = batch
        self._num_padded = num_padded
        self._block_size = block_size
        self._device = device
        self._max_pieces = max(1, _MAX_WAVE_PRODUCTS // max_kv_heads)
        self._waves: dict[int | None, list[Wave]] = {}

        self.num_tokens = len(batch.token_ids)
        self._places: dict[int, torch.Tensor] = {}

    @cached_property
    def step_plan(self) -> StepPlan:
        """The batch for the C++ kernels, which cut it themselves."""
        return StepPlanBuilder(self._device).build(self._batch)

    @cached_property
    def query_tokens(self) -> torch.Tensor:
        """int64 [query blocks * QUERY_BLOCK]: the flat token at each place"""
        return self._to_device(self._blocks.tokens.reshape(-1).astype(np.int64))

    @cached_property
    def token_places(self) -> torch.Tensor:
        """int64 [num_padded]: where each token's result lies; padding tokens take any"""
        tokens = self._blocks.tokens.reshape(-1)
        token_places = np.zeros(self._num_padded, dtype=np.int64)
        token_places[tokens[::-1]] = np.arange(tokens.size - 1, -1, -1)
        return self._to_device(token_places)

    @cached_property
    def _slots(self) -> torch.Tensor:
        return self._to_device(self._batch.slot_mapping.astype(np.int64))

    @cached_property
    def _blocks(self) -> _QueryBlocks:
        if KEY_TILE % self._block_size:
            raise ValueError(f"block_size {self._block_size} must divide {KEY_TILE}")
        starts, ends = self._batch.query_starts[:-1], self._batch.query_starts[1:]
        blocks_per_row = -(-(ends - starts) // QUERY_BLOCK)
        row = np.repeat(np.arange(len(starts)), blocks_per_row)
        ordinal = np.arange(len(row)) - np.repeat(np.cumsum(blocks_per_row) - blocks_per_row, blocks_per_row)
        first_token = starts[row] + ordinal * QUERY_BLOCK
        end_token = np.minimum(first_token + QUERY_BLOCK, ends[row])
        tokens = np.minimum(first_token[:, None] + np.arange(QUERY_BLOCK), end_token[:, None] - 1)
        return _QueryBlocks(row, tokens, self._batch.positions[tokens].astype(np.int64))

    def places(self, kv_heads: int) -> torch.Tensor:
        """Where a layer of so many heads writes the batch's tokens: see `kv_cache.places`."""
        if kv_heads not in self._places:
            self._places[kv_heads] = places(self._slots, kv_heads, self._block_size)
        return self._places[kv_heads]

    def waves(self, window: int | None) -> list[Wave]:
        """The pieces of a layer whose queries see their last `window` positions, themselves included (None: all)."""
        if window not in self._waves:
            self._waves[window] = list(self._build_waves(window))
        return self._waves[window]

    def _build_waves(self, window: int | None) -> list[Wave]:
        last_tile = self._blocks.positions.max(axis=1) // KEY_TILE
        first_tile = np.zeros_like(last_tile)
        if window is not None:
            first_tile = np.maximum(0, self._blocks.positions.min(axis=1) - window + 1) // KEY_TILE
        num_tiles = last_tile - first_tile + 1
        ends = np.cumsum(num_tiles)
        waves, start = [], 0
        while start < len(num_tiles):
            limit = ends[start] - num_tiles[start] + self._max_pieces
            stop = max(start + 1, int(np.searchsorted(ends, limit, side="right")))
            waves.append(self._build_wave(slice(start, stop), first_tile[start:stop], num_tiles[start:stop], window))
            start = stop
        return waves

    def _build_wave(self, blocks: slice, first_tile: np.ndarray, num_tiles: np.ndarray, window: int | None) -> Wave:
        query_block = np.repeat(np.arange(len(num_tiles)), num_tiles)
        first_piece = np.cumsum(num_tiles) - num_tiles
        tile = first_tile[query_block] + np.arange(len(query_block)) - first_piece[query_block]

        key_positions = tile[:, None] * KEY_TILE + np.arange(KEY_TILE)
        distance = self._blocks.positions[blocks][query_block][:, :, None] - key_positions[:, None, :]
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)

        partly_hidden = np.flatnonzero(hidden.any(axis=(1, 2)))

        steps = np.arange(num_tiles.max())[:, None]
        absent = steps >= num_tiles
        return Wave(
            query_blocks=blocks,
            piece_query_block=self._to_device(query_block),
            kv_blocks=self._to_device(self._tile_blocks(self._blocks.row[blocks][query_block], tile)),
            partly_hidden=self._to_device(partly_hidden),
            hidden=self._to_device(hidden[partly_hidden]),
            merge_order=self._to_device(np.where(absent, 0, steps) + first_piece),
            absent=self._to_device(absent),
        )

    def _tile_blocks(self, rows: np.ndarray, tiles: np.ndarray) -> np.ndarray:
        """Cache block ids of each (row, tile), int64 [n, KEY_TILE / block_size]; beyond the context the row's last."""
        per_tile = KEY_TILE // self._block_size
        needed = -(-self._batch.context_lens // self._block_size)
        index = np.minimum(tiles[:, None] * per_tile + np.arange(per_tile), needed[rows][:, None] - 1)
        return self._batch.block_tables[rows[:, None], index].astype(np.int64)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
