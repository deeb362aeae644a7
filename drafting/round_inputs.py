"""What a round feeds to the engine: packed rows, or, where every row is a few tokens, a few numbers for each of them.

Most rounds are of the second kind. They are short enough that arrays made for them would be felt, so block tables are
kept from round to round and only what has been added to them is written.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from drafting.mirror import Mirror
from engine import noise
from engine.batch import Batch, Choices, DecodeRows, pad_tables

_FIRST_ROWS = 16
_FIRST_WIDTH = 64
"""blocks"""


def choices_of(mirrors: Sequence[Mirror]) -> Choices:
    """How the next token of each is chosen."""
    return Choices(
        [mirror.temperature for mirror in mirrors],
        [mirror.seed for mirror in mirrors],
        [mirror.known - mirror.num_prompt for mirror in mirrors],
    )


def packed(rows: Sequence[tuple[Mirror, int]], block_size: int, vocab_size: int) -> Batch:
    """Of each mirror so many tokens, from `computed` on; only rows that reach their last token want logits, of that
    one.
    """
    token_ids: list[int] = []
    positions, slots, tables, wanted = [], [], [], []
    for mirror, count in rows:
        start, end = mirror.computed, mirror.computed + count
        token_ids += [mirror.token(position) for position in range(start, end)]
        table = np.array(mirror.block_ids, np.int32)
        at = np.arange(start, end)
        positions.append(at)
        slots.append(table[at // block_size].astype(np.int64) * block_size + at % block_size)
        tables.append(table)
        if end == mirror.known:
            wanted.append(len(token_ids) - 1)
    # The target's vocabulary may be padded further than ours; such an id is a guess's loss, not an error.
    tokens = np.array(token_ids, np.int64)
    tokens[tokens >= vocab_size] = 0
    lengths = np.array([count for _, count in rows])
    return Batch(
        token_ids=tokens.astype(np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        slot_mapping=np.concatenate(slots),
        query_starts=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        context_lens=np.array([mirror.computed + count for mirror, count in rows], np.int32),
        block_tables=pad_tables(tables),
        logit_indices=np.array(wanted, np.int64),
    )


class TokenRows:
    """Rounds of a few tokens per mirror, its last ones. A mirror's slot is its place in the round."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._tables = np.zeros((_FIRST_ROWS, _FIRST_WIDTH), np.int32)
        self._written: list[tuple[list[int], int]] = [([], 0)] * _FIRST_ROWS
        """by slot: whose block ids are there, and how many; such a list grows or is replaced, nothing else"""

    def of(self, rows: Sequence[tuple[Mirror, int]]) -> DecodeRows:
        """Of each mirror so many tokens. Valid until the next call."""
        self._make_room(len(rows), max(len(mirror.block_ids) for mirror, _ in rows))
        numbers: list[int] = []
        temperatures: list[float] = []
        for slot, (mirror, count) in enumerate(rows):
            self._write(slot, mirror.block_ids)
            known, num_prompt, seed = mirror.known, mirror.num_prompt, noise.signed(mirror.seed)
            for position in range(known - count, known):
                token_id = mirror.token(position)
                fed = token_id if token_id < self._vocab_size else 0
                numbers += (slot, position, fed, seed, position + 1 - num_prompt)
                temperatures.append(mirror.temperature)
        return DecodeRows(numbers, temperatures, self._tables)

    def _write(self, slot: int, block_ids: list[int]) -> None:
        whose, count = self._written[slot]
        start = count if whose is block_ids else 0
        if start < len(block_ids):
            self._tables[slot, start : len(block_ids)] = block_ids[start:]
        self._written[slot] = block_ids, len(block_ids)

    def _make_room(self, num_rows: int, width: int) -> None:
        rows, columns = self._tables.shape
        if num_rows <= rows and width <= columns:
            return
        rows = 2 * num_rows if num_rows > rows else rows
        columns = 2 * width if width > columns else columns
        self._tables = np.zeros((rows, columns), np.int32)
        self._written = [([], 0)] * rows
