"""Several workers, several draft workers, a chaotic stream between them, and a draft worker that is killed."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest

from cluster.draft_news import Tail
from draft_worker.drafting import Drafter, DraftThread
from draft_worker.servicer import DraftServicer
from drafting.mirror import ALWAYS, SHARED_CORES
from drafting.mirrors import MirrorTable
from drafting.model_proposer import ModelProposer
from engine.fake import FakeEngine
from tests.worker.test_drafting import PROMPT, ScriptedDrafts, followed, start, until
from worker.draft_links import DraftLinks, rendezvous
from worker.patience import LONGEST_S
from worker.steps import SamplingParams

LENGTH = 60


class Chaos:
    """Drops, delays, reorders, duplicates and corrupts one tail in eight each, in random order; counts what it did."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._deck: list[str] = []
        self._held: list[tuple[int, list[Tail]]] = []
        self.done: Counter[str] = Counter()
        self.deliver: Callable[[int, list[Tail]], None]

    def pass_on(self, stream: int, tails: list[Tail]) -> None:
        waiting: list[Tail | None] = [*tails] or [None]
        for tail in waiting:
            if not self._deck:
                self._deck = ["drop", "hold", "release", "double", "corrupt", "pass", "pass", "pass"]
                self._chance.shuffle(self._deck)
            what = self._deck.pop()
            self.done[what] += 1
            one = [] if tail is None else [tail]
            if what == "hold":
                self._held.append((stream, one))
            elif what == "corrupt":
                self.deliver(stream, [self._corrupt(tail)] if tail else [])
            elif what != "drop":
                self.deliver(stream, one)
            if what == "double":
                self.deliver(stream, one)
            if what == "release" and self._held:
                self._chance.shuffle(self._held)
                self.deliver(*self._held.pop())

    def _corrupt(self, tail: Tail) -> Tail:
        ids = list(tail.token_ids)
        slot, generation, base, known_hash = tail.slot, tail.generation, tail.base, tail.prefix_hash
        match self._chance.randrange(6):
            case 0:
                ids = [self._chance.randrange(260) for _ in range(self._chance.randrange(40))]
            case 1:
                base += self._chance.choice([-1, 1, 1000])
            case 2:
                known_hash ^= 1
            case 3:
                generation += self._chance.choice([-1, 1])
            case 4:
                slot = self._chance.choice([slot + 1, 4000])
            case _:
                ids = ids[1:] + ids[:1]
        return Tail(slot, max(0, generation), max(0, base), known_hash, ids)


@contextlib.asynccontextmanager
async def drafting(
    num_branches: int, chaos: Chaos | None = None, cores: str = ""
) -> AsyncIterator[tuple[str, DraftThread]]:
    """A draft worker with the fake engine, which is wrong in three of ten contexts."""
    servicer = DraftServicer("m", cores=cores)
    deliver = servicer.deliver
    if chaos is not None:
        chaos.deliver, deliver = servicer.deliver, chaos.pass_on
    thread = DraftThread(deliver)
    servicer.inbox = thread.inbox
    engine = FakeEngine(num_blocks=256, block_size=4, max_sequences=16, max_model_len=256, disagreement=0.3)
    proposer = ModelProposer(engine, "rough", 260)
    await thread.start(lambda: Drafter(proposer, MirrorTable(64, 8), num_branches))
    server, address = await start(servicer)
    try:
        yield address, thread
    finally:
        await server.stop(0)
        await thread.close()


