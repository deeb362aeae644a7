"""What a check of a GPU finds, as tables for people and JSON for everything else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Check:
    """Something that is right or wrong."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Figure:
    """Something measured."""

    name: str
    value: float
    unit: str
    floor: float | None = None
    """the least it can be on this machine, in the same unit"""
    note: str = ""


@dataclass(slots=True)
class Report:
    """Gathers in order."""

    facts: dict[str, str] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)

    def take(self, found: Iterable[Check | Figure]) -> None:
        """What a section yields, of either kind."""
        for one in found:
            if isinstance(one, Check):
                self.checks.append(one)
            else:
                self.figures.append(one)

    def as_json(self) -> dict[str, Any]:
        return {"passed": self.passed, **asdict(self)}

    def show(self, console: Console) -> None:
        console.print(" · ".join(f"{name} {value}" for name, value in self.facts.items()))
        checks = Table("check", "", "detail", title="Right?", title_justify="left")
        for check in self.checks:
            checks.add_row(check.name, "[green]ok[/]" if check.passed else "[red]WRONG[/]", check.detail)
        console.print(checks)
        figures = Table("figure", title="How fast?", title_justify="left")
        for column in ("measured", "floor", "× floor"):
            figures.add_column(column, justify="right")
        figures.add_column("unit")
        figures.add_column("note")
        for figure in self.figures:
            floor = times = ""
            if figure.floor is not None:
                floor, times = _number(figure.floor), f"{figure.value / figure.floor:.2f}"
            figures.add_row(figure.name, _number(figure.value), floor, times, figure.unit, figure.note)
        console.print(figures)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
