"""What a run of cells showed, in one line, and the page where such lines are kept."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.judgement import Result

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"


def commit() -> str:
    """The commit under test; with -dirty, changed since, other than by the record itself."""
    name = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{PAGE.relative_to(ROOT)}")
    return f"{name}{'-dirty' * bool(changed)}" if name else "unknown"


def _git(*asked: str) -> str:
    return subprocess.run(["git", *asked], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


@dataclass
class Verdict:
    """Everything that was injected and compared, and what was lost."""

    what: str
    may_miss: bool = False
    """random faults need not meet a stream; how many did not is said"""
    commit: str = field(default_factory=commit)
    began: float = field(default_factory=time.time)
    cells: int = 0
    faults: int = 0
    streams: int = 0
    tokens: int = 0
    tables: int = 0
    missed: int = 0
    losses: list[str] = field(default_factory=list)
    pauses_s: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    """(target, fault) → the longest wait of each live stream"""
    noticed_s: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, result: Result) -> None:
        """Take in what a cell showed."""
        self.cells += 1
        self.faults += len(result.struck)
        self.streams += len(result.records)
        self.tokens += result.tokens_compared
        self.tables += result.tables_compared
        self.missed += len(result.missed)
        self.losses += [f"{result.cell}: {loss}" for loss in result.losses + ([] if self.may_miss else result.missed)]
        for struck in result.struck:
            key = (struck.strike.target, struck.strike.fault)
            self.pauses_s[key] += result.pauses_s(struck)
            self.noticed_s[key].append(struck.noticed_s)

    def line(self) -> str:
        """The whole in one line."""
        day = time.strftime("%Y-%m-%d", time.gmtime(self.began))
        minutes = (time.time() - self.began) / 60
        return (
            f"{day} {self.commit} {self.what}: {self.cells} cells, {self.faults} faults"
            f"{f' ({self.missed} hit nobody)' if self.missed else ''}, {self.streams} streams, "
            f"{self.tokens} tokens and {self.tables} block tables compared, {len(self.losses)} losses, "
            f"{minutes:.0f} min: {'FAILED' if self.losses else 'holds'}"
        )

    def table(self) -> Iterable[str]:
        """Pauses by fault, as rows of Markdown."""
        yield "| struck | fault | times | noticed after | pause, median | worst |"
        yield "| --- | --- | --- | --- | --- | --- |"
        for (target, fault), pauses in sorted(self.pauses_s.items()):
            noticed = self.noticed_s[target, fault]
            if pauses:
                yield (
                    f"| {target} | {fault} | {len(noticed)} | {statistics.median(noticed):.1f} s | "
                    f"{statistics.median(pauses):.2f} s | {max(pauses):.2f} s |"
                )

    def keep(self) -> None:
        """Append the line to the page's record, which is its end."""
        with PAGE.open("a") as page:
            page.write(f"* {self.line()}\n")
