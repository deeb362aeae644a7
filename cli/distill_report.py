"""How far `tandem distill` is: bars on a terminal, and elsewhere a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from distill.evaluation import Acceptance
    from distill.training import Position

LINE_EVERY_S = 10.0
TRAINING = "training"


@dataclass(slots=True)
class _Stage:
    """One that has begun."""

    since: float
    first_share: float
    """what was done already when it began"""
    told: float
    """when a line was last written"""
    has_ended: bool = False


class Shown:
    """Implements `engine.progress.Progress` and `distill.training.Report`."""

    def __init__(
        self, console: Console, bars: Progress | None, num_steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`bars`: None where nobody watches a terminal."""
        self._console = console
        self._bars = bars
        self._num_steps = num_steps
        self._clock = clock
        self._tasks: dict[str, Any] = {}
        self._stages: dict[str, _Stage] = {}

    def stage(self, what: str, share: float | None) -> None:
        """See `engine.progress`."""
        self._show(what, share, "")

    def step(self, position: Position, loss: float, agreeing: float) -> None:
        """See `distill.training.Report`."""
        now = f"step {position.step}, epoch {position.epoch + 1}, loss {loss:.2f}, agreeing {agreeing:.0%}"
        self._show(TRAINING, position.step / self._num_steps, now)

    def evaluated(self, position: Position, found: list[Acceptance]) -> None:
        """See `distill.training.Report`."""
        for one in found:
            alone = ", ".join(f"{k}: {value:.2f}" for k, value in one.alone.items())
            both = ", ".join(f"{k}: {value:.2f}" for k, value in one.with_lookup.items())
            self.note(
                f"step {position.step}, held out, T = {one.temperature:g}: {one.top_1:.1%} right; accepted per step by "
                f"draft length {alone}; behind a lookup {both}"
            )

    def note(self, text: str) -> None:
        """See `distill.training.Report`."""
        self._console.print(text, markup=False)

    def _show(self, what: str, share: float | None, now: str) -> None:
        if self._bars is None:
            self._line(what, share, now)
            return
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=None, now="")
        total = None if share is None else 1.0
        self._bars.update(self._tasks[what], total=total, completed=share or 0.0, now=now)

    def _line(self, what: str, share: float | None, now: str) -> None:
        """One when a stage begins, one when it ends, and in between one every LINE_EVERY_S."""
        time_s = self._clock()
        stage = self._stages.get(what)
        begins = stage is None or (stage.has_ended and share != 1.0)
        if stage is None or begins:
            stage = self._stages[what] = _Stage(time_s, share or 0.0, time_s)
        elif stage.has_ended or (share != 1.0 and time_s < stage.told + LINE_EVERY_S):
            return
        stage.has_ended = share == 1.0
        stage.told = time_s
        parts = [what if share is None else f"{what} {share:.0%}", now]
        if share is not None and not begins:
            spent, gained = time_s - stage.since, share - stage.first_share
            parts.append(f"after {_duration(spent)}")
            if gained > 0 and share < 1:
                parts.append(f"about {_duration(spent / gained * (1 - share))} left")
        self.note(", ".join(part for part in parts if part))


def _duration(seconds: float) -> str:
    """To the unit that matters."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 600 else f"{round(whole / 60)} min"
