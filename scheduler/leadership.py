"""This scheduler's part in who leads its cell.

    standby ──took the lease──▶ leading ──another holds a later one──▶ standby
                                   │ ▲
                                   └─┘ renewed; or the store is away: it goes on leading, since nobody else can begin

All of it happens in rounds of one task: a round takes or renews the lease, and renews this scheduler's entry. Whoever
wants something of the leadership leaves word and wakes the task, so no two answers of the store overtake each other.

A leader that is shown a higher term than its own takes the lease anew, above that term; if another one holds it, it
has missed a change (it stood still, or was cut off) and becomes a standby. A leader told to stop gives its lease up and
serves on until a standby has taken it: gateways and workers leave for the higher term by themselves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from cluster import errors
from cluster.logs import event
from cluster.state import MAX_TERM, Lease, SchedulerEntry, State, StateUnavailable
from scheduler.loop import Cell

logger = logging.getLogger(__name__)

ENTRY_TTL_S = 3.0
HAND_OVER_PERIOD_S = 0.05
RETRY_AFTER_S = 0.5


@dataclass(frozen=True, slots=True)
class View:
    """Who leads, as far as this scheduler knows."""

    cell: str
    leading: bool
    """this scheduler does"""
    term: int
    """the highest known; its own, while it leads"""
    leader: str
    """HOST:PORT; empty: nobody, or unknown"""
    schedulers: tuple[str, ...]
    """HOST:PORT of each that is known in the cell"""


class Leadership:
    """Takes, keeps and loses the lease of one cell. Everything happens on the event loop."""

    def __init__(self, cell: Cell, state: State, *, cell_name: str, scheduler_id: str, address: str, ttl_s: float):
        """`address`: where gateways and workers reach this scheduler. A leader that dies is replaced after `ttl_s`."""
        self._cell = cell
        self._state = state
        self._cell_name = cell_name
        self._scheduler_id = scheduler_id
        self._address = address
        self._ttl_s = ttl_s
        self._lease: Lease | None = None
        """the one that we lead under"""
        self._highest_seen = 0
        self._resigning = False
        self._store_is_away = False
        self._patient_until = 0.0
        """a store that comes back may have lost the lease; the leader, if there is one, puts it back first"""
        self._wake = asyncio.Event()
        self._asked: list[asyncio.Future[None]] = []
        self._watchers: set[asyncio.Event] = set()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self.view = View(cell_name, False, 0, "", (address,))

    async def start(self) -> None:
        """Take the lease if it is there to be taken, and go on trying, or keeping it, until closed."""
        await self._round()
        self._task = asyncio.create_task(self._run(), name="leadership")

    async def close(self) -> None:
        """Give everything up; watchers' streams end."""
        self._closed = True
        self._wake_watchers()
        if self._task is None:
            return
        task, self._task = self._task, None
        # Not cancelled: a cancelled call of the store's client may go on as if nothing were.
        self._wake.set()
        await asyncio.gather(task, return_exceptions=True)
        try:
            if self._lease is not None:
                await self._state.release(self._lease)
            await self._state.withdraw(self._scheduler_id)
        except StateUnavailable:
            pass  # both end by themselves
        await self._state.close()

    # -------------------------------------------------------------------------------------------- for the servicer

    def require(self) -> None:
        """Raise errors.Unavailable, which names the leader, unless this scheduler leads."""
        if not self.view.leading:
            leader = {"leader": self.view.leader} if self.view.leader else {}
            message = f"a standby of cell {self._cell_name}; {self.view.leader or 'nobody'} leads it"
            raise errors.Unavailable(message, RETRY_AFTER_S, reason="NOT_LEADER", term=self.view.term, **leader)

    async def require_standby(self) -> None:
        """Raise TandemError unless somebody else leads, or could; the store is asked, as one may have just come."""
        if self.view.leading:
            await self._ask()
        if self.view.leading and len(self.view.schedulers) < 2:
            message = f"there is no standby that cell {self._cell_name} could be handed over to"
            raise errors.TandemError(grpc.StatusCode.FAILED_PRECONDITION, "NO_STANDBY", message)

    async def heard(self, highest_term: int) -> None:
        """A peer has seen such a term. Returns once a leader with a lower one has outbid it, or has stepped down.

        While the store is away neither can be; the peer then refuses this leader.
        """
        if highest_term > MAX_TERM:
            event(logger, "a peer's term is no term", level=logging.WARNING, term=highest_term)
            return
        self._highest_seen = max(self._highest_seen, highest_term)
        if self._lease is not None and highest_term > self._lease.term:
            await self._ask()

    async def watch(self) -> AsyncIterator[View]:
        """The view now and after each change, until closed."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            last = None
            while not self._closed:
                changed.clear()
                if self.view != last:
                    last = self.view
                    yield last
                await changed.wait()
        finally:
            self._watchers.discard(changed)

    # ------------------------------------------------------------------------------------------------- hand-over

    async def hand_over(self, timeout_s: float) -> bool:
        """Let a standby lead; whether one does now. False, and nothing has changed, where there is no standby."""
        self._resigning = True
        if self._lease is None:
            return True
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            async with asyncio.timeout(timeout_s):
                await self._ask()
                while self._lease is not None and len(self.view.schedulers) > 1:
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            event(logger, "no standby took over", level=logging.WARNING, timeout_s=timeout_s)
        finally:
            self._watchers.discard(changed)
        return self._lease is None

    # ---------------------------------------------------------------------------------------------------- rounds

    async def _ask(self) -> None:
        """Return after a round that begins from now on."""
        done = asyncio.get_running_loop().create_future()
        self._asked.append(done)
        self._wake.set()
        await done

    async def _run(self) -> None:
        while not self._closed:
            try:
                async with asyncio.timeout(self._period_s()):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            if not self._closed:
                await self._round()

    def _period_s(self) -> float:
        """A standby looks more often than a leader renews: what it adds to ttl_s is a pause of every stream."""
        if self._resigning:
            return HAND_OVER_PERIOD_S
        return self._ttl_s / (10 if self._lease is None else 3)

    async def _round(self) -> None:
        asked, self._asked = self._asked, []
        try:
            held = await self._settle_lease()
            term = 0 if self._lease is None else self._lease.term
            entry = SchedulerEntry(self._scheduler_id, self._address, self._cell_name, term)
            await self._state.register(entry, ttl_s=ENTRY_TTL_S)
            entries = await self._state.schedulers()
            others = tuple(sorted({one.address for one in entries if one.cell == self._cell_name} | {self._address}))
            self._see(held.address if held is not None else "", others)
            self._note_store(away=False)
        except StateUnavailable as error:
            self._note_store(away=True, why=str(error))
        except Exception:
            logger.exception("a round of the leadership failed")
        finally:
            for done in asked:
                if not done.done():
                    done.set_result(None)

    async def _settle_lease(self) -> Lease | None:
        """Take, renew or give up the lease, and lead or stand by accordingly; the lease that stands."""
        held = self._lease
        if self._resigning:
            if held is not None and await self._has_standby():
                await self._state.release(held)
            held = await self._state.leader(self._cell_name) or self._lease
        elif held is None and asyncio.get_running_loop().time() < self._patient_until:
            held = await self._state.leader(self._cell_name)
        elif held is None or self._highest_seen > held.term:
            held = await self._state.acquire(
                self._cell_name,
                self._scheduler_id,
                self._address,
                ttl_s=self._ttl_s,
                highest_seen=self._highest_seen,
                now_ms=time.time_ns() // 1_000_000,
            )
        else:
            held = await self._state.renew(held, ttl_s=self._ttl_s)
        if held is not None:
            self._highest_seen = max(self._highest_seen, held.term)
        if held is not None and held.scheduler_id == self._scheduler_id:
            if held != self._lease:
                self._lead(held)
        elif self._lease is not None:
            self._step_down(held)
        return held

    async def _has_standby(self) -> bool:
        entries = await self._state.schedulers()
        return any(one.cell == self._cell_name and one.scheduler_id != self._scheduler_id for one in entries)

    def _lead(self, lease: Lease) -> None:
        again = self._lease is not None
        self._lease = lease
        event(logger, "leading anew" if again else "leading", cell=self._cell_name, term=lease.term)
        self._cell.lead(lease.term)
        self._see(self._address, self.view.schedulers)

    def _step_down(self, held: Lease | None) -> None:
        leader, term = ("", 0) if held is None else (held.address, held.term)
        self._lease = None
        event(logger, "no longer leading", level=logging.WARNING, cell=self._cell_name, leader=leader, term=term)
        self._cell.step_down()
        self._see(leader, self.view.schedulers)

    def _see(self, leader: str, schedulers: tuple[str, ...]) -> None:
        leading = self._lease is not None
        term = self._lease.term if self._lease is not None else self._highest_seen
        view = View(self._cell_name, leading, term, leader, schedulers)
        if view != self.view:
            self.view = view
            self._wake_watchers()

    def _wake_watchers(self) -> None:
        for changed in self._watchers:
            changed.set()

    def _note_store(self, *, away: bool, why: str = "") -> None:
        if away and self.view.term:
            self._patient_until = asyncio.get_running_loop().time() + self._ttl_s
        if away != self._store_is_away:
            self._store_is_away = away
            if away:
                event(logger, "the shared state is away", level=logging.WARNING, why=why, leading=self.view.leading)
            else:
                event(logger, "the shared state is back", leading=self.view.leading)
