"""A cell of the matrix: one load, and faults that strike it one after the other; what must hold, and how it is run.

eight clients, each asking again and again ─────────────────────▶ the last answers come
             │ index reached            │ noticed, lifted, settled
             └ strike ──────────────────┘ next strike …
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

from tests.chaos import faults, leaks
from tests.chaos.client import Answer, Gateways, Record, run
from tests.chaos.cluster import PATIENCE_S, SCHEDULERS, Cluster, Options
from tests.chaos.faults import FAULTS, TARGETS, Strike, Struck
from tests.chaos.lag import Lag, measuring
from tests.chaos.loads import LOADS, Ask, Load, fake_answer, make_loads

LONGEST_PAUSE_S = 10.0
LONGEST_CALMING_S = 20.0
"""until nothing is left of any request; a lost gateway's are kept for five seconds, a dead link for four"""
QUICK_RESTART_S = 3.0
INDICES = (1, 7, 17, 12, 29)


@dataclass(frozen=True, slots=True)
class Cell:
    """One load and its faults."""

    load: str
    strikes: tuple[Strike, ...]
    together: bool = False
    """the later strikes don't wait for the first to be over"""

    def __str__(self) -> str:
        return f"{self.load}: {' + '.join(str(strike) for strike in self.strikes)}"


def pairwise_cells() -> list[Cell]:
    """Fifteen cells with every pair of fault and target, fault and load, target and load.

    The load of a pair is (fault + target) mod 5, a Latin square: each load has five pairs, no two of which share their
    fault or their target. They go into three cells, of two strikes, two and one.
    """
    cells = []
    for number, load in enumerate(LOADS):
        pairs = [(fault, TARGETS[(number - place) % len(TARGETS)]) for place, fault in enumerate(FAULTS)]
        strikes = [
            Strike(fault, target, INDICES[(place + number) % len(INDICES)])
            for place, (fault, target) in enumerate(pairs)
        ]
        cells += [Cell(load, tuple(strikes[first : first + 2])) for first in (0, 2, 4)]
    return cells


def every_cell() -> list[Cell]:
    """The full matrix, and a leader that is cut off from Redis alone; one strike each."""
    full = itertools.product(LOADS, TARGETS, FAULTS)
    cells = [
        Cell(load, (Strike(fault, target, INDICES[number % len(INDICES)]),))
        for number, (load, target, fault) in enumerate(full)
    ]
    return cells + [cut_off_from_redis(load) for load in LOADS]


def cut_off_from_redis(load: str) -> Cell:
    """Everybody else still reaches the leader."""
    return Cell(load, (Strike("cut", "leader redis", 17),))


@dataclass
class Result:
    """What a cell showed."""

    cell: Cell
    struck: list[Struck]
    records: list[Record]
    tokens_compared: int = 0
    tables_compared: int = 0
    losses: list[str] = field(default_factory=list)
    """what should not have been; empty: the cell holds"""
    seconds: float = 0.0

    def pauses_s(self, struck: Struck) -> list[float]:
        """For each stream that lived when a fault struck: its longest wait until everything was settled."""
        until = struck.at + struck.settled_s
        live = [record for record in self.records if record.began < struck.at < record.ended]
        return sorted(record.longest_pause_s(struck.at, until) for record in live)


