"""Paired runs of the speculation benchmark: what is recorded of each, kept in a file, and what pairs say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.ratios import Ratio, bootstrap


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
    steps: int = 0
    decode_rows: int = 0
    draft_budget: int = 0
    drafted: tuple[int, ...] = ()
    """tokens verified behind right ones, by position"""
    accepted: tuple[int, ...] = ()
    parts_cpu_s: dict[str, float] = field(default_factory=dict)
    waited_s: float = 0.0
    """of its steps, guessing drafts or waiting for them"""
    client_cpu_s: float = 0.0
    samples: tuple[Sample, ...] = ()
    answers_digest: str = ""
    """over all tokens of all answers: drafts must not change it"""

    @property
    def guessing_s(self) -> float:
        """A draft worker's CPU time; where workers guess for themselves, what that took of their steps."""
        return self.parts_cpu_s.get("draft", self.waited_s)

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s if self.duration_s else 0.0


def cases_of(runs: Sequence[Run]) -> list[Case]:
    """In the order of their first run."""
    return list(dict.fromkeys(run.case for run in runs))


def pairs_of(runs: Sequence[Run], case: Case) -> list[tuple[Run, Run]]:
    """(without drafts, with them) of each round of a case that has both, and without errors."""
    found = {(run.round, run.drafts): run for run in runs if run.case == case and not run.errors and run.tokens_per_s}
    return [(found[number, False], run) for (number, on), run in found.items() if on and (number, False) in found]


def ratio(runs: Sequence[Run], case: Case) -> Ratio | None:
    """Of a case; None where no pair is complete and without errors."""
    values = [on.tokens_per_s / off.tokens_per_s for off, on in pairs_of(runs, case)]
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


def save(path: Path, runs: Sequence[Run], step_times: StepTimes, setup: Mapping[str, Any]) -> None:
    """Keep what there is, all or nothing; `setup`: what the runs have in common."""
    form = {"setup": dict(setup), "step_times": dict(step_times), "runs": [asdict(run) for run in runs]}
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(form))
    beside.replace(path)


def load(path: Path, setup: Mapping[str, Any]) -> tuple[list[Run], StepTimes]:
    """What was kept. Raises ValueError where it is of another setup."""
    form = json.loads(path.read_text())
    if form["setup"] != json.loads(json.dumps(dict(setup))):
        raise ValueError(f"{path} was measured otherwise: {form['setup']}")
    times = {kind: [(size, seconds) for size, seconds in steps] for kind, steps in form["step_times"].items()}
    return [_run(one) for one in form["runs"]], times


def _run(form: dict[str, Any]) -> Run:
    tuples = {name: tuple(form[name]) for name in ("errors", "drafted", "accepted")}
    samples = tuple(Sample(**one) for one in form["samples"])
    return Run(**{**form, **tuples, "case": Case(**form["case"]), "samples": samples})
