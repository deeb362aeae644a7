"""Figures of several servers side by side: medians, ratios and their spread, as text, JSON and a plot. Pure but for the
plot's file.

A ratio is always taken between runs of one round, a minute apart: machines that others use too change from one
quarter of an hour to the next. The median of the rounds' ratios is shown with the smallest and the largest.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cli.load_report import Report


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent in one run."""

    name: str
    concurrency: int
    num_requests: int
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Run:
    """One load on one server in one round."""

    server: str
    load: Load
    round: int
    output_tokens_per_s: float
    input_tokens_per_s: float
    ttft_s: float | None
    """median of the requests"""
    tpot_s: float | None
    """median of the requests: seconds per output token after the first"""
    client_cpu_s: float
    server_cpu_s: float
    """of its whole process tree"""
    others_cpu_share: float
    """cores that the other servers, idle meanwhile, took"""
    duration_s: float
    errors: dict[str, int]
    parts_cpu_s: dict[str, float]
    """Tandem's own processes, by name"""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number per load that is compared; above 1 the ratio speaks for Tandem."""

    name: str
    unit: str
    loads: str
    """loads whose name begins so"""
    field: str
    scale: float = 1.0
    lower_is_better: bool = False


FIGURES = (
    Figure("output tokens/s", "tokens/s", "c=", "output_tokens_per_s"),
    Figure("time to first token", "ms", "c=", "ttft_s", 1e3, lower_is_better=True),
    Figure("time per output token", "ms", "c=", "tpot_s", 1e3, lower_is_better=True),
    Figure("prefill", "tokens/s", "prefill", "input_tokens_per_s"),
)


def run_of(
    server: str,
    load: Load,
    round_number: int,
    report: Report,
    server_cpu_s: float,
    others_cpu_share: float,
    parts_cpu_s: dict[str, float],
) -> Run:
    """The figures that are kept of one run."""
    return Run(
        server=server,
        load=load,
        round=round_number,
        output_tokens_per_s=report.output_tokens_per_s,
        input_tokens_per_s=report.input_tokens_per_s,
        ttft_s=report.ttft_s.p50,
        tpot_s=report.time_per_output_token_s.p50,
        client_cpu_s=report.client_cpu_s,
        server_cpu_s=server_cpu_s,
        others_cpu_share=others_cpu_share,
        duration_s=report.duration_s,
        errors=report.errors,
        parts_cpu_s=parts_cpu_s,
    )


def median(runs: Sequence[Run], server: str, load: str, field: str) -> float | None:
    """Over the rounds; None without a figure."""
    values = [getattr(run, field) for run in runs if (run.server, run.load.name) == (server, load)]
    values = [value for value in values if value is not None]
    return statistics.median(values) if values else None


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times better Tandem is."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f}× ({self.low:.2f} to {self.high:.2f})"


def ratio(runs: Sequence[Run], peer: str, load: str, figure: Figure, own: str = "tandem") -> Ratio | None:
    """Tandem's figure over a peer's, round by round; turned over where less is better."""
    values = {
        (run.server, run.round): getattr(run, figure.field) for run in runs if run.load.name == load and not run.errors
    }
    found = []
    for (server, number), ours in values.items():
        theirs = values.get((peer, number))
        if server == own and ours and theirs:
            found.append(theirs / ours if figure.lower_is_better else ours / theirs)
    return Ratio(statistics.median(found), min(found), max(found)) if found else None


def servers_of(runs: Sequence[Run]) -> list[str]:
    """In the order of their first run."""
    return list(dict.fromkeys(run.server for run in runs))


def loads_of(runs: Sequence[Run], prefix: str = "") -> list[str]:
    """In the order of their first run."""
    return list(dict.fromkeys(run.load.name for run in runs if run.load.name.startswith(prefix)))


def as_text(runs: Sequence[Run]) -> str:
    """Tables in Markdown: a figure each, a load a line."""
    servers = servers_of(runs)
    peers = [name for name in servers if name != "tandem"]
    parts = []
    for figure in FIGURES:
        loads = loads_of(runs, figure.loads)
        if not loads:
            continue
        head = ["load", *servers, *(f"against {name}" for name in peers)]
        lines = [f"### {figure.name} ({figure.unit})", "", _line(head), _line(["---"] * len(head))]
        for load in loads:
            cells = [_number(median(runs, name, load, figure.field), figure.scale) for name in servers]
            cells += [str(ratio(runs, name, load, figure) or "-") for name in peers]
            lines.append(_line([load, *cells]))
        parts.append("\n".join(lines))
    parts.append(_cost_table(runs, servers))
    failed = [run for run in runs if run.errors]
    if failed:
        lines = [f"* {run.server}, {run.load.name}, round {run.round}: {run.errors}" for run in failed]
        parts.append("### Failed requests\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _cost_table(runs: Sequence[Run], servers: Sequence[str]) -> str:
    """CPU per output token; a core that waits costs nothing."""
    names = list(dict.fromkeys(part for run in runs for part in run.parts_cpu_s))
    head = ["load", *(f"client of {name}" for name in servers), *(f"{name}, all" for name in servers), *names]
    lines = ["### CPU time per output token (µs)", "", _line(head), _line(["---"] * len(head))]
    for load in loads_of(runs, "c="):
        cells = [_per_token(runs, name, load, lambda run: run.client_cpu_s) for name in servers]
        cells += [_per_token(runs, name, load, lambda run: run.server_cpu_s) for name in servers]
        cells += [_per_token(runs, "tandem", load, lambda run, name=name: run.parts_cpu_s.get(name)) for name in names]
        lines.append(_line([load, *cells]))
    idle = max((run.others_cpu_share for run in runs), default=0.0)
    return "\n".join(lines) + f"\n\nThe servers that were not asked took at most {idle:.1%} of a core meanwhile."


def _per_token(runs: Sequence[Run], server: str, load: str, cpu_s: Any) -> str:
    chosen = [run for run in runs if (run.server, run.load.name) == (server, load)]
    tokens = [(cpu_s(run), run.output_tokens_per_s * run.duration_s) for run in chosen]
    values = [spent / count * 1e6 for spent, count in tokens if count and spent is not None]
    return f"{statistics.median(values):.0f}" if values else "-"


def _number(value: float | None, scale: float) -> str:
    if value is None:
        return "-"
    scaled = value * scale
    return f"{scaled:.0f}" if scaled >= 100 else f"{scaled:.1f}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def as_json(runs: Sequence[Run], about: dict[str, Any]) -> dict[str, Any]:
    """Every run, and the ratios."""
    peers = [name for name in servers_of(runs) if name != "tandem"]
    ratios = [
        {"figure": figure.name, "load": load, "peer": peer, **asdict(found)}
        for figure in FIGURES
        for load in loads_of(runs, figure.loads)
        for peer in peers
        if (found := ratio(runs, peer, load, figure)) is not None
    ]
    return {"about": about, "ratios": ratios, "runs": [asdict(run) for run in runs]}


def plot(runs: Sequence[Run], path: Path) -> bool:
    """Bars with every round as a dot; False where matplotlib isn't installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figures = [figure for figure in FIGURES if loads_of(runs, figure.loads)]
    canvas, axes = pyplot.subplots(1, len(figures), figsize=(4.5 * len(figures), 4), squeeze=False)
    servers = servers_of(runs)
    width = 0.8 / len(servers)
    for axis, figure in zip(axes[0], figures, strict=True):
        loads = loads_of(runs, figure.loads)
        for index, server in enumerate(servers):
            heights = [(median(runs, server, load, figure.field) or 0.0) * figure.scale for load in loads]
            places = [position + index * width for position in range(len(loads))]
            axis.bar(places, heights, width, label=server)
            for place, load in zip(places, loads, strict=True):
                chosen = [run for run in runs if (run.server, run.load.name) == (server, load)]
                dots = [getattr(run, figure.field) for run in chosen if getattr(run, figure.field) is not None]
                axis.plot([place] * len(dots), [dot * figure.scale for dot in dots], "k.", markersize=3)
        axis.set_xticks([position + 0.4 - width / 2 for position in range(len(loads))], loads)
        axis.set_title(f"{figure.name} ({figure.unit})", fontsize=9)
    axes[0][0].legend(fontsize=8)
    canvas.tight_layout()
    canvas.savefig(path, dpi=120)
    return True
