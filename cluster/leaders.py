"""Who leads a cell, found out and followed by those who depend on it: gateways, workers, draft workers.

    addresses given ──┐
    entries in the shared state ──┼──▶ known schedulers ──WatchLeader, one stream each──▶ reports ──▶ the leader
    addresses that schedulers report ──┘

The leader is the scheduler that says so itself, under the highest term of all that do. So whoever is connected to an
old leader, however healthy that connection looks, learns of a newer one from the newer one (`outranked`), and a standby
that takes over is known to everybody the moment it does. The shared state only helps to find schedulers: while it is
away, those that are known stay known. Reports are hints; what is obeyed is the term of a welcome.

With a single address and no shared state there is nobody to choose from, and nothing is watched.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
from tandem.v1 import scheduler_pb2, scheduler_pb2_grpc

from cluster import channel
from cluster.errors import from_rpc_error
from cluster.logs import event
from cluster.state import MEMORY, SchedulerEntry, State, open_state, search

logger = logging.getLogger(__name__)

MAX_BACKOFF_S = 2.0
# Schedulers of one cell are few; more addresses than this are somebody's mistake.
MAX_KNOWN = 64


def follow(addresses: Sequence[str], state: str, cluster: str, cell: str) -> Leaders:
    """The schedulers of a cell, as services are configured; `state`: a URL, or memory, where none is found."""
    return Leaders(addresses, state=None if state == MEMORY else open_state(state, cluster), cell=cell)


@dataclass(eq=False, slots=True)
class _Known:
    """One scheduler that may lead."""

    address: str
    given: bool
    """by configuration; the others are forgotten once nobody answers there"""
    leading_term: int = 0
    """as it says itself; 0: it doesn't lead, or doesn't answer"""
    foreign: bool = False
    """it belongs to another cell, as it says itself"""
    watch: asyncio.Task[None] | None = field(default=None, repr=False)


class Leaders:
    """The schedulers of one cell. Everything happens on the event loop, which must run from the start."""

    def __init__(self, addresses: Sequence[str], *, state: State | None = None, cell: str = "") -> None:
        """`addresses`: of schedulers, in order of preference; `state`: where further ones are found, ours to close.

        `cell`: its name; empty: the one cell there is.
        """
        self._known = {address: _Known(address, given=True) for address in addresses}
        self._state = state
        self._cell = cell
        self._turn = 0
        self._tried = ""
        """the address that was tried last, until we were welcomed there"""
        self._seen: tuple[str, int] | None = None
        """the leader that was known then"""
        self._hinted = ""
        self._news = asyncio.Event()
        self._searching: asyncio.Task[None] | None = None
        self._started = False

    def start(self) -> None:
        """Begin to watch."""
        self._started = True
        if self._state is not None:
            self._searching = asyncio.create_task(
                search(self._state, self._note_found, lambda: self._started), name="search for schedulers"
            )
        self._watch_all()

    async def close(self) -> None:
        """End every watch."""
        self._started = False
        tasks = [known.watch for known in self._known.values()] + [self._searching]
        running = [task for task in tasks if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._state is not None:
            await self._state.close()

    @property
    def leader(self) -> tuple[str, int] | None:
        """Address and term of the scheduler that leads, by its own account."""
        best = max(self._known.values(), key=lambda known: known.leading_term, default=None)
        return None if best is None or not best.leading_term else (best.address, best.leading_term)

    @property
    def cell(self) -> str:
        """The cell's name; empty while neither configuration nor a scheduler has said it."""
        return self._cell

    @property
    def addresses(self) -> list[str]:
        """Everybody known."""
        return list(self._known)

    @property
    def _own(self) -> list[str]:
        return [known.address for known in self._known.values() if not known.foreign]

    # ------------------------------------------------------------------------------------------ for a connection

    async def candidate(self) -> str:
        """Whom to call now: the leader where one is known, else one after the other. Waits while nobody is known."""
        while not self._own:
            await self._changed()
        best = self._seen = self.leader
        choice = ""
        if best is not None and best[0] != self._tried:
            choice = best[0]
        elif self._hinted in self._own and self._hinted != self._tried:
            choice = self._hinted
        self._hinted = ""
        if not choice:
            addresses = self._own
            choice = addresses[self._turn % len(addresses)]
            self._turn += 1
        self._tried = choice
        return choice

    def welcomed(self) -> None:
        """The candidate is a leader indeed; when it is lost, it is the first to be called again."""
        self._turn = self._own.index(self._tried) if self._tried in self._own else 0
        self._tried = ""

    def refused(self, error: BaseException) -> None:
        """The candidate would not have us; a standby says who leads."""
        if not isinstance(error, grpc.RpcError):
            return
        leader = from_rpc_error(error).metadata.get("leader", "")
        if leader:
            self._know(leader)
            self._hinted = leader

    async def pause(self, attempt: int, *, first_s: float = 0.1, max_s: float = MAX_BACKOFF_S) -> None:
        """Back off before the next attempt, but no longer than until a leader is known that was not at the last one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(channel.backoff_delay_s(attempt, first_s=first_s, max_s=max_s)):
                while self.leader in (None, self._seen):
                    await self._changed()

    async def outranked(self, term: int) -> str:
        """Return once a scheduler leads under a higher term than this one; its address."""
        while (best := self.leader) is None or best[1] <= term:
            await self._changed()
        return best[0]

    # ------------------------------------------------------------------------------------------------- watching

    async def _changed(self) -> None:
        await self._news.wait()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _know(self, address: str) -> None:
        if address not in self._known and len(self._known) < MAX_KNOWN:
            self._known[address] = _Known(address, given=False)
            self._watch_all()
            self._tell()

    def _watch_all(self) -> None:
        if not self._started or (self._state is None and len(self._known) < 2):
            return
        for known in self._known.values():
            if known.watch is None:
                known.watch = asyncio.create_task(self._watch(known), name=f"watch of {known.address}")

    async def _watch(self, known: _Known) -> None:
        """Keep a stream to one scheduler; ends where an address that was only hinted at leads nowhere."""
        attempt = 0
        while True:
            try:
                async with channel.connect(known.address) as connection:
                    stub = scheduler_pb2_grpc.SchedulerServiceStub(connection)
                    async for response in stub.WatchLeader(scheduler_pb2.WatchLeaderRequest()):
                        attempt = 0
                        self._report(known, response)
            except grpc.RpcError:
                pass
            except Exception:
                logger.exception("the watch of a scheduler failed")
            self._set_leading(known, 0)
            attempt += 1
            if not known.given and attempt > 3:
                del self._known[known.address]
                self._tell()
                return
            await channel.backoff(attempt, max_s=MAX_BACKOFF_S)

    def _report(self, known: _Known, response: scheduler_pb2.WatchLeaderResponse) -> None:
        # Where there turn out to be several after all, the first one heard of is stayed with.
        self._cell = self._cell or response.cell
        if response.cell != self._cell:
            # An address may have had another owner when we heard of it.
            if not known.foreign:
                event(logger, "of another cell", level=logging.WARNING, address=known.address, cell=response.cell)
            known.foreign, known.leading_term = True, 0
            self._tell()
            return
        if known.foreign:
            known.foreign = False
            self._tell()
        for address in response.schedulers:
            self._know(address)
        self._set_leading(known, response.term if response.leading else 0)

    def _set_leading(self, known: _Known, term: int) -> None:
        if known.leading_term != term:
            known.leading_term = term
            self._tell()

    def _note_found(self, entries: Sequence[SchedulerEntry]) -> None:
        for entry in entries:
            if not self._cell or entry.cell == self._cell:
                self._know(entry.address)
