"""What `tandem up` shows on stderr: the children's lines, each marked with its child, and what is awaited."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import IO

from rich.console import Console
from rich.status import Status
from rich.text import Text

_COLOURS = ("cyan", "green", "magenta", "blue", "yellow", "bright_cyan", "bright_green", "bright_magenta")
_NAME_WIDTH = 9


class Output:
    """Lines of several children on one terminal, one at a time."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self.console = Console(file=stream or sys.stderr, highlight=False, soft_wrap=True)
        self._colours: dict[str, str] = {}
        self._held: list[Text] | None = None
        self._status: Status | None = None
        self._what = ""

    def line(self, name: str, line: str) -> None:
        """Show one line of a child, or keep it while the terminal is held."""
        colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
        text = Text.assemble((f"{name:<{_NAME_WIDTH}} │ ", colour))
        # Colours that a child sends keep their meaning; other control characters don't reach the terminal.
        text.append_text(Text.from_ansi(line))
        if self._held is not None:
            self._held.append(text)
        else:
            self.console.print(text)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep the children's lines back, for something that has the terminal to itself."""
        self._held = []
        try:
            yield
        finally:
            lines, self._held = self._held, None
            for text in lines:
                self.console.print(text)

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """A spinner with what is awaited, on a terminal; elsewhere nothing."""
        if not self.console.is_terminal:
            yield
            return
        with self.console.status(Text(what)) as self._status:
            self._what = what
            yield
        self._status = None

    def now_waiting(self, what: str) -> None:
        """Change what the spinner says."""
        self._what = what
        if self._status is not None:
            self._status.update(Text(what))

    def progress(self, name: str, text: str) -> None:
        """A child's progress bar, beside what is awaited."""
        if self._status is not None:
            self._status.update(Text(f"{self._what}: {name} {text}"))