class Arena:
    """A cluster to run cells in, what every answer must be, and what the cluster holds at rest."""

    def __init__(self, cluster: Cluster, loads: dict[str, Load], oracle: Callable[[Ask], Awaitable[object]] | None):
        self.cluster = cluster
        self.loads = loads
        self.lag = Lag()
        self.rest: dict[str, leaks.Rest] = {}
        self._oracle = oracle
        self._references: dict[Ask, Answer] = {}

    async def references(self, load: Load) -> list[Answer]:
        """The undisturbed answers; with the fake engine they are what the oracle says, token for token."""
        missing = [ask for ask in load.asks if ask not in self._references]
        gateways = Gateways(self.cluster.gateways())
        try:
            async with asyncio.timeout(PATIENCE_S * 2):
                records = await asyncio.gather(*(run(gateways, number, ask) for number, ask in enumerate(missing)))
        finally:
            await gateways.close()
        for record in records:
            if self._oracle is not None:
                told = tuple(tuple(record.answer.tokens[choice]) for choice in range(record.ask.n))
                assert told == await self._oracle(record.ask), f"an undisturbed answer is wrong: {record.ask}"
            self._references[record.ask] = record.answer
        return [self._references[ask] for ask in load.asks]

    async def run(self, cell: Cell) -> Result:
        """Run a cell in a settled cluster, and leave one behind. Raises AssertionError where it can't go on."""
        began = time.monotonic()
        load = self.loads[cell.load]
        expected = await self.references(load)
        if not self.rest:
            await self.cluster.settled()
            self.rest = await leaks.at_rest(self.cluster)
        result = Result(cell, [], [])
        crashes = self._crashes()
        crowd = _Crowd(self, load)
        try:
            async with asyncio.timeout(PATIENCE_S * (2 + len(cell.strikes))):
                await crowd.conduct(cell, result)
                result.records = await crowd.finish()
        finally:
            await crowd.close()
        self.judge(result, dict(zip(load.asks, expected, strict=True)))
        result.losses += blamed(self._crashes() - crashes, cell)
        over = time.monotonic()
        await leaks.until_at_rest(self.cluster, self.rest)
        result.losses += self._slow_to_rest(over, time.monotonic())
        result.seconds = time.monotonic() - began
        return result

    def _slow_to_rest(self, start: float, end: float) -> list[str]:
        """What goes in the end, but only because a collector or a distant timeout comes by, is a leak, too."""
        bound = LONGEST_CALMING_S + self.lag.between(start, end)
        return [f"it took {end - start:.1f} s until nothing was left"] if end - start > bound else []

    def _crashes(self) -> int:
        """How many ends of workers schedulers have taken for crashes, for which requests are to blame."""
        return sum(self.cluster.said(name, "crashed=True") for name in SCHEDULERS)

    def judge(self, result: Result, expected: dict[Ask, Answer]) -> None:
        """Compare every answer, and every failure with what was struck."""
        for record in result.records:
            answer, wanted = record.answer, expected[record.ask]
            result.tokens_compared += answer.num_tokens
            if not answer.same_as(wanted):
                result.losses.append(f"another answer: {answer.tokens} instead of {wanted.tokens}")
            usage = (answer.usage.prompt_tokens, answer.usage.completion_tokens)
            if usage != (len(record.ask.prompt), answer.num_tokens):
                result.losses.append(f"usage {usage} with {len(record.ask.prompt)} and {answer.num_tokens} tokens")
            result.losses += self._hangs(record, len(result.struck) if result.cell.together else 1)
            result.losses += unexcused(record, result.struck)
        for struck in result.struck:
            if not has_hit(struck, result.records):
                result.losses.append(f"{struck.strike} ({struck.name}) hit nobody")

    def _hangs(self, record: Record, at_once: int) -> list[str]:
        """Pauses that are too long, whatever the machine's own part in them."""
        found = []
        for start, end in record.pauses():
            if end - start <= LONGEST_PAUSE_S * at_once:
                continue
            slow_restarts = sum(
                max(0.0, min(end, until) - max(start, since) - QUICK_RESTART_S)
                for since, until in self.cluster.restarting_s
                if until > start and since < end
            )
            if end - start > LONGEST_PAUSE_S * at_once + self.lag.between(start, end) + slow_restarts:
                found.append(f"nothing came for {end - start:.1f} s")
        return found


def blamed(crashes: int, cell: Cell) -> list[str]:
    """Requests are only to blame for workers that die, never for one that is cut off, stands still or leaves."""
    killed = sum(strike.target == "worker" and strike.fault == "kill" for strike in cell.strikes)
    return [f"{crashes} ends of workers were taken for crashes, {killed} were"] if crashes > killed else []


def unexcused(record: Record, struck: list[Struck]) -> list[str]:
    """Errors that a client saw although its gateway survived."""
    found = []
    for failure in record.failures:
        killed = any(one.name == failure.gateway and one.strike.fault == "kill" for one in struck)
        refused = failure.held == 0 and failure.code in ("UNAVAILABLE", "ALREADY_EXISTS")
        if not (killed or refused):
            found.append(f"{failure.gateway} failed a stream: {failure.code} {failure.details} after {failure.held}")
    return found


