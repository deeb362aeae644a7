"""Decode steps as CUDA graphs: a step of one token per row is recorded once per shape and replayed ever after.

Launching a decode step's few hundred kernels one by one costs the host more time than a small model costs the GPU; a
replay is one launch. A graph has fixed shapes and fixed memory, so a step is padded up to the next of a few shapes and
copied into buffers that its graph reads:

    rows          1, 2, 4, 8, … , max_sequences
    context       1, 2, 4, 8, … partitions of 512 keys: the width of block tables, and over how many programs attention
                  may spread

    token_ids     [ t0 t1 t2 |  0 ]       3 rows in a graph of 4: the padding row is a sequence of one token that
    positions     [ 17 80  4 |  0 ]       lives in the scratch block, which belongs to no sequence. It writes there,
    slots         [  .  .  . |  s ]       reads what it wrote, and nobody reads its logits.
    context_lens  [ 18 81  5 |  1 ]
    block_tables  [  .  .  . | s/b ]

A row's bits are its own whatever the other rows are and however wide the table is (`engine.kernels.ops`), so a replay
gives the bits of the step as it was. Steps of any other kind (chunks, verification, logits of some rows only) run as
they are.

Graphs keep nothing but the buffers above and a workspace of the decoder's that never grows: memory that a graph uses
must stay where it was when it was recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from engine.batch import Batch
from engine.decoder import Decoder, Workspace
from engine.kernels.ops import StepPlan
from engine.run_ahead import Fed, TokenFeed
from engine.step_plan import StepPlanBuilder

PARTITION = 512
"""keys; as attention partitions them"""

Forward = Callable[[StepPlan], torch.Tensor]


class Graph(Protocol):
    """A recorded function."""

    def replay(self) -> None:
        """Run it again, on what its memory holds now; queued, not waited for."""
        ...


class Recorder(Protocol):
    """How functions are recorded."""

    def record(self, function: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        """The function's graph and the tensor that replays write to, which holds nothing yet before the first."""
        ...


class CudaRecorder:
    """Graphs of the current CUDA device; all share one pool, as they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        # Once as it is, on a stream of its own: kernels are compiled and libraries set up, which can't be recorded.
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            function()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls are recorded and restricted: another one may wait for the tokens of a step meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = function()
        return graph, result


class RepeatingRecorder:
    """For devices without graphs: a replay calls the function again and puts the result where the first one lay."""

    def record(self, function: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        result = function()
        return _Repeated(function, result), result


@dataclass(frozen=True, slots=True)
class _Repeated:
    function: Callable[[], torch.Tensor]
    result: torch.Tensor

    def replay(self) -> None:
        again = self.function()
        if again.data_ptr() != self.result.data_ptr():
            self.result.copy_(again)


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """What steps can be."""

    max_sequences: int
    max_model_len: int
    block_size: int
    scratch_block: int
    """a block of the cache that no sequence is ever given"""


@dataclass(frozen=True, slots=True)
class _Recorded:
    graph: Graph
    plan: StepPlan
    logits: torch.Tensor


def row_buckets(max_sequences: int) -> tuple[int, ...]:
    """1, 2, 4, … and max_sequences."""
    buckets = [1]
    while buckets[-1] < max_sequences:
        buckets.append(min(2 * buckets[-1], max_sequences))
    return tuple(buckets)


def padded(batch: Batch, num_rows: int, num_blocks: int, limits: GraphLimits) -> Batch:
    """A batch of decode rows with more rows and wider block tables; padding rows as in the module's text."""
    extra = num_rows - len(batch.context_lens)
    tables = np.full((num_rows, num_blocks), limits.scratch_block, np.int32)
    kept = batch.block_tables[:, :num_blocks]
    tables[: len(kept), : kept.shape[1]] = kept
    return Batch(
        token_ids=_extended(batch.token_ids, extra, 0),
        positions=_extended(batch.positions, extra, 0),
        slot_mapping=_extended(batch.slot_mapping, extra, limits.scratch_block * limits.block_size),
        query_starts=np.arange(num_rows + 1, dtype=np.int32),
        context_lens=_extended(batch.context_lens, extra, 1),
        block_tables=tables,
        logit_indices=np.arange(num_rows, dtype=np.int64),
    )


def _extended(values: np.ndarray, extra: int, value: int) -> np.ndarray:
    return np.concatenate((values, np.full(extra, value, values.dtype)))


def is_plain_decode(batch: Batch) -> bool:
    """One token per row, and the logits of all."""
    return 0 < len(batch.context_lens) == len(batch.token_ids) == len(batch.logit_indices)


def in_own_workspace(decoder: Decoder, max_rows: int, dtype: torch.dtype, device: torch.device) -> Forward:
    """The decoder's forward with buffers of its own, which never grow: for steps of at most max_rows tokens."""
    own = Workspace(decoder.spec, dtype, device)
    own.reserve(max_rows, max_rows)

    def forward(plan: StepPlan) -> torch.Tensor:
        shared, decoder.workspace = decoder.workspace, own
        try:
            return decoder.forward(plan)
        finally:
            decoder.workspace = shared

    return forward


