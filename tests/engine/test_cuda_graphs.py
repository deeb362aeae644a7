"""Graphs of decode steps, recorded by a stand-in that calls the function again: padding and reuse change no bit.

The implementation of the operations is plain torch. What a real graph adds, memory that must not move, is asserted by
addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from bench.synthetic import TINY, random_decoder
from engine.batch import Batch, pad_tables
from engine.cuda_graphs import (
    Graph,
    GraphedSteps,
    GraphLimits,
    RepeatingRecorder,
    in_own_workspace,
    is_plain_decode,
    padded,
    row_buckets,
)
from engine.decoder import Decoder
from engine.kernels.ops import StepPlan
from engine.kernels.torch_attention import TorchCache
from engine.kernels.torch_ops import TorchOps
from engine.run_ahead import Fed, TokenFeed
from engine.step_plan import StepPlanBuilder

CPU = torch.device("cpu")
BLOCK_SIZE = 16
MAX_MODEL_LEN = 1300
TABLES = [list(range(first, first + 82)) for first in range(0, 82 * 7, 82)]
"""blocks of seven sequences"""
SCRATCH = 82 * 7
LIMITS = GraphLimits(max_sequences=6, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE, scratch_block=SCRATCH)
CONTEXTS = [3, 17, 40, 511, 512, 530, 1030]
"""tokens known before the step"""


@dataclass
class CountingRecorder:
    """As RepeatingRecorder; keeps what it recorded."""

    functions: list[Callable[[], torch.Tensor]] = field(default_factory=list)

    def record(self, function: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        self.functions.append(function)
        return RepeatingRecorder().record(function)


@dataclass
class Rig:
    """A decoder with seven sequences in its cache; every rig holds the same."""

    decoder: Decoder
    caches: list[TorchCache]
    steps: GraphedSteps
    recorder: CountingRecorder
    feed: TokenFeed
    plans: list[StepPlan]
    """what the recorded forward was called with"""

    def eager(self, batch: Batch) -> torch.Tensor:
        return self.decoder.forward(StepPlanBuilder(CPU).build(batch)).clone()


def token(sequence: int, position: int) -> int:
    return (sequence * 31 + position * 7) % 199 + 2


def make_batch(rows: list[tuple[int, int, int]], logits: str = "all") -> Batch:
    """rows: (sequence, first position, end)."""
    flat = [(index, position) for index, first, end in rows for position in range(first, end)]
    ends = np.cumsum([0] + [end - first for _, first, end in rows])
    return Batch(
        token_ids=np.array([token(*pair) for pair in flat], np.int32),
        positions=np.array([position for _, position in flat], np.int32),
        slot_mapping=np.array(
            [TABLES[index][at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for index, at in flat], np.int64
        ),
        query_starts=ends.astype(np.int32),
        context_lens=np.array([end for _, _, end in rows], np.int32),
        block_tables=pad_tables([TABLES[index][: -(-end // BLOCK_SIZE)] for index, _, end in rows]),
        logit_indices=np.arange(len(flat)) if logits == "all" else (ends[1:] - 1).astype(np.int64),
    )


def decode_batch(*sequences: int, further: int = 0) -> Batch:
    return make_batch([(index, CONTEXTS[index] + further, CONTEXTS[index] + further + 1) for index in sequences])


@pytest.fixture
def rig() -> Rig:
    torch.set_num_threads(1)
    decoder, caches = random_decoder(
        TINY, TorchOps(CPU), torch.bfloat16, CPU, MAX_MODEL_LEN, num_blocks=SCRATCH + 1, block_size=BLOCK_SIZE
    )
    recorder, feed, plans = CountingRecorder(), TokenFeed(7, CPU), []
    own = in_own_workspace(decoder, LIMITS.max_sequences, torch.bfloat16, CPU)

    def recorded(plan: StepPlan) -> torch.Tensor:
        plans.append(plan)
        return own(plan)

    steps = GraphedSteps(decoder.forward, recorded, recorder, StepPlanBuilder(CPU), CPU, LIMITS, feed)
    own_caches = [cache for cache in caches if isinstance(cache, TorchCache)]
    made = Rig(decoder, own_caches, steps, recorder, feed, plans)
    random = torch.Generator().manual_seed(5)
    for cache in own_caches:  # the sequences' keys and values so far
        cache.keys.normal_(generator=random)
        cache.values.normal_(generator=random)
    return made


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.shape == b.shape
    assert torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("sequences", [(0,), (2, 1), (0, 1, 2), (3, 0, 5, 1, 2), (5, 4, 3, 2, 1, 0), (6,), (1, 6, 3)])
def test_a_replay_has_the_bits_of_the_step(rig: Rig, sequences: tuple[int, ...]) -> None:
    batch = decode_batch(*sequences)
    expected = rig.eager(batch)
    assert_same(rig.steps.forward(batch), expected)
    assert len(rig.recorder.functions) == rig.steps.num_graphs == 1
    (plan, *_), num_rows = rig.plans, len(sequences)
    assert len(plan.token_ids) == next(size for size in row_buckets(6) if size >= num_rows)
    assert expected.std() > 0.1


def test_graphs_are_recorded_once_per_shape_and_reused_with_other_rows(rig: Rig) -> None:
    batches = [
        decode_batch(0, 1, 2),
        decode_batch(2, 0, 3, 1),  # fills what was padding before
        decode_batch(1, 2, 0, further=1),  # what held a row is padding again
        decode_batch(1),
        decode_batch(5, 1, 0),  # two partitions
        decode_batch(6, 5, 4),  # three: a graph for four
        decode_batch(4, 5, 1),
        decode_batch(0, 1, 2, further=1),
    ]
    for batch in batches:
        expected = rig.eager(batch)
        assert_same(rig.steps.forward(batch), expected)
    assert rig.steps.num_graphs == len(rig.recorder.functions) == 4
    assert {(len(plan.token_ids), plan.max_context_len) for plan in rig.plans} == {
        (4, 512),
        (1, 512),
        (4, 1024),
        (4, 2048),
    }


def test_a_graphs_memory_stays_where_it_is(rig: Rig) -> None:
    """Also when a larger step has made the decoder's other buffers grow."""
    rig.steps.forward(decode_batch(0, 1, 2))
    before = rig.plans[-1]
    logits = rig.steps.forward(decode_batch(0, 1))
    address = logits.data_ptr()
    expected = rig.eager(decode_batch(2, 1, 0))
    shared = rig.decoder.workspace
    rig.steps.forward(make_batch([(6, 0, 70)], logits="all"))
    assert rig.decoder.workspace is shared
    logits = rig.steps.forward(decode_batch(2, 1, 0))
    assert_same(logits, expected)
    after = rig.plans[-1]
    for name in ("token_ids", "positions", "slots", "query_starts", "context_lens", "block_tables", "logit_indices"):
        assert getattr(after, name).data_ptr() == getattr(before, name).data_ptr(), name
    rig.steps.forward(decode_batch(0, 1))
    assert rig.steps.forward(decode_batch(1, 2)).data_ptr() == address