@contextlib.asynccontextmanager
async def linked(addresses: list[str], worker_id: str, **options: Any) -> AsyncIterator[DraftLinks]:
    links = DraftLinks(worker_id=worker_id, model="m", vocab_size=260, **options)
    running = asyncio.ensure_future(links.run())
    links.set_addresses(addresses)
    await until(lambda: len(links._linked()) == len(addresses), 60)
    try:
        yield links
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    ("num_workers", "num_draft_workers", "num_branches", "chaotic"),
    [(1, 1, 0, False), (1, 1, 3, False), (3, 1, 2, False), (1, 3, 2, False), (2, 2, 2, True)],
)
async def test_tokens_are_the_plain_ones(
    make_rig: Any, plain_tokens: Any, temperature: float, num_workers: int, num_draft_workers: int, num_branches: int,
    chaotic: bool,
) -> None:  # fmt: skip
    async with contextlib.AsyncExitStack() as stack:
        chaos = [Chaos(index) if chaotic else None for index in range(num_draft_workers)]
        started = [await stack.enter_async_context(drafting(num_branches, one)) for one in chaos]
        addresses = [address for address, _ in started]
        rigs, prompts = [], {slot: (PROMPT * 2)[slot : slot + 25 + slot] for slot in range(4)}
        params = SamplingParams(temperature=temperature, max_tokens=LENGTH)
        for worker in range(num_workers):
            rig = make_rig(links := await stack.enter_async_context(linked(addresses, f"w{worker}", stall_s=30.0)))
            for slot, prompt in prompts.items():
                rig.step([(slot, len(prompt), 4)], admissions=[rig.admission(slot, prompt, params=params)])
            rigs.append((rig, links))

        async def run(rig: Any, links: DraftLinks) -> None:
            while live := [slot for slot in prompts if not rig.executor.sequences.get(slot).ended]:
                await asyncio.to_thread(rig.step, [(slot, 0, 4) for slot in live])
                # The target takes its time: draft workers run as far ahead as they may.
                with contextlib.suppress(TimeoutError, RuntimeError):  # (its mirrors change while they are counted)
                    await until(lambda: all(thread.drafter.idle for _, thread in started), 5.0)  # type: ignore[union-attr]

        await asyncio.gather(*(run(*one) for one in rigs))
        guessed = [thread.drafter.num_guessed for _, thread in started if thread.drafter is not None]
        won = sum(thread.drafter.mirrors.num_branches_won for _, thread in started if thread.drafter is not None)
    for rig, _ in rigs:
        for slot, prompt in prompts.items():
            assert rig.output(slot) == plain_tokens(prompt, 7 + slot, temperature, LENGTH)
    outcomes = [outcome for rig, _ in rigs for outcome in rig.outcomes]
    drafted = sum(sum(outcome.num_drafted_tokens) for outcome in outcomes)
    accepted = sum(sum(outcome.num_accepted_tokens) for outcome in outcomes)
    assert 0 < accepted < drafted
    # Every draft worker had a share of the sequences.
    assert all(guessed)
    if num_branches and not chaotic:
        assert won > 0
    for one in chaos:
        assert one is None or all(one.done[what] for what in ("drop", "hold", "release", "double", "corrupt"))


async def test_sequences_are_shared_out_and_move_when_a_draft_worker_goes() -> None:
    servers = [await start(ScriptedDrafts()) for _ in range(3)]
    addresses = [address for _, address in servers]
    async with linked(addresses, "w") as links:
        sequences = [followed(slot) for slot in range(9)]

        def follow_all() -> dict[str, int]:
            for sequence in sequences:
                links.follow(sequence, 4)
            return {link.address: len(link.tails) for link in links._linked()}

        assert sorted(follow_all().values()) == [3, 3, 3]
        await servers[0][0].stop(0)
        await until(lambda: len(links._linked()) == 2)
        assert links.drafting
        assert sum(follow_all().values()) == 9
        assert max(follow_all().values()) == 5
        # One that is no longer listed is left at once.
        links.set_addresses(addresses[2:])
        assert follow_all() == {addresses[2]: 9}
        links.forget(3)
        assert sum(len(link.tails) for link in links._linked()) == 8
    for server, _ in servers:
        await server.stop(0)


def test_workers_with_one_sequence_each_do_not_meet_at_one_draft_worker() -> None:
    addresses = ["10.0.0.1:7", "10.0.0.2:7", "10.0.0.3:7"]
    chosen = Counter(max(addresses, key=lambda at: rendezvous(f"worker-{w}", at, 1)) for w in range(300))
    assert min(chosen.values()) > 60
    # Who stays keeps what it has when another one goes.
    for worker in range(50):
        before = max(addresses, key=lambda at: rendezvous(f"worker-{worker}", at, 1))
        after = max(addresses[:2], key=lambda at: rendezvous(f"worker-{worker}", at, 1))
        assert after == before or before == addresses[2]


