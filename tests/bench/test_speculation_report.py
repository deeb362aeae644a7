"""Ratios of pairs, intervals, acceptance by position, and what is said of answers that differ."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.ratios import bootstrap
from bench.speculation_bound import bound_of
from bench.speculation_report import as_json, as_text, plot
from bench.speculation_runs import Case, Run, Sample, acceptance, cases_of, differing, ratio

CHAT, COPY = Case("chat", 4, 0.7, "auto"), Case("copy", 1, 0.0, "ngram")
STEPS = {"plain": [(1.0, 0.01), (4.0, 0.02)], "drafting": []}


def run(number: int, drafts: bool, tokens: int, case: Case = CHAT, **changes: Any) -> Run:
    values: dict[str, Any] = {
        "duration_s": 10.0,
        "steps": 50,
        "decode_rows": 100,
        "draft_budget": 250 if drafts else 0,
        "drafted": (80, 40) if drafts else (),
        "accepted": (40, 10) if drafts else (),
        "parts_cpu_s": {"draft": 0.5 if drafts else 0.0},
        "answers_digest": "same",
    }
    return Run(case, number, drafts, tokens, **{**values, **changes})


def test_ratios_are_of_the_pairs_of_a_round() -> None:
    runs = [run(1, False, 100), run(1, True, 200), run(2, True, 150), run(2, False, 100), run(3, True, 999)]
    runs += [run(4, False, 100, errors=("UNAVAILABLE",)), run(4, True, 900)]
    found = ratio(runs, CHAT)
    assert found is not None
    assert (found.median, found.low, found.high, found.pairs) == (1.75, 1.5, 2.0, 2)
    assert ratio(runs, COPY) is None


def test_the_interval_holds_the_median_and_narrows() -> None:
    few, many = bootstrap([0.9, 1.0, 1.1, 1.2, 1.3]), bootstrap([0.9, 1.0, 1.1, 1.2, 1.3] * 20)
    assert few.median == many.median == 1.1
    assert 0.9 <= few.low < many.low <= 1.1 <= many.high < few.high <= 1.3
    # Of five values the 90 % interval of the median leaves out neither second value: P(median ≤ lowest) = 5.8 %.
    assert (few.low, few.high) == (0.9, 1.3)
    assert bootstrap([2.0]).low == 2.0


def test_acceptance_is_of_all_tokens_tried_at_a_position() -> None:
    assert acceptance([run(1, True, 1), run(2, True, 1, drafted=(20,), accepted=(20,))]) == [0.6, 0.25]
    assert acceptance([run(1, False, 1)]) == []


def test_answers_that_differ_are_told() -> None:
    runs = [run(1, False, 100), run(1, True, 200), run(2, False, 100), run(2, True, 100, answers_digest="other")]
    assert (differing(runs[:2], CHAT), differing(runs, CHAT)) == (0, 1)
    assert "chat n=4 T=0.7: answers differ in 1 rounds" in as_text(runs, STEPS)
    assert "### Wrong" not in as_text(runs[:2], STEPS)
    assert "round 1: ('X',)" in as_text([run(1, True, 1, errors=("X",))], STEPS)


def test_the_table() -> None:
    runs = [run(1, False, 100), run(1, True, 150), run(1, False, 10, COPY), run(1, True, 30, COPY)]
    assert cases_of(runs) == [CHAT, COPY]
    lines = as_text(runs, STEPS).splitlines()
    # k: 250 of 100 rows; tokens per row: 1 + 50 / 100; draft: half a second for 250 tokens.
    # Bound: 15 s for as many tokens without drafts, one of them in plain steps of 2 rows; 50 steps of 7 rows at 30 ms.
    # Sizes of 1 and 4 were measured, none near 2 or 7.
    bound = f"{15 / (14 + 1.5 + 0.5):.2f} to {15 / (14 + 1.5):.2f} ?"
    wanted = f"| chat n=4 T=0.7 auto | 10.0 | 15.0 | 1.50× (1.50 to 1.50) | {bound} | 2.50 | 1.50 | 50% 25% | 2.00 |"
    assert wanted in lines
    assert "| ms | 10.0 | 20.0 |" in lines
    assert any(line.startswith("| copy n=1 T=0 ngram | 1.0 | 3.0 | 3.00×") for line in lines)


def test_the_bound_of_one_row_is_the_formula() -> None:
    """100 tokens in 100 steps of 10 ms; with k = 4 in 50 of 15, and 4 ms of drafting each."""
    one: dict[str, Any] = {"draft_budget": 0, "decode_rows": 100, "steps": 100, "duration_s": 1.0, "parts_cpu_s": {}}
    off = run(1, False, 100, **one)
    on = run(
        1, True, 100, **{**one, "decode_rows": 50, "steps": 50, "draft_budget": 200, "parts_cpu_s": {"draft": 0.2}}
    )
    found = bound_of([off, on], [(1.0, 0.010), (5.0, 0.015)])
    assert found is not None
    assert found.free == pytest.approx(2 / (15 / 10))
    assert found.in_turn == pytest.approx(2 / (15 / 10 + 4 / 10))
    assert found.measured
    assert bound_of([off], [(1.0, 0.010)]) is None
    assert bound_of([off, on], []) is None


def test_everything_is_kept() -> None:
    runs = [run(1, False, 100), run(1, True, 150, samples=(Sample(0.5, 2.0, 1.5, 1.3),))]
    form = json.loads(json.dumps(as_json(runs, STEPS, {"model": "m"})))
    assert form["summary"][0]["ratio"]["median"] == 1.5
    assert form["summary"][0]["rounds_with_other_answers"] == 0
    assert form["runs"][1]["samples"][0]["budget"] == 2.0
    assert form["step_times"]["plain"] == [[1.0, 0.01], [4.0, 0.02]]


def test_without_matplotlib_there_is_no_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not plot([run(1, True, 1)], STEPS, tmp_path / "p.png")


def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [run(1, False, 100), run(1, True, 150, samples=(Sample(0.5, 2.0, 1.5, 1.3),)), run(1, True, 30, COPY)]
    assert plot(runs, STEPS, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000