def has_hit(struck: Struck, records: list[Record]) -> bool:
    """Whether the fault struck a live stream, by what its client was told; for what no client sees, it was noticed."""
    fault, target = struck.strike.fault, struck.strike.target
    live = [record for record in records if record.began < struck.at < record.ended]
    if not live:
        return False
    if fault == "slow" or target in ("redis", "draft") or (target == "gateway" and fault == "term"):
        return True
    if target == "leader redis":
        # It serves on until its lease is over and another one leads: streams that have begun by then are moved.
        return any(record.resumptions for record in records if record.ended > struck.at)
    return any(record.resumptions for record in live)


class _Crowd:
    """Eight clients that ask until they are told to stop, and the faults that strike them."""

    def __init__(self, arena: Arena, load: Load) -> None:
        self._arena = arena
        self._cluster = arena.cluster
        self._gateways = Gateways(arena.cluster.gateways())
        self._enough = False
        self._armed: list[tuple[int, Callable[[], None]]] = []
        self._clients = [asyncio.create_task(self._ask(number, ask)) for number, ask in enumerate(load.asks)]

    async def conduct(self, cell: Cell, result: Result) -> None:
        """All strikes of a cell, each lifted and over."""
        result.tables_compared += await leaks.compare_tables(self._cluster)
        if cell.together:
            names = [await faults.name_of(self._cluster, one.target, one.index) for one in cell.strikes]
            strikes = zip(cell.strikes, names, strict=True)
            await asyncio.gather(*(self._strike(strike, name, result) for strike, name in strikes))
            return
        for strike in cell.strikes:
            await self._strike(strike, await faults.name_of(self._cluster, strike.target, strike.index), result)
            result.tables_compared += await leaks.compare_tables(self._cluster)

    async def _strike(self, strike: Strike, name: str, result: Result) -> None:
        cluster = self._cluster
        before = await faults.look_before(cluster, name)
        await self._at(strike.index, lambda: faults.apply(cluster, strike.fault, name))
        struck = Struck(strike, name, time.monotonic(), before=before)
        result.struck.append(struck)
        try:
            if strike.fault == "slow":
                await self._at(strike.index + faults.SLOW_TOKENS, lambda: None)
            await self._unless_a_client_fails(faults.noticed(cluster, struck))
        finally:
            faults.lift(cluster, strike.fault, name)
        struck.lifted_at = time.monotonic()
        await self._unless_a_client_fails(cluster.settled())
        struck.settled_s = time.monotonic() - struck.at

    async def _at(self, index: int, action: Callable[[], None]) -> None:
        """Act when a stream comes to hold `index` tokens; return then."""
        done = asyncio.get_running_loop().create_future()

        def act() -> None:
            action()
            done.set_result(None)

        self._armed.append((index, act))
        await self._unless_a_client_fails(done)

    async def _unless_a_client_fails(self, work: Awaitable[object]) -> None:
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait([working, *self._clients], return_when=asyncio.FIRST_COMPLETED)
            for client in self._clients:
                if client.done():
                    client.result()
            await working
        finally:
            working.cancel()

    async def _ask(self, number: int, ask: Ask) -> list[Record]:
        records: list[Record] = []
        while not self._enough:
            seen = 0

            def watch(count: int) -> None:
                nonlocal seen
                for armed in [one for one in self._armed if seen < one[0] <= count]:
                    self._armed.remove(armed)
                    armed[1]()
                seen = count

            records.append(await run(self._gateways, number + len(records), ask, watch))
        return records

    async def finish(self) -> list[Record]:
        """Let every client have its last answer."""
        self._enough = True
        return list(itertools.chain.from_iterable(await asyncio.gather(*self._clients)))

    async def close(self) -> None:
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        await self._gateways.close()


@contextlib.asynccontextmanager
async def arena(cluster: Cluster, options: Options) -> AsyncIterator[Arena]:
    """An arena in a running cluster. The oracle has a process of its own: it would hold up every link."""
    fake = options.model is None
    loads = make_loads() if fake else make_loads(scale=0.5, prefill=900)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        told = {ask: pool.submit(fake_answer, ask) for load in loads.values() for ask in load.asks if fake}

        async def oracle(ask: Ask) -> object:
            return await asyncio.wrap_future(told.get(ask) or pool.submit(fake_answer, ask))

        async with measuring() as lag:
            opened = Arena(cluster, loads, oracle if fake else None)
            opened.lag = lag
            try:
                yield opened
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
