"""The figures of a load, against numpy and by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.load import Record, Workload
from cli.load_report import distribution, percentile, summarise

WORKLOAD = Workload(model="m", num_requests=3, concurrency=2, input_tokens=4, output_tokens=3, vocab_size=10)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.sampled_from([0, 50, 90, 99, 100]))
def test_percentiles_are_numpys(samples: list[float], percent: int) -> None:
    assert percentile(sorted(samples), percent) == pytest.approx(float(np.percentile(samples, percent)))


def test_no_sample_has_no_figures() -> None:
    assert distribution([]).p99 is None


def test_a_run_by_hand() -> None:
    records = [
        Record(due_s=10.0, started_s=10.5, first_token_s=11.0, ended_s=13.0, num_tokens=3, gaps_s=[0.5, 1.5]),
        Record(
            due_s=11.0,
            started_s=11.0,
            first_token_s=11.5,
            ended_s=12.5,
            num_tokens=3,
            gaps_s=[1.0],
            drafted_tokens=4,
            accepted_tokens=1,
        ),
        Record(due_s=12.0, started_s=12.0, ended_s=15.5, num_tokens=0, error="UNAVAILABLE"),
    ]
    report = summarise(WORKLOAD, records, cpu_s=0.5)
    assert report.duration_s == 5.0
    assert (report.completed, report.errors) == (2, {"UNAVAILABLE": 1})
    assert (report.output_tokens, report.output_tokens_per_s, report.requests_per_s) == (6, 1.2, 0.4)
    # From the due time on, and of completed requests only.
    assert (report.ttft_s.p50, report.ttft_s.max) == (0.75, 1.0)
    assert (report.end_to_end_s.mean, report.end_to_end_s.max) == (2.25, 3.0)
    assert (report.inter_token_s.mean, report.inter_token_s.max) == (1.0, 1.5)
    assert report.time_per_output_token_s.mean == pytest.approx((2.0 / 2 + 1.0 / 2) / 2)
    assert (report.acceptance, report.client_cpu_share, report.late_start_s) == (0.25, 0.1, 0.5)
    assert (report.client_cpu_s, report.input_tokens_per_s) == (0.5, 2 * 4 / 5)
    assert json.loads(json.dumps(report.as_json()))["workload"]["vocab_size"] == 10
