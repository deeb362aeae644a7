"""The cluster's CPU: the arithmetic by hand, and one run of a real cluster without weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import cluster_cost
from bench.cluster_cost import cost_of, spent
from cli.load import Record, Workload
from cli.load_report import summarise


def test_the_engines_thread_is_left_out() -> None:
    before = {"gateway": {1: 1.0, 2: 0.5}, "worker-0": {7: 1.0, 8: 2.0, 9: 0.0}}
    after = {"gateway": {1: 1.2, 2: 0.6, 3: 0.1}, "worker-0": {7: 1.1, 8: 7.0, 9: 0.05}}
    assert spent(before, after) == pytest.approx({"gateway": 0.4, "worker-0": 0.15})


def test_costs_are_per_token() -> None:
    workload = Workload(model="m", num_requests=2, concurrency=2, input_tokens=4, output_tokens=3, vocab_size=9)
    record = Record(due_s=0.0, started_s=0.0, first_token_s=0.5, ended_s=1.5, num_tokens=5)
    report = summarise(workload, [record, record], cpu_s=0.02)
    cost = cost_of(2, {"gateway": 0.03, "scheduler": 0.01, "worker-0": 0.004, "worker-1": 0.006}, report, 9.0)
    figures = (cost.gateway_us, cost.scheduler_us, cost.worker_us, cost.client_us, cost.cluster_us)
    assert figures == pytest.approx((3000, 1000, 1000, 2000, 5000))
    assert (cost.ttft_ms, cost.tpot_ms) == pytest.approx((500, 250))
    assert "5000 µs 10.00 ms" in cluster_cost.as_text([cost])


def test_a_cluster_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cost.json"
    flags = ["--concurrency=1,4", "--step-ms=0", "--token-us=0", f"--json={path}"]
    monkeypatch.setattr(sys, "argv", ["cluster_cost", *flags])
    assert cluster_cost.main() == 0
    one, four = json.loads(path.read_text())
    for cost in (one, four):
        for name in ("gateway_us", "scheduler_us", "worker_us", "client_us", "ttft_ms", "tpot_ms"):
            assert cost[name] > 1
    assert capsys.readouterr().out.splitlines()[1].split()[0] == "1"