class GraphedSteps:
    """Steps of one decoder: graphs for plain decoding, as they are otherwise. Not thread-safe."""

    def __init__(
        self,
        eager: Forward,
        recorded: Forward,
        recorder: Recorder,
        plans: StepPlanBuilder,
        device: torch.device,
        limits: GraphLimits,
        feed: TokenFeed | None = None,
    ) -> None:
        """`recorded` computes what `eager` does, in memory that stays where it is (`in_own_workspace`)."""
        self._eager = eager
        self._forward = recorded
        self._recorder = recorder
        self._plans = plans
        self._device = device
        self._limits = limits
        self._feed = feed
        self._row_buckets = row_buckets(limits.max_sequences)
        self._graphs: dict[tuple[int, int], _Recorded] = {}

    @property
    def num_graphs(self) -> int:
        """How many have been recorded."""
        return len(self._graphs)

    @torch.inference_mode()
    def forward(self, batch: Batch, fed: Fed | None = None) -> torch.Tensor:
        """Logits float32 [L, vocab_size], valid until the next call; `fed` tokens come from the feed."""
        return self.prepare(batch, fed)()

    def prepare(self, batch: Batch, fed: Fed | None = None) -> Callable[[], torch.Tensor]:
        """Stage a step now; calling what is returned, once and in the order of staging, runs it and gives its logits.

        Of steps that are staged and not run there may be two.
        """
        if fed is not None and self._feed is None:
            raise ValueError("tokens are to be fed, but there is no feed")
        if is_plain_decode(batch) and len(batch.token_ids) <= self._limits.max_sequences:
            num_rows = len(batch.token_ids)
            bucket = next(size for size in self._row_buckets if size >= num_rows)
            needed = -(-int(batch.context_lens.max()) // PARTITION)
            shape = bucket, 1 << (needed - 1).bit_length()
            staged = self._stage(batch, shape)
            return lambda: self._replayed(staged, shape, num_rows, fed)
        plan = self._plans.build(batch)
        return lambda: self._run_eagerly(plan, fed)

    def _run_eagerly(self, plan: StepPlan, fed: Fed | None) -> torch.Tensor:
        self._feed_into(plan, fed)
        return self._eager(plan)

    @torch.inference_mode()
    def record(self, max_rows: int | None = None, max_context: int = PARTITION) -> None:
        """Record the graphs of up to so many rows and keys ahead, so that no step waits for that."""
        empty = np.zeros(0, np.int32)
        nothing = Batch(empty, empty, empty.astype(np.int64), np.zeros(1, np.int32), empty, empty[:, None], empty)
        partitions = 1
        while True:
            for num_rows in self._row_buckets:
                if num_rows <= (max_rows or self._limits.max_sequences):
                    self._recorded(self._stage(nothing, (num_rows, partitions)), (num_rows, partitions))
            if partitions * PARTITION >= min(max_context, self._limits.max_model_len):
                return
            partitions *= 2

    def _replayed(self, staged: StepPlan, shape: tuple[int, int], num_rows: int, fed: Fed | None) -> torch.Tensor:
        recorded = self._recorded(staged, shape)
        self._feed_into(recorded.plan, fed)
        recorded.graph.replay()
        return recorded.logits[:num_rows]

    def _stage(self, batch: Batch, shape: tuple[int, int]) -> StepPlan:
        """The batch, padded to a graph's shape."""
        num_rows, partitions = shape
        num_blocks = -(-partitions * PARTITION // self._limits.block_size)
        return self._plans.build(padded(batch, num_rows, num_blocks, self._limits))

    def _recorded(self, staged: StepPlan, shape: tuple[int, int]) -> _Recorded:
        """The graph of that shape, its plan filled with what was staged."""
        found = self._graphs.get(shape)
        if found is not None:
            _copy(staged, found.plan)
            return found
        plan = _own_copy(staged, shape[1] * PARTITION)
        # A new object each time: plain implementations keep what they derive from a plan as long as it is the same one.
        graph, logits = self._recorder.record(lambda: self._forward(replace(plan)))
        self._graphs[shape] = _Recorded(graph, plan, logits)
        return self._graphs[shape]

    def _feed_into(self, plan: StepPlan, fed: Fed | None) -> None:
        if fed is not None and self._feed is not None:
            self._feed.fill(plan.token_ids, fed)


def _arrays(plan: StepPlan) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What changes from step to step: the int32 and the int64 ones."""
    return [plan.token_ids, plan.positions, plan.context_lens, plan.block_tables], [plan.slots]


def _copy(source: StepPlan, target: StepPlan) -> None:
    for ours, theirs in zip(_arrays(target), _arrays(source), strict=True):
        torch._foreach_copy_(ours, theirs)


def _own_copy(plan: StepPlan, max_context_len: int) -> StepPlan:
    """The same in memory of its own, for contexts of up to so many keys."""
    return StepPlan(
        token_ids=plan.token_ids.clone(),
        positions=plan.positions.clone(),
        slots=plan.slots.clone(),
        query_starts=plan.query_starts.clone(),
        context_lens=plan.context_lens.clone(),
        block_tables=plan.block_tables.clone(),
        logit_indices=plan.logit_indices.clone(),
        max_query_len=1,
        max_context_len=max_context_len,
    )
