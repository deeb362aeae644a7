"""How much slower than itself this machine is at the moment: what a bound in seconds may be exceeded by."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

BEAT_S = 0.02


class Lag:
    """Notes by how much its own short sleeps are overslept."""

    def __init__(self) -> None:
        self._slept: list[tuple[float, float]] = []
        """(when, too long by)"""

    def between(self, start: float, end: float) -> float:
        """Seconds by which this process was late, all together, in a span of the monotonic clock."""
        return sum(late for when, late in self._slept if start <= when <= end)

    async def measure(self) -> None:
        """Until cancelled."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(BEAT_S)
            now = time.monotonic()
            if (late := now - before - BEAT_S) > BEAT_S / 2:
                self.note(now, late)

    def note(self, when: float, late_s: float) -> None:
        """A sleep that ended at `when` took so much too long."""
        self._slept.append((when, late_s))


@contextlib.asynccontextmanager
async def measuring() -> AsyncIterator[Lag]:
    """Measure while the block runs."""
    lag = Lag()
    task = asyncio.create_task(lag.measure())
    try:
        yield lag
    finally:
        task.cancel()
