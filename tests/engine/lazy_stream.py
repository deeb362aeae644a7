"""A device as late as a device may be: work is done when somebody waits for it, and not before.

Whoever reads a result without waiting, or changes an input that launched work has yet to read, is found out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class LazyStream:
    """Implements `engine.stream.Stream`, on the thread that waits."""

    waiting: deque[Callable[[], None]] = field(default_factory=deque)
    was_late: bool = False
    """work was submitted while earlier work had not been done"""
    num_submitted: int = 0
    fail_at: frozenset[int] = frozenset()
    """pieces of work, counted from 1, instead of which an error is raised at the next mark"""
    error: Exception | None = None

    def submit(self, work: Callable[[], None]) -> None:
        self.was_late |= bool(self.waiting)
        self.num_submitted += 1
        self.waiting.append(self._fail if self.num_submitted in self.fail_at else work)

    def mark(self) -> LazyMark:
        mark = LazyMark(self)
        self.waiting.append(mark.reach)
        return mark

    def _fail(self) -> None:
        self.error = RuntimeError("a kernel failed")


@dataclass
class LazyMark:
    """Implements `engine.stream.Mark`."""

    stream: LazyStream
    is_reached: bool = False
    error: Exception | None = None

    def reach(self) -> None:
        self.is_reached = True
        self.error, self.stream.error = self.stream.error, None

    def wait(self) -> None:
        while not self.is_reached:
            self.stream.waiting.popleft()()
        if self.error is not None:
            raise self.error