async def test_the_third_step_after_a_sigkill_carries_neither_drafts_nor_waits(make_rig: Any) -> None:
    """Whenever the end of the stream is noticed: silence alone is enough."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "draft_worker", "--target=m", "--draft=fake", "--fake-disagreement=0.0",
        "--scheduler=127.0.0.1:1", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert child.stdout is not None
    try:
        address = (await asyncio.wait_for(child.stdout.readline(), 120)).decode().split()[-1]
        async with linked([address], "w") as links:
            rig = make_rig(links)
            params = SamplingParams(temperature=0.0, max_tokens=200)
            rig.step([(0, len(PROMPT), 2)], admissions=[rig.admission(0, PROMPT, params=params)])
            sequence = rig.executor.sequences.get(0)
            rig.step([(0, 0, 2)])
            # A long tail is there, so that what is left of it would do for more steps than one.
            await until(lambda: len(links.tail(0, sequence.tokens, 9)) >= 5, 60)
            child.kill()
            # Not a turn of the loop from here on, so that nobody can have noticed.
            drafted, waited = [], []
            for _ in range(4):
                before = links.waited_s
                drafted.append(sum(rig.step([(0, 0, 2)]).num_drafted_tokens))
                waited.append(links.waited_s - before)
            assert drafted[0] > 0
            assert drafted[2:] == [0, 0]
            assert waited[2:] == [0.0, 0.0]
            assert max(waited) < LONGEST_S + 5.0
            await until(lambda: not links.drafting, 60)
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def test_a_step_waits_for_a_tail_that_pays_and_not_for_one_that_does_not(make_rig: Any) -> None:
    servicer = DraftServicer("m")
    thread = DraftThread(servicer.deliver)
    servicer.inbox = thread.inbox
    engine = FakeEngine(num_blocks=64, block_size=4, max_sequences=4, max_model_len=256, step_ms=20.0)
    await thread.start(lambda: Drafter(ModelProposer(engine, "exact", 260), MirrorTable(8, 8)))
    server, address = await start(servicer)
    counts = {}
    for longest_s in (0.0, 60.0):
        async with linked([address], "w", longest_wait_s=longest_s) as links:
            rig = make_rig(links, step_ms=40.0)
            params = SamplingParams(temperature=0.0, max_tokens=50)
            rig.step([(0, len(PROMPT), 4)], admissions=[rig.admission(0, PROMPT, params=params)])
            while not rig.executor.sequences.get(0).ended:
                await asyncio.to_thread(rig.step, [(0, 0, 4)])
            counts[longest_s] = (len(rig.outcomes), links.waited_s)
    assert counts[0.0][1] == 0.0
    assert counts[60.0][1] > 0.0
    await server.stop(0)
    await thread.close()


async def test_each_draft_worker_is_judged_by_its_own_latencies(make_rig: Any) -> None:
    """The first one that is asked never answers, the other is fast: its row is waited for all the same."""
    links = DraftLinks(worker_id="w", model="m", vocab_size=260)
    links.set_addresses(["127.0.0.1:1", "127.0.0.1:2"])
    rig = make_rig(links)
    for link in links._links.values():
        link.tails.link()
        link.drafting = True
    for slot in (0, 1):
        admission = rig.admission(slot, PROMPT, params=SamplingParams(temperature=0.0, max_tokens=20))
        rig.step([(slot, len(PROMPT), 4)], admissions=[admission])
    rig.step([(0, 0, 4), (1, 0, 4)])
    never, soon = (links._of_slot[slot] for slot in (0, 1))
    assert never is not soon
    for link in (never, soon):
        link.tails.drain()
    waited = []
    for latency_s in (math.inf, 1e-3):
        never.tails.latencies.extend([math.inf] * 8)
        soon.tails.latencies.extend([latency_s] * 32)
        links._clock = lambda: soon.tails._followed[1].told_s
        links._pace.observe(1, 10.0)
        before: list[None] = []
        links.wait([(rig.executor.sequences.get(slot), 4) for slot in (0, 1)], partial(before.append, None))
        waited.append(len(before))
    assert waited == [0, 1]


@pytest.mark.parametrize(
    ("ours", "theirs", "shared"),
    [("host 0,1", "host 0,1", True), ("host 0,1", "host 1,2", True), ("host 0,1", "host 2", False),
     ("host 0", "other 0", False), ("", "host 0", False), ("", "", False)],
)  # fmt: skip
async def test_both_know_whether_they_share_cores(ours: str, theirs: str, shared: bool) -> None:
    async with drafting(0, cores=theirs) as (address, thread), linked([address], "w", cores=ours) as links:
        (link,) = links._linked()
        assert link.shares_cores is shared
        delivery = thread.inbox.take(wait=False)
        assert list(delivery.begun_streams.values()) == [SHARED_CORES if shared else ALWAYS]


@pytest.mark.parametrize("shared", [True, False])
async def test_on_shared_cores_a_wait_costs_less(make_rig: Any, shared: bool) -> None:
    """What the draft worker does in it, it would do beside the step otherwise."""
    links = DraftLinks(worker_id="w", model="m", vocab_size=260)
    links.set_addresses(["127.0.0.1:1"])
    rig = make_rig(links)
    (link,) = links._links.values()
    link.tails.link()
    link.drafting, link.shares_cores = True, shared
    params = SamplingParams(temperature=0.0, max_tokens=20)
    rig.step([(0, len(PROMPT), 4)], admissions=[rig.admission(0, PROMPT, params=params)])
    rig.step([(0, 0, 4)])
    link.tails.drain()
    link.tails.latencies.extend([1e-3] * 8)
    links._clock = lambda: link.tails._followed[0].told_s
    links._pace.observe(15, 0.01)  # so a millisecond is worth one and a half tokens, and a draft brings one
    before: list[None] = []
    links.wait([(rig.executor.sequences.get(0), 4)], partial(before.append, None))
    assert len(before) == shared


async def test_no_link_no_wait(make_rig: Any) -> None:
    """An open breaker: what would be waited for is not known, and nothing is."""
    links = DraftLinks(worker_id="w", model="m", vocab_size=260)
    rig = make_rig(links)
    rig.step([(0, len(PROMPT), 4)], admissions=[rig.admission(0, PROMPT)])
    assert rig.generate(0, max_draft=4)
    assert links.waited_s == 0.0
