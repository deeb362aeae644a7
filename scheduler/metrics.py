"""The scheduler's /metrics: read from live state at each scrape, so that nothing goes stale while the cell is idle."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from scheduler.loop import Cell


class CellCollector:
    """Gauges and counters of one cell; a label per attached worker, none per request."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    def collect(self) -> Iterator[Metric]:
        core = self._cell.core
        yield GaugeMetricFamily("tandem_requests_waiting", "Choices in the queue.", value=core.num_waiting)
        yield GaugeMetricFamily("tandem_requests_running", "Choices in slots.", value=core.num_running)
        yield GaugeMetricFamily("tandem_gateways", "Open sessions.", value=len(self._cell.gateways.sessions))
        yield GaugeMetricFamily("tandem_draft_workers", "Announced draft workers.", value=len(self._cell.drafters))
        yield GaugeMetricFamily("tandem_term", "Leadership number.", value=self._cell.term)
        for name, value in core.totals().items():
            yield CounterMetricFamily(f"tandem_{name}", f"Total of {name.replace('_', ' ')}.", value=value)
        blocks = GaugeMetricFamily("tandem_kv_blocks", "KV blocks by state.", labels=("worker", "state"))
        running = GaugeMetricFamily("tandem_worker_running", "Sequences in slots of a worker.", labels=("worker",))
        steps = CounterMetricFamily("tandem_worker_steps", "Steps applied.", labels=("worker",))
        rows = CounterMetricFamily("tandem_decode_rows", "Decode rows of issued steps.", labels=("worker",))
        asked = CounterMetricFamily("tandem_draft_budget_tokens", "Draft tokens they were allowed.", labels=("worker",))
        by_position = ("worker", "position")
        tried = CounterMetricFamily(
            "tandem_position_drafted_tokens", "Draft tokens verified behind right ones.", labels=by_position
        )
        right = CounterMetricFamily("tandem_position_accepted_tokens", "Those that were right.", labels=by_position)
        spent = CounterMetricFamily(
            "tandem_drafting_seconds", "Of steps, guessing drafts or waiting for them.", labels=("worker",)
        )
        gain = GaugeMetricFamily(
            "tandem_speculation_gain", "Expected tokens per second by those without drafts.", labels=("worker",)
        )
        for worker in core.workers.values():
            rows.add_metric([worker.worker_id], worker.decode_rows)
            asked.add_metric([worker.worker_id], worker.draft_budget)
            spent.add_metric([worker.worker_id], worker.drafting_s)
            gain.add_metric([worker.worker_id], worker.speculation.gain)
            totals = worker.speculation.totals
            for position, (count, accepted) in enumerate(zip(totals.tried, totals.accepted, strict=True), 1):
                tried.add_metric([worker.worker_id, str(position)], count)
                right.add_metric([worker.worker_id, str(position)], accepted)
            pool = worker.pool
            blocks.add_metric([worker.worker_id, "free"], pool.num_free)
            blocks.add_metric([worker.worker_id, "cached"], pool.num_cached)
            blocks.add_metric([worker.worker_id, "referenced"], pool.num_referenced)
            running.add_metric([worker.worker_id], len(worker.running))
            steps.add_metric([worker.worker_id], worker.steps - len(worker.in_flight))
        yield from (blocks, running, steps, rows, asked, tried, right, spent, gain)