def test_padding_reads_and_writes_the_scratch_block_alone(rig: Rig) -> None:
    expected = rig.eager(decode_batch(0, 1, 2))
    before = [(cache.keys.clone(), cache.values.clone()) for cache in rig.caches]
    assert_same(rig.steps.forward(decode_batch(0, 1, 2)), expected)
    changed: set[int] = set()
    for cache, (keys, values) in zip(rig.caches, before, strict=True):
        for now, then in ((cache.keys, keys), (cache.values, values)):
            changed.update((now != then).flatten(1).any(1).nonzero().flatten().tolist())
    assert changed == {SCRATCH}
    # What it holds is of no account, NaN included.
    for cache in rig.caches:
        cache.keys[SCRATCH] = cache.values[SCRATCH] = torch.nan
    assert_same(rig.steps.forward(decode_batch(0, 1, 2)), expected)


def test_steps_of_other_kinds_run_as_they_are(rig: Rig) -> None:
    for batch in (
        make_batch([(0, 3, 6)]),  # verification
        make_batch([(1, 10, 17), (2, 40, 41)], logits="last"),  # a chunk beside a decode row
        decode_batch(0, 1, 2, 3, 4, 5, 6),  # more rows than sequences were announced
        make_batch([(0, 0, 3)], logits="last"),
    ):
        expected = rig.eager(batch)
        assert_same(rig.steps.forward(batch), expected)
    assert rig.steps.num_graphs == 0
    assert is_plain_decode(decode_batch(0, 1))
    assert not is_plain_decode(make_batch([(0, 3, 6)]))


