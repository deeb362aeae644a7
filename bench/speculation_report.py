"""What speculation brought: ratios of paired runs with their intervals, acceptance, T(n), and a plot."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RESAMPLES = 4000
LEVEL = 0.90


@dataclass(frozen=True, slots=True)
class Case:
    """One load, run with and without drafts."""

    workload: str
    """chat or copy"""
    streams: int
    temperature: float
    mode: str
    """who drafts in its runs with drafts"""

    @property
    def name(self) -> str:
        return f"{self.workload} n={self.streams} T={self.temperature:g}"


@dataclass(frozen=True, slots=True)
class Sample:
    """The drafting of one moment of a run."""

    at_s: float
    """since the run's start"""
    budget: float
    """mean draft budget of a decode row since the sample before"""
    tokens_per_row: float
    gain: float
    """what the scheduler expects"""


@dataclass(frozen=True, slots=True)
class Run:
    """One case, once, with or without drafts."""

    case: Case
    round: int
    drafts: bool
    output_tokens: int
    duration_s: float
    errors: tuple[str, ...] = ()
    decode_rows: int = 0
    draft_budget: int = 0
    drafted: tuple[int, ...] = ()
    """tokens verified behind right ones, by position"""
    accepted: tuple[int, ...] = ()
    parts_cpu_s: dict[str, float] = field(default_factory=dict)
    client_cpu_s: float = 0.0
    samples: tuple[Sample, ...] = ()
    answers_digest: str = ""
    """over all tokens of all answers: drafts must not change it"""

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s if self.duration_s else 0.0


@dataclass(frozen=True, slots=True)
class Ratio:
    """Tokens per second with drafts by those without, over paired runs."""

    median: float
    low: float
    high: float
    """bounds of the 90 % interval of the median"""
    pairs: int

    def __str__(self) -> str:
        return f"{self.median:.2f}× ({self.low:.2f} to {self.high:.2f})"


def bootstrap(values: Sequence[float], seed: int = 0) -> Ratio:
    """Median, and its interval by resampling with replacement (percentile method); one value at least."""
    chance = random.Random(seed)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(RESAMPLES))
    edge = round((1 - LEVEL) / 2 * (RESAMPLES - 1))
    return Ratio(statistics.median(values), medians[edge], medians[-1 - edge], len(values))


def cases_of(runs: Sequence[Run]) -> list[Case]:
    """In the order of their first run."""
    return list(dict.fromkeys(run.case for run in runs))


def ratio(runs: Sequence[Run], case: Case) -> Ratio | None:
    """Of a case; None where no pair is complete and without errors."""
    found = {(run.round, run.drafts): run for run in runs if run.case == case and not run.errors and run.tokens_per_s}
    values = [
        run.tokens_per_s / found[number, False].tokens_per_s
        for (number, drafts), run in found.items()
        if drafts and (number, False) in found
    ]
    return bootstrap(values) if values else None


def acceptance(runs: Sequence[Run]) -> list[float]:
    """P(right | those before it were right) by position, over all these runs."""
    length = max((len(run.drafted) for run in runs), default=0)
    drafted, accepted = [0] * length, [0] * length
    for run in runs:
        for position, (tried, right) in enumerate(zip(run.drafted, run.accepted, strict=True)):
            drafted[position] += tried
            accepted[position] += right
    return [right / tried for right, tried in zip(accepted, drafted, strict=True) if tried]


def differing(runs: Sequence[Run], case: Case) -> int:
    """Rounds whose answers differ with and without drafts: 0, or something is wrong."""
    digests: dict[int, set[str]] = {}
    for run in runs:
        if run.case == case and not run.errors:
            digests.setdefault(run.round, set()).add(run.answers_digest)
    return sum(len(of_round) > 1 for of_round in digests.values())


StepTimes = Mapping[str, Sequence[tuple[float, float]]]
"""plain and drafting: (tokens, seconds) of steps that only decode, by tokens"""


def as_text(runs: Sequence[Run], step_times: StepTimes) -> str:
    """Tables in Markdown."""
    head = ["load", "off tok/s", "on tok/s", "speed-up", "k", "tok/row", "accepted by position", "draft ms/token"]
    lines = [_line(head), _line(["---"] * len(head))]
    for case in cases_of(runs):
        off = [run for run in runs if run.case == case and not run.drafts and not run.errors]
        on = [run for run in runs if run.case == case and run.drafts and not run.errors]
        rows = sum(run.decode_rows for run in on) or 1
        budget, right = sum(run.draft_budget for run in on), sum(sum(run.accepted) for run in on)
        spent = sum(run.parts_cpu_s.get("draft", 0.0) for run in on)
        shares = " ".join(f"{share:.0%}" for share in acceptance(on)[:6])
        cells = [_median(off), _median(on), str(ratio(runs, case) or "-"), f"{budget / rows:.2f}"]
        cells += [f"{1 + right / rows:.2f}", shares or "-", f"{1000 * spent / budget:.2f}" if budget else "-"]
        lines.append(_line([f"{case.name} {case.mode}", *cells]))
    parts = ["\n".join(lines)]
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
