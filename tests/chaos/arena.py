"""How a cell is run.

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
from multiprocessing import get_context

from tests.chaos import faults, leaks
from tests.chaos.cells import Cell
from tests.chaos.client import Answer, Gateways, Record, run
from tests.chaos.cluster import PATIENCE_S, SCHEDULERS, Cluster, Options
from tests.chaos.faults import Strike, Struck
from tests.chaos.judgement import Result, blamed, judge, slow_to_rest
from tests.chaos.lag import Lag, measuring
from tests.chaos.loads import Ask, Load, fake_answer, make_loads

LOOK_S = 5.0
STUCK_S = 90.0
"""without a token for anybody; more than any fault takes, that of a machine included"""


class Arena:
    """A cluster to run cells in, what every answer must be, and what the cluster holds at rest."""

    def __init__(
        self, cluster: Cluster, loads: dict[str, Load], oracle: Callable[[Ask], Awaitable[object]] | None, lag: Lag
    ) -> None:
        self.cluster = cluster
        self.loads = loads
        self.lag = lag
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
        judge(result, dict(zip(load.asks, expected, strict=True)), self.lag, self.cluster.restarting_s)
        result.losses += blamed(self._crashes() - crashes, cell)
        over = time.monotonic()
        await leaks.until_at_rest(self.cluster, self.rest)
        result.losses += slow_to_rest(over, time.monotonic(), self.lag)
        result.seconds = time.monotonic() - began
        return result

    def _crashes(self) -> int:
        """How many ends of workers schedulers have taken for crashes, for which requests are to blame."""
        return sum(self.cluster.said(name, "crashed=True") for name in SCHEDULERS)


class _Crowd:
    """Eight clients that ask until they are told to stop, and the faults that strike them."""

    def __init__(self, arena: Arena, load: Load) -> None:
        self._arena = arena
        self._cluster = arena.cluster
        self._gateways = Gateways(arena.cluster.gateways())
        self._longest = max(ask.max_tokens for ask in load.asks)
        self._enough = False
        self._heard = time.monotonic()
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
            name = await faults.busy_name_of(self._cluster, strike.target, strike.index)
            await self._strike(strike, name, result)
            result.tables_compared += await leaks.compare_tables(self._cluster)

    async def _strike(self, strike: Strike, name: str, result: Result) -> None:
        cluster = self._cluster
        before = await faults.look_before(cluster, name)
        index = self._reachable(strike.index, slow=strike.fault == "slow")
        await self._at(index, lambda: faults.apply(cluster, strike.fault, name))
        struck = Struck(strike, name, time.monotonic(), before=before)
        result.struck.append(struck)
        try:
            if strike.fault == "slow":
                await self._at(index + faults.SLOW_TOKENS, lambda: None)
            await self._unless_a_client_fails(faults.noticed(cluster, struck))
        finally:
            faults.lift(cluster, strike.fault, name)
        struck.lifted_at = time.monotonic()
        await self._unless_a_client_fails(cluster.settled())
        struck.settled_s = time.monotonic() - struck.at

    def _reachable(self, index: int, slow: bool) -> int:
        """An index that a stream comes to hold, with what it gets while slowed."""
        return max(1, min(index, self._longest - 2 - faults.SLOW_TOKENS * slow))

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
        self._heard = time.monotonic()
        try:
            while not working.done():
                await asyncio.wait([working, *self._clients], return_when=asyncio.FIRST_COMPLETED, timeout=LOOK_S)
                for client in self._clients:
                    if client.done():
                        client.result()
                if time.monotonic() - self._heard > STUCK_S:
                    raise AssertionError(f"nobody got anything for {STUCK_S:.0f} s: {await self._account()}")
            await working
        finally:
            working.cancel()

    async def _account(self) -> str:
        """Where everything stands, as the leader sees it, for whoever has to find out why."""
        leader, status = await self._cluster.leader()
        if status is None:
            return "nobody leads"
        workers = [f"{one.worker_id}: {one.running} running, {one.steps_in_flight} steps in flight, {one.steps} steps"
                   for one in status.workers]  # fmt: skip
        gateways = [f"{one.gateway_id}: {one.live_requests} live" for one in status.gateway_sessions]
        return f"{leader} leads, {status.waiting} waiting; {'; '.join(workers + gateways)}"

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
                self._heard = time.monotonic()

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
async def open_arena(cluster: Cluster, options: Options) -> AsyncIterator[Arena]:
    """An arena in a running cluster. The oracle has a process of its own: it would hold up every link."""
    fake = options.model is None
    loads = make_loads() if fake else make_loads(scale=0.5, prefill=900)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        told = {ask: pool.submit(fake_answer, ask) for load in loads.values() for ask in load.asks if fake}

        async def oracle(ask: Ask) -> object:
            return await asyncio.wrap_future(told.get(ask) or pool.submit(fake_answer, ask))

        async with measuring() as lag:
            try:
                yield Arena(cluster, loads, oracle if fake else None, lag)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