def test_recording_ahead(rig: Rig) -> None:
    rig.steps.record(max_rows=4, max_context=1300)
    assert rig.steps.num_graphs == 3 * 3  # 1, 2, 4 rows; 1, 2, 4 partitions
    for sequences in ((0,), (1, 6, 3)):
        batch = decode_batch(*sequences)
        expected = rig.eager(batch)
        assert_same(rig.steps.forward(batch), expected)
    assert rig.steps.num_graphs == 9


def test_fed_tokens_are_those_that_were_chosen_last(rig: Rig) -> None:
    """Two steps in a row, the second launched without its tokens: as if the host had known them."""
    first = rig.steps.forward(decode_batch(0, 1, 2))
    chosen = first.argmax(-1)
    rig.feed.remember(torch.tensor([4, 0, 2]), chosen)
    known = decode_batch(2, 0, 1, further=1)
    unknown = Batch(np.zeros(3, np.int32), *(getattr(known, name) for name in _FIELDS[1:]))
    told = Batch(chosen[[2, 0, 1]].numpy().astype(np.int32), *(getattr(known, name) for name in _FIELDS[1:]))
    expected = rig.eager(told)
    fed = Fed(at=torch.arange(3), slots=torch.tensor([2, 4, 0]))
    assert_same(rig.steps.forward(unknown, fed), expected)
    assert not torch.equal(rig.eager(unknown), expected)
    # And with some of them only, in a step that isn't recorded.
    mixed = make_batch([(3, 511, 514), (1, 18, 19)])
    told_ids = mixed.token_ids.copy()
    told_ids[3] = int(chosen[1])
    expected = rig.eager(Batch(told_ids, *(getattr(mixed, name) for name in _FIELDS[1:])))
    assert_same(rig.steps.forward(mixed, Fed(at=torch.tensor([3]), slots=torch.tensor([0]))), expected)


def test_without_a_feed_nothing_can_be_fed(rig: Rig) -> None:
    steps = GraphedSteps(rig.decoder.forward, rig.decoder.forward, rig.recorder, StepPlanBuilder(CPU), CPU, LIMITS)
    with pytest.raises(ValueError, match="no feed"):
        steps.forward(decode_batch(0), Fed(torch.zeros(1), torch.zeros(1)))


def test_padded_batches() -> None:
    batch = padded(decode_batch(0, 5), 4, 64, LIMITS)
    assert batch.positions.tolist() == [3, 530, 0, 0]
    assert batch.context_lens.tolist() == [4, 531, 1, 1]
    assert batch.slot_mapping.tolist()[2:] == [SCRATCH * BLOCK_SIZE] * 2
    assert batch.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert batch.block_tables.shape == (4, 64)
    assert batch.block_tables[1, :34].tolist() == TABLES[5][:34]
    assert (batch.block_tables[2:] == SCRATCH).all()
    assert {array.dtype for array in (batch.token_ids, batch.positions, batch.context_lens)} == {np.dtype(np.int32)}


@pytest.mark.parametrize(("most", "expected"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))])
def test_row_buckets(most: int, expected: tuple[int, ...]) -> None:
    assert row_buckets(most) == expected


_FIELDS = (
    "token_ids",
    "positions",
    "slot_mapping",
    "query_starts",
    "context_lens",
    "block_tables",
    "logit_indices",
)
