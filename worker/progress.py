"""Shows how far loading is: a bar on a terminal, else a log line per stage and per tenth of it."""

from __future__ import annotations

import logging
import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cluster.logs import event

logger = logging.getLogger(__name__)


class LoadingProgress:
    """A context; call it with what is going on and the share of it that is done, if known. Writes to stderr only."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task("loading", total=None)
        self._said: tuple[str, int] = ("", -1)

    def __enter__(self) -> LoadingProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, what: str, share: float | None) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=what, total=None if share is None else 1.0, completed=share or 0.0)
            return
        tenth = -1 if share is None else int(share * 10)
        if (what, tenth) != self._said:
            self._said = (what, tenth)
            if share is None:
                event(logger, what)
            else:
                event(logger, what, done=f"{tenth * 10}%")
