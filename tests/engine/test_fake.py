"""The fake engine: its answer depends on every token of the context, read where the block table says, and no more."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from engine.batch import Batch, pad_tables
from engine.fake import EOS_TOKEN_ID, PRINTABLE, FakeEngine
from engine.sampler import SampleRow, sample
from engine.sampling_params import SamplingParams

BLOCK = 4
Piece = tuple[list[int], int, list[int]]
"""all tokens of a sequence, how many are computed, its block table"""


def batch(*pieces: Piece, every: bool = False) -> Batch:
    """Compute what is left of each piece; logits of each row's last token, or of every token."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    wanted: list[int] = []
    starts = [0]
    for tokens, computed, table in pieces:
        for position in range(computed, len(tokens)):
            token_ids.append(tokens[position])
            positions.append(position)
            slots.append(table[position // BLOCK] * BLOCK + position % BLOCK)
        wanted += range(starts[-1], len(token_ids)) if every else [len(token_ids) - 1]
        starts.append(len(token_ids))
    return Batch(
        token_ids=np.array(token_ids, dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        slot_mapping=np.array(slots, dtype=np.int64),
        query_starts=np.array(starts, dtype=np.int32),
        context_lens=np.array([len(tokens) for tokens, _, _ in pieces], dtype=np.int32),
        block_tables=pad_tables([table for _, _, table in pieces]),
        logit_indices=np.array(wanted, dtype=np.int64),
    )


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def engine(num_blocks: int = 32, **options: object) -> FakeEngine:
    return FakeEngine(num_blocks=num_blocks, block_size=BLOCK, **options)  # type: ignore[arg-type]


def whole(tokens: list[int], table: list[int] | None = None) -> torch.Tensor:
    return engine().forward(batch((tokens, 0, table or [3, 1, 7, 9])))[0]


TOKENS = [72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100]


def test_chunks_blocks_and_company_change_nothing() -> None:
    expected = whole(TOKENS)
    assert torch.equal(whole(TOKENS, [0, 30, 2, 4]), expected)
    for cut in range(1, len(TOKENS)):
        fake = engine()
        fake.forward(batch((TOKENS[:cut], 0, [3, 1, 7])))
        assert torch.equal(fake.forward(batch((TOKENS, cut, [3, 1, 7])))[0], expected)
    fake = engine()
    logits = fake.forward(batch(([1, 2, 3], 0, [5]), (TOKENS, 0, [3, 1, 7]), ([9] * 6, 0, [8, 10])))
    assert torch.equal(logits[1], expected)
    assert logits.dtype == torch.float32
    assert logits.shape == (3, 260)


def test_logits_of_every_position_equal_those_of_prefixes() -> None:
    logits = engine().forward(batch(([5, 6], 0, [2]), (TOKENS, 0, [3, 1, 7]), every=True))
    for position in range(len(TOKENS)):
        assert torch.equal(logits[2 + position], whole(TOKENS[: position + 1]))


def test_every_token_and_its_place_matter() -> None:
    expected = whole(TOKENS)
    for position in range(len(TOKENS)):
        changed = list(TOKENS)
        changed[position] += 1
        assert not torch.equal(whole(changed), expected)
    for first, second in ((0, 1), (1, 5), (4, 8)):  # within a block, across, and whole blocks' starts
        swapped = list(TOKENS)
        swapped[first], swapped[second] = swapped[second], swapped[first]
        assert not torch.equal(whole(swapped), expected)


def test_wrong_stale_swapped_and_unwritten_blocks_change_the_answer() -> None:
    tokens, table = TOKENS[:10], [3, 1, 7]
    expected = whole(tokens)

    def resumed(fake: FakeEngine, read_table: list[int]) -> torch.Tensor:
        return fake.forward(batch((tokens, 9, read_table)))[0]

    def warmed() -> FakeEngine:
        fake = engine()
        fake.forward(batch((tokens[:9], 0, table)))
        return fake

    assert torch.equal(resumed(warmed(), table), expected)
    assert not torch.equal(resumed(warmed(), [1, 3, 7]), expected), "swapped"
    assert not torch.equal(resumed(warmed(), [3, 2, 7]), expected), "never written"
    assert not torch.equal(resumed(engine(), table), expected), "nothing written"
    stale = warmed()
    stale.forward(batch(([1] * 4, 0, [1])))
    assert not torch.equal(resumed(stale, table), expected), "written by another sequence"
    moved = warmed()
    moved.forward(batch(([9] * 4 + tokens[:4], 0, [0, 3])))
    assert not torch.equal(resumed(moved, table), expected), "the same tokens, written for another place"
    corrupt = warmed()
    corrupt.corrupt_block(3)
    assert not torch.equal(resumed(corrupt, table), expected), "corrupted"
    corrupt.corrupt_block(3)
    assert torch.equal(resumed(corrupt, table), expected), "corrupted twice is restored"
    shifted = warmed()
    same = batch((tokens, 9, table))
    same.slot_mapping[0] += 1
    assert not torch.equal(shifted.forward(same)[0], expected), "written beside its slot"
    unwritten_tail = engine()
    unwritten_tail.forward(batch((tokens[:8], 0, table)))
    assert not torch.equal(resumed(unwritten_tail, table), expected), "one slot short"


def generate(fake: FakeEngine, params: SamplingParams, count: int, seed: int = 1) -> list[int]:
    known = [72, 105]
    table = list(range(-(-(count + 2) // BLOCK)))
    for index in range(count):
        logits = fake.forward(batch((known, 0 if index == 0 else len(known) - 1, table)))
        (token_id,) = sample(logits, [SampleRow(params, seed, index, known, 2)]).token_ids
        assert token_id is not None
        known = [*known, token_id]
    return known


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_printable_varied_and_sometimes_ends(temperature: float) -> None:
    known = generate(engine(600), SamplingParams(temperature=temperature), 1200)
    counts = Counter(known)
    assert set(counts) <= {*PRINTABLE, EOS_TOKEN_ID}
    assert 0 < counts[EOS_TOKEN_ID] < 20
    entropy = -sum(n / len(known) * math.log(n / len(known)) for n in counts.values())
    assert entropy > 4.2  # of log 95 = 4.55
    assert generate(engine(600), SamplingParams(temperature=temperature), 50) == known[:52]


def test_seeds_spread_at_temperature_one() -> None:
    params = SamplingParams(temperature=1.0)
    assert len({tuple(generate(engine(), params, 12, seed)[2:]) for seed in range(40)}) == 40


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("disagreement", [0.0, 0.3, 1.0])
def test_a_draft_engine_disagrees_as_often_as_told(disagreement: float, temperature: float) -> None:
    contexts = np.random.default_rng(0).integers(32, 127, size=(1500, 3))
    pieces: list[Piece] = [(context.tolist(), 0, [index]) for index, context in enumerate(contexts)]
    params = SamplingParams(temperature=temperature)
    rows = [SampleRow(params, index, 0, tokens, 3) for index, (tokens, _, _) in enumerate(pieces)]
    target = engine(1500).forward(batch(*pieces))
    draft = engine(1500, disagreement=disagreement).forward(batch(*pieces))
    equal = np.mean(np.array(sample(target, rows).token_ids) == np.array(sample(draft, rows).token_ids))
    by_chance = disagreement / len(PRINTABLE)
    assert equal == pytest.approx(1 - disagreement + by_chance, abs=0.05 if 0 < disagreement < 1 else 0.015)
    assert disagreement > 0 or equal == 1


def test_a_failing_token_spoils_its_own_row_from_there_on() -> None:
    fake = engine(fail_on_token_ids=frozenset({66}))
    plain = engine()
    logits = fake.forward(batch((TOKENS, 0, [3, 1, 7]), ([65, 66, 67], 0, [5]), every=True))
    expected = plain.forward(batch((TOKENS, 0, [3, 1, 7]), ([65, 66, 67], 0, [5]), every=True))
    assert torch.equal(logits[: len(TOKENS) + 1], expected[: len(TOKENS) + 1])
    assert logits[len(TOKENS) + 1 :].isnan().all()
    assert fake.forward(batch(([65, 66, 67, 68], 3, [5]))).isnan().all(), "still in the context, read from the block"
    assert not fake.forward(batch(([65, 65, 67, 68], 0, [5]))).isnan().any(), "the block was written anew"


def test_what_is_out_of_range_raises() -> None:
    fake = engine(max_model_len=16)
    for bad in (
        batch(([260], 0, [0])),
        batch(([-1], 0, [0])),
        batch(([1], 0, [32])),
        batch(([1] * 17, 0, [0, 1, 2, 3, 4])),
    ):
        with pytest.raises(IndexError):
            fake.forward(bad)
    whole = batch(([1] * 6, 0, [0, 1]))
    short = dataclasses.replace(whole, block_tables=whole.block_tables[:, :1])
    with pytest.raises(IndexError, match="block table"):
        fake.forward(short)
    with pytest.raises(ValueError, match="disagreement"):
        FakeEngine(disagreement=1.5)
    with pytest.raises(ValueError, match="vocab_size"):
        FakeEngine(vocab_size=100)


def test_no_logits_wanted_still_writes() -> None:
    fake = engine()
    first = batch((TOKENS[:8], 0, [3, 1, 7]))
    first.logit_indices.resize(0, refcheck=False)
    assert fake.forward(first).shape == (0, 260)
    assert torch.equal(fake.forward(batch((TOKENS, 8, [3, 1, 7])))[0], whole(TOKENS))


def test_a_step_takes_the_time_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    engine(step_ms=20, token_us=500).forward(batch((TOKENS, 0, [3, 1, 7])))
    engine().forward(batch((TOKENS, 0, [3, 1, 7])))
    assert slept == [pytest.approx(0.020 + 0.0005 * len(TOKENS))]


def test_info() -> None:
    info = FakeEngine(num_blocks=9, block_size=8, max_sequences=7, max_model_len=66).info
    assert (info.fingerprint, info.vocab_size, info.max_model_len) == ("fake-1", 260, 66)
    assert (info.num_blocks, info.block_size, info.max_sequences) == (9, 8, 7)
