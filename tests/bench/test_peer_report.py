"""Medians, ratios and tables of a comparison, by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.peer_report import FIGURES, Load, Run, as_json, as_text, median, plot, ratio

LOAD = Load("c=8", 8, 16, 128, 128)
RUN = Run(
    server="tandem",
    load=LOAD,
    round=0,
    output_tokens_per_s=600.0,
    input_tokens_per_s=600.0,
    ttft_s=0.1,
    tpot_s=0.010,
    client_cpu_s=0.3,
    server_cpu_s=6.0,
    others_cpu_share=0.01,
    duration_s=5.0,
    errors={},
    parts_cpu_s={"gateway": 0.15, "worker-0": 5.0},
)
OUTPUT, FIRST, EACH, PREFILL = FIGURES


def rounds(ours: list[float], theirs: list[float]) -> list[Run]:
    found = []
    for number, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        found.append(replace(RUN, round=number, output_tokens_per_s=own))
        found.append(replace(RUN, server="vllm", round=number, output_tokens_per_s=other, ttft_s=0.4, parts_cpu_s={}))
    return found


def test_a_ratio_pairs_the_runs_of_a_round() -> None:
    """The machine was half as fast in the second round, for both: the ratio doesn't move with it."""
    runs = rounds([600.0, 300.0, 660.0], [200.0, 100.0, 200.0])
    assert median(runs, "tandem", "c=8", "output_tokens_per_s") == 600.0
    found = ratio(runs, "vllm", "c=8", OUTPUT)
    assert found is not None
    assert (found.median, found.low, found.high) == pytest.approx((3.0, 3.0, 3.3))
    # 600 over the peer's own median, 200, says the same here; with its rounds shuffled it must not.
    shuffled = ratio(rounds([600.0, 300.0, 660.0], [100.0, 200.0, 200.0]), "vllm", "c=8", OUTPUT)
    assert shuffled is not None
    assert (shuffled.low, shuffled.median, shuffled.high) == pytest.approx((1.5, 3.3, 6.0))


def test_less_time_is_a_larger_ratio() -> None:
    found = ratio(rounds([600.0], [200.0]), "vllm", "c=8", FIRST)
    assert found is not None
    assert found.median == pytest.approx(4.0)


def test_failed_runs_are_named_and_not_compared() -> None:
    runs = rounds([600.0, 600.0], [200.0, 900.0])
    runs[3] = replace(runs[3], errors={"SHORT_ANSWER": 2})
    found = ratio(runs, "vllm", "c=8", OUTPUT)
    assert found is not None
    assert found.high == pytest.approx(3.0)
    assert "vllm, c=8, round 1: {'SHORT_ANSWER': 2}" in as_text(runs)
    assert ratio(runs, "nobody", "c=8", OUTPUT) is None


def test_the_text_has_every_figure_and_says_who_spent_the_cpu() -> None:
    prefill = replace(RUN, load=Load("prefill", 4, 8, 1024, 1), input_tokens_per_s=1850.0, tpot_s=None)
    text = as_text([*rounds([600.0], [200.0]), prefill])
    assert "| c=8 | 600 | 200 | 3.00× (3.00 to 3.00) |" in text
    assert "| prefill | 1850 | - | - |" in text
    # 0.15 s over 3000 tokens are 50 µs; the client's 0.3 s are 100 µs.
    row = next(line for line in text.splitlines() if line.startswith("| c=8 | 100 | 300 |"))
    assert row == "| c=8 | 100 | 300 | 2000 | 6000 | 50 | 1667 |"
    assert "at most 1.0% of a core" in text


def test_json_holds_runs_and_ratios() -> None:
    form = json.loads(json.dumps(as_json(rounds([600.0], [200.0]), {"rounds": 1})))
    assert [one["server"] for one in form["runs"]] == ["tandem", "vllm"]
    assert {(one["figure"], one["median"]) for one in form["ratios"]} >= {("output tokens/s", 3.0)}
    assert form["about"] == {"rounds": 1}


def test_a_plot_is_written_where_it_can_be(tmp_path: Path) -> None:
    path = tmp_path / "peers.png"
    assert plot(rounds([600.0], [200.0]), path) is path.exists()
