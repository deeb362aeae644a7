"""Step times before the first step: sizes, bounds, and that they reach the scheduler."""

from __future__ import annotations

import itertools

import pytest
import torch
from tandem.v1 import scheduler_pb2

from engine.batch import Batch
from engine.fake import FakeEngine
from scheduler.convert import worker_spec
from scheduler.core.worker_state import WorkerState
from worker.convert import hello_to_proto
from worker.profile import added_s, measure_step_times
from worker.sequences import limits_of


class Timed(FakeEngine):
    """Takes 10 ms and 1 ms a token on a clock of its own; the first forward of a size takes ten times as long."""

    def __init__(self, **options: int) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.now_s = 0.0
        self.sizes: list[int] = []

    def forward(self, batch: Batch) -> torch.Tensor:
        size = len(batch.token_ids)
        self.now_s += (0.010 + 0.001 * size) * (1 if size in self.sizes else 10)
        self.sizes.append(size)
        return super().forward(batch)


def test_sizes_double_and_the_warm_time_counts() -> None:
    engine = Timed(num_blocks=64, max_sequences=20)
    times = measure_step_times(engine, 100.0, lambda: engine.now_s)
    assert [size for size, _ in times] == [1, 2, 4, 8, 16]
    assert [seconds for _, seconds in times] == pytest.approx([0.011, 0.012, 0.014, 0.018, 0.026])
    assert added_s(times, 1, 4) == pytest.approx(0.004)


@pytest.mark.parametrize("budget_s", [0.2, 0.5, 1.0, 3.0])
def test_the_time_is_bounded(budget_s: float) -> None:
    engine = Timed(num_blocks=256, max_sequences=256)
    times = measure_step_times(engine, budget_s, lambda: engine.now_s)
    assert engine.now_s <= budget_s
    assert len(times) < 9 or budget_s >= 3.0


def test_a_small_pool_bounds_the_rows() -> None:
    ticks = itertools.count()
    times = measure_step_times(FakeEngine(num_blocks=3, max_sequences=256), 1e9, lambda: float(next(ticks)))
    assert [size for size, _ in times] == [1, 2]
    assert added_s(times[:1], 1, 4) == 0.0


def test_what_tokens_add_is_linear_between_the_sizes_and_beyond() -> None:
    times = [(1, 0.010), (2, 0.011), (4, 0.015), (8, 0.017)]
    assert added_s(times, 1, 1) == pytest.approx(0.001)
    assert added_s(times, 1, 2) == pytest.approx(0.003)
    assert added_s(times, 3, 2.5) == pytest.approx(0.015 + 0.002 * 1.5 / 4 - 0.013)
    assert added_s(times, 8, 8) == pytest.approx(0.004)
    assert added_s([(1, 0.02), (2, 0.01)], 1, 1) == 0.0
    assert added_s([], 1, 1) == 0.0


def test_the_scheduler_starts_from_them() -> None:
    torch.set_num_threads(1)
    limits = limits_of(FakeEngine().info)
    times = [(1, 0.010), (8, 0.024)]
    message = hello_to_proto(
        worker_id="w", boot_id="b", model="m", fingerprint="f", limits=limits, highest_term=0, cell="",
        draining=False, residents=[], step_times=times,
    )  # fmt: skip
    spec = worker_spec(scheduler_pb2.WorkerHello.FromString(message.hello.SerializeToString()))
    curve = WorkerState.attach("w", spec).speculation.plain_times.curve
    assert (curve.sizes, curve.seconds) == ((1.0, 8.0), (0.010, 0.024))
