"""The scheduler's end of workers' and draft workers' streams."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Any

from cluster.channel import KEEPALIVE_TIMEOUT_S
from cluster.health import Progress
from cluster.outgoing import Outbox

SILENT_S = 0.75 * KEEPALIVE_TIMEOUT_S
"""A worker is heard each second. A connection breaks at once when a process dies, but KEEPALIVE_TIMEOUT_S after the
last news when pings go unanswered; that may be sooner than `heartbeat_timeout_s`."""


@dataclass(eq=False)
class WorkerLink:
    """One attached worker's stream: what is to be sent, and when it was last heard."""

    worker_id: str
    boot_id: str
    epoch: int
    last_heard: float
    last_step_s: float = 0.0
    progress: Progress = field(default_factory=Progress)
    """of the issued steps, from one result to the next"""
    draining: bool = False
    """it is to be relieved; its end is no crash"""
    drained_sent: bool = False
    leaving: bool = False
    """it has said so. How its stream ends tells nothing: one that is reset may read as one that was closed"""
    _silent_until: float = -math.inf
    """when the last silence of SILENT_S or more ended"""
    outbox: Outbox = field(default_factory=Outbox)

    def hear(self, now: float) -> None:
        """Something came from it."""
        if self.is_frozen(now, SILENT_S):
            self._silent_until = now
        self.last_heard = now

    @property
    def closed(self) -> bool:
        """Whether the stream has ended, or is to."""
        return self.outbox.closed

    def send(self, message: Any) -> None:
        """Send a message, now or after those before it; bounded by the protocol itself: two steps, and rare notices."""
        self.outbox.send(message)

    def close(self) -> None:
        """End the stream."""
        self.outbox.close(drop=True)

    def note_issued(self, now: float) -> None:
        """A step was sent; the time of one that waits behind another begins with that one's result."""
        if not self.progress.running_s(now):
            self.progress.began(now)

    def note_progress(self, now: float, goes_on: bool) -> None:
        """A result has come, and another step is issued already or not."""
        if goes_on:
            self.progress.began(now)
        else:
            self.progress.ended()

    def is_frozen(self, now: float, timeout_s: float) -> bool:
        """No sign of life for too long."""
        return now - self.last_heard > timeout_s

    def is_cut_off(self, now: float) -> bool:
        """Whether a connection that breaks now does so because nothing came through, not because the worker died.

        A peer gives up a link that is cut. When the link is whole again, what was under way still arrives, and
        only then the break.
        """
        return self.is_frozen(now, SILENT_S) or now - self._silent_until < KEEPALIVE_TIMEOUT_S


@dataclass(eq=False)
class DraftLink:
    """One announced draft worker."""

    worker_id: str
    model: str
    address: str
    proposer: str
    last_heard: float
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    """it is to end; workers are not sent to it any more"""

    def is_frozen(self, now: float, timeout_s: float) -> bool:
        """No sign of life for too long."""
        return now - self.last_heard > timeout_s
