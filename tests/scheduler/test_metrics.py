"""What a scrape of the scheduler finds."""

from __future__ import annotations

from scheduler.config import SchedulerConfig
from scheduler.convert import worker_status
from scheduler.core.acceptance import PositionTotals
from scheduler.loop import Cell
from scheduler.metrics import CellCollector
from tests.scheduler.core.builders import worker_spec


async def test_speculation_by_worker_and_position() -> None:
    cell = Cell(SchedulerConfig(speculation="fixed"))
    cell.core.attach("w", worker_spec(), 0.0)
    worker = cell.core.workers["w"]
    worker.decode_rows, worker.draft_budget, worker.drafting_s = 10, 25, 0.5
    worker.speculation.gain = 1.25
    totals: PositionTotals = worker.speculation.totals
    totals.observe(3, 1)
    totals.observe(1, 1)
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for metric in CellCollector(cell).collect()
        for sample in metric.samples
    }
    assert found["tandem_decode_rows_total", "w"] == 10
    assert found["tandem_draft_budget_tokens_total", "w"] == 25
    assert found["tandem_drafting_seconds_total", "w"] == 0.5
    assert found["tandem_speculation_gain", "w"] == 1.25
    drafted, accepted = "tandem_position_drafted_tokens_total", "tandem_position_accepted_tokens_total"
    assert [found[drafted, "w", position] for position in "12"] == [2, 1]
    assert [found[accepted, "w", position] for position in "12"] == [2, 0]
    assert (drafted, "w", "3") not in found


async def test_the_status_has_counts_by_position_and_step_times() -> None:
    cell = Cell(SchedulerConfig(speculation="fixed"))
    cell.core.attach("w", worker_spec(), 0.0)
    worker = cell.core.workers["w"]
    worker.speculation.totals.observe(3, 1)
    for num_tokens, seconds in ((1, 0.01), (4, 0.02)):
        for _ in range(8):
            worker.speculation.plain_times.observe(num_tokens, seconds)
    status = worker_status(worker, 1, 0.0)
    assert list(status.position_drafted_tokens) == [1, 1]
    assert list(status.position_accepted_tokens) == [1, 0]
    assert [(step.num_tokens, step.seconds) for step in status.plain_steps] == [(1, 0.01), (4, 0.02)]
    assert not status.drafting_steps
