"""The engine's port: one step's packed inputs in, logits out.

A batch holds rows; a row is the tokens of one sequence that this step computes. All rows lie flat, one after the other:

    token_ids      [ a0 a1 a2 | b7 | c4 c5 ]         T = 6 tokens, R = 3 rows
    positions      [  0  1  2 |  7 |  4  5 ]
    query_starts   [ 0, 3, 4, 6 ]                    row r is tokens query_starts[r] : query_starts[r + 1]
    context_lens   [ 3, 8, 6 ]                       keys visible to a row's last token, itself included
    slot_mapping   block_id * block_size + offset    where each token's KV goes

Causality: a token at position p sees positions 0 … p of its own row's block table. Rows of one batch never share a
block that one of them writes. Before attention reads, every token's KV of the batch is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's inputs; shapes in the module's text."""

    token_ids: np.ndarray
    """int32 [T]"""
    positions: np.ndarray
    """int32 [T]"""
    slot_mapping: np.ndarray
    """int64 [T]"""
    query_starts: np.ndarray
    """int32 [R + 1]"""
    context_lens: np.ndarray
    """int32 [R]"""
    block_tables: np.ndarray
    """int32 [R, B]: a row's first ceil(context_len / block_size) entries are its block ids, the rest is any id ≥ 0"""
    logit_indices: np.ndarray
    """int64 [L], ascending: the flat tokens whose logits are wanted"""


def pad_tables(tables: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
    """`Batch.block_tables` from one list of block ids per row."""
    padded = np.zeros((len(tables), max(map(len, tables), default=0)), np.int32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    return padded


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is and how much it holds."""

    fingerprint: str
    """Everything that can change a bit of the logits: route, dtype, instruction set or GPU, versions."""
    vocab_size: int
    max_model_len: int
    """most tokens of prompt and output together"""
    num_blocks: int
    block_size: int
    """tokens per block"""
    max_sequences: int


class Engine(Protocol):
    """One model that runs one batch. Not thread-safe: one thread owns it."""

    @property
    def info(self) -> EngineInfo: ...

    def forward(self, batch: Batch) -> torch.Tensor:
        """Write the batch's KV and return float32 logits [L, vocab_size], on the engine's device, valid until the next
        call.
        """
        ...
