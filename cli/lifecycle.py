"""The life of one supervised child, as a table, and the rule when it is started again. Pure: time is an argument.

    STARTING ──ready line──▶ READY ──exit──▶ BACKOFF ──restart──▶ STARTING …
        └────────exit────────────────────────▶ │ └──give up──▶ FAILED
    STARTING, READY ──stop──▶ STOPPING ──exit──▶ STOPPED ◀──stop── BACKOFF

Giving up: a child that was never ready and exits by itself says why on stderr, and a second try would say the same; one
that was never ready and is killed (by the system short of memory, say) gets `max_crashes` tries. A child that was
ready once is restarted for ever, at growing intervals: the rest of the cluster holds its requests meanwhile.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """Where a child stands."""

    STARTING = "starting"
    READY = "ready"
    BACKOFF = "backoff"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class Event(Enum):
    """What happens to a child."""

    READY_LINE = "ready line"
    EXIT = "exit"
    RESTART = "restart"
    GIVE_UP = "give up"
    STOP = "stop"


TRANSITIONS = {
    (State.STARTING, Event.READY_LINE): State.READY,
    (State.STARTING, Event.EXIT): State.BACKOFF,
    (State.STARTING, Event.STOP): State.STOPPING,
    (State.READY, Event.EXIT): State.BACKOFF,
    (State.READY, Event.STOP): State.STOPPING,
    (State.BACKOFF, Event.RESTART): State.STARTING,
    (State.BACKOFF, Event.GIVE_UP): State.FAILED,
    (State.BACKOFF, Event.STOP): State.STOPPED,
    (State.STOPPING, Event.READY_LINE): State.STOPPING,
    (State.STOPPING, Event.STOP): State.STOPPING,
    (State.STOPPING, Event.EXIT): State.STOPPED,
    (State.STOPPED, Event.STOP): State.STOPPED,
    (State.FAILED, Event.STOP): State.STOPPED,
}


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How soon a child is started again."""

    first_delay_s: float = 0.2
    max_delay_s: float = 10.0
    stable_after_s: float = 30.0
    """a child that was ready for so long starts with a clean record"""
    max_crashes: int = 3
    """tries of a child that was never ready and is killed each time"""


class Lifecycle:
    """One child's state and record."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self.state = State.STARTING
        self.num_restarts = 0
        self._num_failures = 0
        self._was_ready = False
        self._ready_at_s: float | None = None

    def apply(self, event: Event) -> None:
        """Move on; raise ValueError for an illegal move."""
        try:
            self.state = TRANSITIONS[self.state, event]
        except KeyError:
            raise ValueError(f"{event.value} is illegal in state {self.state.value}") from None

    def ready(self, now_s: float) -> None:
        """The ready line came."""
        self.apply(Event.READY_LINE)
        self._was_ready = True
        self._ready_at_s = now_s

    def restarted(self) -> None:
        """A new process of the child runs."""
        self.apply(Event.RESTART)
        self.num_restarts += 1
        self._ready_at_s = None

    def exited(self, status: int, now_s: float) -> float | None:
        """Seconds until the restart, or None: give up. `status` as in Popen.returncode: negative for a signal."""
        self.apply(Event.EXIT)
        if self._ready_at_s is not None and now_s - self._ready_at_s >= self._policy.stable_after_s:
            self._num_failures = 0
        self._num_failures += 1
        if not self._was_ready and (status >= 0 or self._num_failures >= self._policy.max_crashes):
            self.apply(Event.GIVE_UP)
            return None
        doublings = min(self._num_failures - 1, 16)
        return min(self._policy.first_delay_s * 2.0**doublings, self._policy.max_delay_s)


def describe_exit(status: int) -> str:
    """What an exit status means, in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"killed by {name}" + ("; is memory short?" if name == "SIGKILL" else "")
