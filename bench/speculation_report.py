"""What speculation brought: ratios of paired runs with their intervals, acceptance, T(n), and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.ratios import Ratio
from bench.speculation_bound import Bound, bound_of
from bench.speculation_runs import Case, Run, StepTimes, acceptance, cases_of, differing, pairs_of, ratio

BOUND = """c: the time of guessing, of steps or a draft worker's, for each draft token asked for. Bound: what these
steps would make of the run without drafts at T(n) below, where guessing and the target take turns, and where guessing
costs the target nothing (`bench/speculation_bound.py`); with a question mark where T(n) near such sizes was not
measured."""


def as_text(runs: Sequence[Run], step_times: StepTimes) -> str:
    """Tables in Markdown."""
    head = ["load", "off tok/s", "on tok/s", "speed-up", "bound", "k", "tok/row", "accepted by position", "c ms"]
    lines = [_line(head), _line(["---"] * len(head))]
    for case in cases_of(runs):
        off = [run for run in runs if run.case == case and not run.drafts and not run.errors]
        on = [run for run in runs if run.case == case and run.drafts and not run.errors]
        rows = sum(run.decode_rows for run in on) or 1
        budget, right = sum(run.draft_budget for run in on), sum(sum(run.accepted) for run in on)
        spent = sum(run.guessing_s for run in on)
        shares = " ".join(f"{share:.0%}" for share in acceptance(on)[:6])
        bound = _bound(runs, case, step_times)
        cells = [_median(off), _median(on), str(ratio(runs, case) or "-")]
        doubt = "" if bound is None or bound.measured else " ?"
        cells += [f"{bound.in_turn:.2f} to {bound.free:.2f}{doubt}" if bound else "-", f"{budget / rows:.2f}"]
        cells += [f"{1 + right / rows:.2f}", shares or "-", f"{1000 * spent / budget:.2f}" if budget else "-"]
        lines.append(_line([f"{case.name} {case.mode}", *cells]))
    parts = ["\n".join(lines), BOUND, _pairs(runs)]
    for name, steps in step_times.items():
        if steps:
            rows_of = [["tokens", *(f"{count:.0f}" for count, _ in steps)], ["---"] * (len(steps) + 1)]
            rows_of.append(["ms", *(f"{1000 * seconds:.1f}" for _, seconds in steps)])
            parts.append(f"### T(n), {name} steps, as the scheduler measured them\n\n" + "\n".join(map(_line, rows_of)))
    wrong = {case.name: differing(runs, case) for case in cases_of(runs)}
    notes = [f"* {name}: answers differ in {count} rounds" for name, count in wrong.items() if count]
    notes += [f"* {run.case.name}, round {run.round}: {run.errors}" for run in runs if run.errors]
    if notes:
        parts.append("### Wrong\n\n" + "\n".join(notes))
    return "\n\n".join(parts) + "\n"


def _bound(runs: Sequence[Run], case: Case, step_times: StepTimes) -> Bound | None:
    return bound_of([run for run in runs if run.case == case], step_times.get("plain", ()))


def _pairs(runs: Sequence[Run]) -> str:
    """Every pair's own figures."""
    lines = [_line(["pair", "off tok/s", "on tok/s", "speed-up"]), _line(["---"] * 4)]
    for case in cases_of(runs):
        for off, on in pairs_of(runs, case):
            rates = f"{off.tokens_per_s:.1f}", f"{on.tokens_per_s:.1f}", f"{on.tokens_per_s / off.tokens_per_s:.2f}"
            lines.append(_line([f"{case.name} {case.mode}, round {off.round}", *rates]))
    return "### Pairs\n\n" + "\n".join(lines)


def _median(runs: Sequence[Run]) -> str:
    return f"{statistics.median(run.tokens_per_s for run in runs):.1f}" if runs else "-"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def as_json(runs: Sequence[Run], step_times: StepTimes, about: dict[str, Any]) -> dict[str, Any]:
    """Everything."""
    summary = [
        {
            **asdict(case),
            "ratio": asdict(found) if (found := ratio(runs, case)) else None,
            "bound": bound._asdict() if (bound := _bound(runs, case, step_times)) else None,
            "acceptance": acceptance([run for run in runs if run.case == case]),
            "rounds_with_other_answers": differing(runs, case),
        }
        for case in cases_of(runs)
    ]
    return {"about": about, "summary": summary, "step_times": dict(step_times), "runs": [asdict(run) for run in runs]}


def plot(runs: Sequence[Run], step_times: StepTimes, path: Path) -> bool:
    """Speed-up by streams and temperature, T(n), and k over time; False where matplotlib isn't installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, (gains, times, budgets) = pyplot.subplots(1, 3, figsize=(15, 4.2))
    _plot_gains(gains, runs)
    for name, steps in step_times.items():
        times.plot([count for count, _ in steps], [1000 * seconds for _, seconds in steps], "o-", ms=3, label=name)
    times.legend(fontsize=8)
    times.set(xlabel="tokens of a step", ylabel="ms", title="T(n)")
    for case in cases_of(runs):
        longest = max((run for run in runs if run.case == case and run.drafts), key=lambda run: len(run.samples))
        if longest.samples:
            at_s, budget = zip(*((sample.at_s, sample.budget) for sample in longest.samples), strict=True)
            budgets.plot(at_s, budget, label=case.name, linewidth=1)
    budgets.set(xlabel="seconds of a run", ylabel="k, mean of the rows", title="draft budget over time")
    if budgets.lines:
        budgets.legend(fontsize=6)
    canvas.tight_layout()
    canvas.savefig(path, dpi=120)
    return True


def _plot_gains(axis: Any, runs: Sequence[Run]) -> None:
    series: dict[str, list[tuple[int, Ratio]]] = {}
    for case in cases_of(runs):
        found = ratio(runs, case)
        if found is not None:
            label = f"{case.workload}, T = {case.temperature:g} ({case.mode})"
            series.setdefault(label, []).append((case.streams, found))
    for label, points in series.items():
        points.sort()
        streams = [count for count, _ in points]
        medians = [found.median for _, found in points]
        below = [found.median - found.low for _, found in points]
        above = [found.high - found.median for _, found in points]
        axis.errorbar(streams, medians, [below, above], marker="o", markersize=4, capsize=3, label=label)
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set(xlabel="streams at once", ylabel="tokens/s, on by off", title="speed-up, 90 % intervals of medians")
    axis.legend(fontsize=8)
