"""A round's inputs: what single tokens are told as says the same as the packed arrays."""

from __future__ import annotations

import random

import numpy as np

from drafting.mirror import Mirror
from drafting.round_inputs import TokenRows, choices_of, packed
from engine import noise
from tests.drafting.mirroring import mirror

SIZE = 4


def fresh(rng: random.Random, slot: int, **changes: int) -> Mirror:
    length = rng.randrange(1, 30)
    made = mirror([rng.randrange(300) for _ in range(length)], slot, num_prompt=rng.randrange(1, length + 1), **changes)
    made.guess = [rng.randrange(300) for _ in range(rng.randrange(3))]
    made.computed = made.known - 1
    made.block_ids = rng.sample(range(1000), -(-made.known // SIZE))
    return made


def check(rows: TokenRows, mirrors: list[Mirror], most: int = 1) -> None:
    """Each mirror feeds its last token, or up to `most`."""
    counts = [1 + number % most if one.known > most else 1 for number, one in enumerate(mirrors)]
    for one, count in zip(mirrors, counts, strict=True):
        one.computed = one.known - count
    told = rows.of(list(zip(mirrors, counts, strict=True)))
    batch = packed(list(zip(mirrors, counts, strict=True)), SIZE, 260)
    slots, positions, token_ids, seeds, indices = np.array(told.numbers).reshape(-1, 5).T.tolist()
    fed = np.repeat(np.arange(len(mirrors)), counts)
    assert slots == fed.tolist()
    assert positions == batch.positions.tolist()
    assert token_ids == batch.token_ids.tolist()
    for row, one in enumerate(mirrors):
        count = -(-one.known // SIZE)
        table = told.block_tables[row, :count].tolist()
        assert table == batch.block_tables[row, :count].tolist() == one.block_ids[:count]
    at = np.array(positions)
    of_tables = told.block_tables[slots, at // SIZE].astype(np.int64) * SIZE + at % SIZE
    assert of_tables.tolist() == batch.slot_mapping.tolist()
    choices, lasts = choices_of(mirrors), np.cumsum(counts) - 1
    assert [told.temperatures[last] for last in lasts] == choices.temperatures == [one.temperature for one in mirrors]
    assert [indices[last] for last in lasts] == choices.output_indices
    assert choices.output_indices == [one.known - one.num_prompt for one in mirrors]
    assert indices == [position + 1 - mirrors[row].num_prompt for row, position in zip(fed, positions, strict=True)]
    of_lasts = [seeds[last] for last in lasts]
    assert (
        noise.row_keys(of_lasts, choices.output_indices).tolist()
        == noise.row_keys(choices.seeds, choices.output_indices).tolist()
    )
    assert all(-(1 << 63) <= seed < 1 << 63 for seed in seeds)


def test_rounds_in_a_row() -> None:
    """Mirrors come, grow by blocks, lose and get others, change places, swap blocks with a branch; many, and long."""
    rng = random.Random(3)
    rows, mirrors = TokenRows(260), [fresh(rng, 0, seed=(1 << 64) - 2)]
    moves = 0
    for step in range(60):
        check(rows, rng.sample(mirrors, rng.randrange(1, len(mirrors) + 1)))
        check(rows, mirrors, 1 + step % 3)
        for one in mirrors:
            move = rng.randrange(5)
            if move == 0:
                one.block_ids = rng.sample(range(1000), len(one.block_ids))
            elif move < 4:
                one.guess.append(rng.randrange(300))
                one.computed += 1
                if -(-one.known // SIZE) > len(one.block_ids):
                    one.block_ids += [rng.randrange(1000)]
                    moves += 1
        if len(mirrors) > 1:
            mirrors[0].block_ids[:1] = mirrors[0].block_ids[:1]
            one, other = rng.sample(mirrors, 2)
            if -(-one.known // SIZE) == -(-other.known // SIZE):
                one.block_ids, other.block_ids = other.block_ids, one.block_ids
        if step % 3 == 0:
            mirrors.append(fresh(rng, len(mirrors), seed=rng.getrandbits(64)))
    assert moves > 50
    longest = mirrors[0]
    longest.guess += [7] * 400
    longest.computed = longest.known - 1
    longest.block_ids = list(range(-(-longest.known // SIZE)))
    check(rows, mirrors)
