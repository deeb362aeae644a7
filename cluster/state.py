"""What the schedulers of a cluster share: who leads each cell, and where schedulers are.

Leadership of a cell is a lease with a time to live. Whoever holds it leads under its term; when it lapses, any
scheduler of the cell may take it, under a higher term:

    vacant ──acquire──▶ held by A, term t ──renew (before the time is over)──▶ held by A, term t
       ▲                     │   └──acquire by A itself──▶ held by A, term > t
       └──release, or lapse──┘

A term fences: every internal message carries one, and a receiver drops lower ones. So a term must rise with each
leadership even when what was stored is lost (an emptied store, a scheduler restarted with embedded state) or a clock
was set back: it is the greatest of stored + 1, the wall clock in milliseconds, and one more than any term a peer has
shown (`next_term`).

The lease is no proof of being obeyed: a holder that stands still or is cut off may learn late that it has lapsed.
Safety is the receivers', who follow the higher term; the lease only keeps the number of would-be leaders at one most of
the time. Entries of schedulers are hints where to ask, and vanish by themselves. Nothing on the token path comes here.

Two implementations, one contract (`tests/cluster/test_state_contract.py`): `MemoryState` for a scheduler on its own,
and `cluster.redis_state.RedisState`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.logs import event

logger = logging.getLogger(__name__)

MEMORY = "memory"
SEARCH_PERIOD_S = 1.0
# Terms are milliseconds of a clock; what lies thousands of years ahead is garbage, and would leave no room above it.
MAX_TERM = 1 << 48


class StateUnavailable(Exception):
    """The store can't be reached or answers nonsense: nothing is known, and nothing may be concluded."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Who leads a cell, and under which term."""

    cell: str
    scheduler_id: str
    address: str
    """HOST:PORT where gateways and workers reach it"""
    term: int


@dataclass(frozen=True, slots=True)
class SchedulerEntry:
    """A scheduler as it announces itself; a hint."""

    scheduler_id: str
    address: str
    cell: str
    term: int
    """that it leads under; 0: a standby"""


class State(Protocol):
    """The shared state of one cluster. Every method raises StateUnavailable when the store can't be reached."""

    async def acquire(
        self, cell: str, scheduler_id: str, address: str, *, ttl_s: float, highest_seen: int, now_ms: int
    ) -> Lease:
        """Take the cell's lease if it is vacant or our own; the lease that stands afterwards, whoever holds it.

        Ours gets `next_term(…)`, also where we held it already: that is how a leader outbids a term it was shown.
        """
        ...

    async def renew(self, lease: Lease, *, ttl_s: float) -> Lease | None:
        """Hold our lease for ttl_s from now; the lease that stands afterwards.

        A lease that has lapsed, or was lost with an emptied store, is put back under its own term unless there has been
        a higher one since: then another's is returned, or None if that one is over too.
        """
        ...

    async def release(self, lease: Lease) -> None:
        """Give our lease up, so that another may take it at once. Without effect if it is no longer ours."""
        ...

    async def leader(self, cell: str) -> Lease | None:
        """The cell's lease; None while nobody holds it."""
        ...

    async def register(self, entry: SchedulerEntry, *, ttl_s: float) -> None:
        """Put a scheduler's entry, in place of its earlier one, for ttl_s."""
        ...

    async def withdraw(self, scheduler_id: str) -> None:
        """Take a scheduler's entry back; unknown ones are ignored."""
        ...

    async def schedulers(self) -> list[SchedulerEntry]:
        """The entries of all cells, by cell and id."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


def next_term(stored: int, highest_seen: int, now_ms: int) -> int:
    """The term of a new leadership: above every earlier one, wherever traces of that are left."""
    return max(stored + 1, now_ms, highest_seen + 1)


class MemoryState:
    """Embedded: shared by nobody outside of this process, and empty again after a restart."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: steady seconds, for times to live."""
        self._clock = clock
        self._leases: dict[str, tuple[Lease, float]] = {}
        self._terms: dict[str, int] = {}
        self._entries: dict[str, tuple[SchedulerEntry, float]] = {}

    async def acquire(
        self, cell: str, scheduler_id: str, address: str, *, ttl_s: float, highest_seen: int, now_ms: int
    ) -> Lease:
        held = await self.leader(cell)
        if held is not None and held.scheduler_id != scheduler_id:
            return held
        lease = Lease(cell, scheduler_id, address, next_term(self._terms.get(cell, 0), highest_seen, now_ms))
        self._put(lease, ttl_s)
        return lease

    async def renew(self, lease: Lease, *, ttl_s: float) -> Lease | None:
        held = await self.leader(lease.cell)
        if held is None and self._terms.get(lease.cell, 0) <= lease.term:
            held = lease
        if held == lease:
            self._put(lease, ttl_s)
        return held

    async def release(self, lease: Lease) -> None:
        if await self.leader(lease.cell) == lease:
            del self._leases[lease.cell]

    async def leader(self, cell: str) -> Lease | None:
        held = self._leases.get(cell)
        return None if held is None or held[1] <= self._clock() else held[0]

    async def register(self, entry: SchedulerEntry, *, ttl_s: float) -> None:
        self._entries[entry.scheduler_id] = (entry, self._clock() + ttl_s)

    async def withdraw(self, scheduler_id: str) -> None:
        self._entries.pop(scheduler_id, None)

    async def schedulers(self) -> list[SchedulerEntry]:
        now = self._clock()
        self._entries = {key: kept for key, kept in self._entries.items() if kept[1] > now}
        return sorted((entry for entry, _ in self._entries.values()), key=lambda one: (one.cell, one.scheduler_id))

    async def close(self) -> None:
        pass

    def _put(self, lease: Lease, ttl_s: float) -> None:
        self._leases[lease.cell] = (lease, self._clock() + ttl_s)
        self._terms[lease.cell] = lease.term


def check_url(url: str) -> None:
    """Raise ValueError unless `open_state` takes such a URL."""
    if url != MEMORY and not url.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError(f"--state is {MEMORY} or a Redis URL such as redis://127.0.0.1:6379/0, not {url!r}")


def open_state(url: str, cluster: str) -> State:
    """The state at `url`, for the cluster of that name; connects lazily."""
    check_url(url)
    if url == MEMORY:
        return MemoryState()
    from cluster.redis_state import RedisState  # the client library is needed by those who use it

    return RedisState(url, cluster)


async def search(state: State, found: Callable[[Sequence[SchedulerEntry]], None], goes_on: Callable[[], bool]) -> None:
    """Tell `found` which schedulers are registered, once a period, while `goes_on()`; a state that is away, or a look
    that fails, is logged and the search goes on.
    """
    away = False
    while goes_on():  # the client of a store may lose a cancellation
        try:
            found(await state.schedulers())
            away = False
        except StateUnavailable as error:
            if not away:
                event(logger, "the shared state is away", level=logging.WARNING, why=str(error))
            away = True
        except Exception:
            logger.exception("a search for schedulers failed")
        await asyncio.sleep(SEARCH_PERIOD_S)
