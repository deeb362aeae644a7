"""The draft link over real gRPC: against a scripted draft worker, and with the real one under a running executor."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from tandem.v1 import draft_pb2, draft_pb2_grpc

from cluster.server import bind, create_server
from draft_worker.drafting import Drafter, DraftThread
from draft_worker.servicer import DraftServicer
from drafting.mirrors import MirrorTable
from drafting.model_proposer import ModelProposer
from drafting.ngram_proposer import NgramProposer
from drafting.proposer import Proposer
from engine.fake import FakeEngine
from engine.prefix_hash import prefix_hash
from worker.draft_links import DraftLinks
from worker.sequences import Sequence
from worker.steps import SamplingParams

PROMPT = [ord(c) for c in "Call me Ishmael. Some years ago"]


async def until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  (what is watched belongs to another thread or to gRPC)
            await asyncio.sleep(0.002)


def followed(slot: int = 0) -> Sequence:
    return Sequence(
        slot=slot,
        sequence_id=1,
        tokens=list(PROMPT),
        num_prompt=len(PROMPT),
        computed=0,
        params=SamplingParams(temperature=0),
        choice_seed=7,
        cache_salt="",
    )


@dataclass
class ScriptedDrafts(draft_pb2_grpc.DraftServiceServicer):
    """Welcomes workers (unless mute) and answers every opening with the same guess (unless silent)."""

    mute: bool = False
    silent: bool = False
    guess: tuple[int, ...] = (1, 2, 3)
    received: list[Any] = field(default_factory=list)
    streams: int = 0

    async def Draft(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        self.received.append(await anext(request_iterator))
        self.streams += 1
        if not self.mute:
            yield draft_pb2.DraftResponse()
        async for message in request_iterator:
            self.received.append(message)
            if self.silent or self.mute:
                continue
            yield draft_pb2.DraftResponse(
                tails=[
                    draft_pb2.Tail(
                        slot=opening.slot,
                        generation=opening.generation,
                        base=len(opening.token_ids),
                        prefix_hash=prefix_hash(list(opening.token_ids)),
                        token_ids=self.guess,
                    )
                    for opening in message.opens
                ]
            )


async def start(servicer: Any) -> tuple[grpc.aio.Server, str]:
    server = create_server()
    draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    return server, f"127.0.0.1:{port}"


@contextlib.asynccontextmanager
async def linking(**options: Any) -> AsyncIterator[tuple[DraftLinks, list[bool]]]:
    changes: list[bool] = []
    link = DraftLinks(
        worker_id="w", model="m", vocab_size=260, on_change=lambda: changes.append(link.drafting), **options
    )
    running = asyncio.ensure_future(link.run())
    try:
        yield link, changes
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_tails_arrive_and_a_dead_draft_worker_means_none_at_once() -> None:
    server, address = await start(scripted := ScriptedDrafts())
    async with linking() as (link, changes):
        link.set_addresses([address])
        await until(lambda: link.drafting)
        assert scripted.received[0].hello == draft_pb2.DraftHello(worker_id="w", model="m", vocab_size=260)
        sequence = followed()
        link.follow(sequence, 4)
        link.flush()
        await until(lambda: link.tail(0, sequence.tokens, 4) == [1, 2, 3])
        await server.stop(0)
        await until(lambda: not link.drafting)
        assert link.tail(0, sequence.tokens, 4) == []
        link.follow(sequence, 4)
        link.flush()
        assert changes == [True, False]


async def test_a_link_comes_back_by_itself() -> None:
    server, address = await start(ScriptedDrafts())
    async with linking() as (link, changes):
        link.set_addresses([address])
        await until(lambda: link.drafting)
        await server.stop(0)
        await until(lambda: not link.drafting)
        again = create_server()
        draft_pb2_grpc.add_DraftServiceServicer_to_server(ScriptedDrafts(guess=(9,)), again)
        bind(again, "127.0.0.1", int(address.rpartition(":")[2]))
        await again.start()
        await until(lambda: link.drafting)
        sequence = followed()
        link.follow(sequence, 4)
        link.flush()
        await until(lambda: link.tail(0, sequence.tokens, 4) == [9])
        assert changes == [True, False, True]
        await again.stop(0)


async def test_silence_breaks_the_circuit_and_the_step_never_notices() -> None:
    server, address = await start(scripted := ScriptedDrafts(silent=True))
    async with linking(stall_s=0.2) as (link, changes):
        link.set_addresses([address])
        await until(lambda: link.drafting)
        sequence = followed()
        link.follow(sequence, 4)
        link.flush()
        assert link.tail(0, sequence.tokens, 4) == []
        await until(lambda: changes[:2] == [True, False])
        scripted.silent = False
        await until(lambda: link.drafting)
        assert scripted.streams >= 2
    await server.stop(0)


async def test_a_draft_worker_that_never_welcomes_is_not_counted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.drafting.WELCOME_TIMEOUT_S", 0.1)
    mute, at_mute = await start(scripted := ScriptedDrafts(mute=True))
    good, at_good = await start(ScriptedDrafts())
    async with linking() as (link, changes):
        link.set_addresses([at_mute])
        await until(lambda: scripted.streams >= 2)
        assert changes == []
        link.set_addresses([at_mute, at_good])
        await until(lambda: link.drafting)
        assert [one.address for one in link._linked()] == [at_good]
    await mute.stop(0)
    await good.stop(0)


async def test_an_address_that_is_no_longer_listed_is_left() -> None:
    server, address = await start(ScriptedDrafts())
    async with linking() as (link, changes):
        link.set_addresses([address])
        await until(lambda: link.drafting)
        link.set_addresses([])
        await until(lambda: not link.drafting)
        link.set_addresses([address])
        await until(lambda: link.drafting)
        assert changes == [True, False, True]
    await server.stop(0)


async def test_another_models_draft_worker_refuses() -> None:
    servicer = DraftServicer("other")
    thread = DraftThread(servicer.deliver)
    servicer.inbox = thread.inbox
    server, address = await start(servicer)
    async with linking() as (link, changes):
        link.set_addresses([address])
        channel = grpc.aio.insecure_channel(address)
        call = draft_pb2_grpc.DraftServiceStub(channel).Draft()
        await call.write(draft_pb2.DraftRequest(hello=draft_pb2.DraftHello(worker_id="w", model="m", vocab_size=1)))
        with pytest.raises(grpc.RpcError):
            await call.read()
        assert await call.code() is grpc.StatusCode.NOT_FOUND
        assert changes == []
        await channel.close()
    await server.stop(0)


# ----------------------------------------------------------------------------- with the real draft worker's parts


def engine(disagreement: float = 0.0) -> FakeEngine:
    return FakeEngine(num_blocks=256, block_size=4, max_sequences=16, max_model_len=256, disagreement=disagreement)


PROPOSERS: dict[str, Callable[[], Proposer]] = {
    "exact model": lambda: ModelProposer(engine(), "exact", 260),
    "rough model": lambda: ModelProposer(engine(0.3), "rough", 260),
    "ngram": NgramProposer,
}


@contextlib.asynccontextmanager
async def real_draft_worker(make: Callable[[], Proposer]) -> AsyncIterator[tuple[grpc.aio.Server, str, DraftThread]]:
    servicer = DraftServicer("m")
    thread = DraftThread(servicer.deliver)
    servicer.inbox = thread.inbox
    await thread.start(lambda: Drafter(make(), MirrorTable(64, 8)))
    server, address = await start(servicer)
    try:
        yield server, address, thread
    finally:
        await server.stop(0)
        thread.inbox.stop()
        await asyncio.wait_for(thread.ended, 10)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("proposer", PROPOSERS)
async def test_tokens_are_the_plain_ones_whatever_drafts(make_rig: Any, proposer: str, temperature: float) -> None:
    """Also with the draft worker gone half-way. The oracle is plain decoding, which test_executor.py checks."""
    prompts = {slot: (PROMPT * 2)[slot : slot + 25 + slot] for slot in range(3)}
    params = SamplingParams(temperature=temperature, max_tokens=80)

    def begin(rig: Any) -> None:
        for slot, prompt in prompts.items():
            rig.step([(slot, len(prompt), 4)], admissions=[rig.admission(slot, prompt, params=params)])

    plain = make_rig()
    begin(plain)
    truth = {slot: plain.generate(slot) for slot in prompts}

    async with real_draft_worker(PROPOSERS[proposer]) as (server, address, thread), linking() as (link, _):
        link.set_addresses([address])
        await until(lambda: link.drafting)
        rig = make_rig(link)
        begin(rig)
        while not all(rig.executor.sequences.get(slot).ended for slot in prompts):
            if link.drafting and proposer != "ngram":
                # Give the tails of this round time to arrive, so that acceptance can be asserted.
                sequences = [rig.executor.sequences.get(slot) for slot in prompts]
                with contextlib.suppress(TimeoutError):
                    await until(lambda: all(s.ended or link.tail(s.slot, s.tokens, 1) for s in sequences), 1.0)  # noqa: B023
            await asyncio.to_thread(rig.step, [(slot, 0, 4) for slot in prompts])
            if max(len(rig.output(slot)) for slot in prompts) > 40 and link.drafting:
                await server.stop(0)
                await until(lambda: not link.drafting)
                at_death = len(rig.outcomes)
        assert thread.drafter is not None
        drafter = thread.drafter
        await until(lambda: len(drafter.mirrors) == 0)
        drafted = sum(sum(outcome.num_drafted_tokens) for outcome in rig.outcomes)
        accepted = sum(sum(outcome.num_accepted_tokens) for outcome in rig.outcomes)
        after = sum(sum(outcome.num_drafted_tokens) for outcome in rig.outcomes[at_death:])
    for slot in prompts:
        assert rig.output(slot) == truth[slot]
    assert after == 0
    assert len(rig.outcomes) > at_death
    if proposer == "exact model":
        assert accepted == drafted > 60
    if proposer == "rough model":
        assert 20 < accepted < drafted
