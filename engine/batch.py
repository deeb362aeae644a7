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
from typing import TYPE_CHECKING, Protocol, runtime_checkable

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


@dataclass(slots=True)
class DecodeRows:
    """Rows that compute one token each, of which nothing is wanted but the next one.

    Several may be of one slot, at positions one after the other: each sees those before it. Plain numbers: a step of
    few rows is so short that arrays made for it are felt.
    """

    numbers: list[int]
    """row after row: its slot, its token's position, the token's id, the choice's seed as a signed 64-bit number, the
    output index of the next token"""
    temperatures: list[float]
    """per row; 0 is greedy"""
    block_tables: np.ndarray
    """int32 [slots, B]: of every slot, as in `Batch`; one array for as long as it is wide enough"""
    bell: int = -1
    """an eventfd(2) to add 1 to once the interpreter's lock is let go; -1: none. Who waits for it may then run beside
    the step, where one that is woken before would take the lock first"""


@dataclass(slots=True)
class Choices:
    """How the next tokens of a batch's wanted logits are chosen: by noise alone, or by none."""

    temperatures: list[float]
    """[L]; 0 is greedy"""
    seeds: list[int]
    """[L]: the choices'"""
    output_indices: list[int]
    """[L]"""


@dataclass(slots=True)
class LaunchedRows:
    """A step whose tokens nobody waits for. Some of its own tokens may be those that the step before is choosing."""

    batch: Batch
    """the engine's from here on"""
    choices: Choices
    slots: np.ndarray
    """int64 [L], each once: under which slot the token chosen from a wanted logit is remembered"""
    fed_at: np.ndarray
    """int64 [F]: flat tokens of the batch whose ids the host doesn't know"""
    fed_slots: np.ndarray
    """int64 [F]: the slots under which they were remembered"""


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


@runtime_checkable
class ChoosingEngine(Protocol):
    """An engine that can go on to the tokens: those that `engine.sampler` would choose from the logits, -1 where it
    couldn't because they aren't finite. Most logits needn't be computed for that.
    """

    @property
    def chooses(self) -> bool:
        """Whether this one does."""
        ...

    def choose(self, batch: Batch, choices: Choices) -> list[int]:
        """Write the batch's KV and choose a token for each wanted logit."""
        ...

    def decode(self, rows: DecodeRows) -> list[int]:
        """The same for rows of one token, one token for each."""
        ...


class Pending(Protocol):
    """The tokens of a launched step, one for each wanted logit, -1 where none could be chosen."""

    def wait(self) -> None:
        """Return when they are there; from any thread. Raises what went wrong on the device."""
        ...

    def token_ids(self) -> list[int]:
        """Waits for them, and for nothing that was launched later."""
        ...


@runtime_checkable
class AheadEngine(Protocol):
    """An engine on a device that works by itself: steps are launched, and their tokens stay there for the next one.

    The tokens are those that `engine.sampler` would choose. While a launched step's tokens aren't there, no method but
    `launch` is called, and at most two steps are launched.
    """

    @property
    def runs_ahead(self) -> bool:
        """Whether this one does."""
        ...

    def launch(self, rows: LaunchedRows) -> Pending:
        """Have the batch's KV written and a token chosen for each wanted logit, after all that was launched before."""
        ...
