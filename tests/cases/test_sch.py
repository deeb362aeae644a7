"""Scheduling, KV and the worker together, over the fake engine: cases 34, 35, 43, 45, 50, 56 and 60."""

from __future__ import annotations

import asyncio
import time
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from google.rpc import code_pb2
from tandem.v1 import scheduler_pb2, scheduler_pb2_grpc

from cluster.channel import connect
from scheduler.core.scheduler import Scheduler
from tests.cases.cell import ForcedEngine, WholeCell, until, whole_cell
from tests.integration.harness import MODEL, Answer, expected_tokens, receive, request
from tests.scheduler.peers import Gateway, submit


def with_logprobs(prompt: list[int], max_tokens: int, salt: str = "", prompt_logprobs: int | None = 2) -> Any:
    message = request(prompt, max_tokens, cache_salt=salt)
    message.output.top_logprobs = 3
    if prompt_logprobs is not None:
        message.output.prompt_logprobs = prompt_logprobs
    return message


async def test_case_34_numbers_do_not_depend_on_who_was_cached_before(folder: Path) -> None:
    """Overlapping prompts in every order; one of them leaves its prefix to the others' answers."""
    shared = list(b"forty-eight tokens make three blocks of sixteen.")
    prompts = {"plain": [*shared, *b"one"], "long": [*shared, *b"another tail"], "short": shared[:33]}
    async with whole_cell(folder, ForcedEngine(num_blocks=512)) as cell:
        seen: dict[str, Any] = {}
        cached = 0
        for order in permutations(prompts):
            for name in order:
                wanted = None if name == "plain" else 2
                answer = await cell.whole(with_logprobs(prompts[name], 6, str(order), wanted))
                cached += answer.usage.cached_tokens
                numbers = (answer.choices[0].logprobs, answer.prompt_logprobs, answer.choices[0].token_ids)
                assert numbers == seen.setdefault(name, numbers), (order, name)
                assert len(answer.prompt_logprobs) == (len(prompts[name]) if wanted else 0)
        assert cached > 0, "nothing was ever taken from the cache"


async def test_case_35_chunks_and_preemption_change_no_prompt_logprob(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six outputs grow while a prompt is computed token by token; the pool runs short in the middle of it."""
    preempted_at: list[int] = []
    preempt = Scheduler._preempt

    def listen(self: Scheduler, worker: Any, sequence: Any) -> None:
        if sequence.request.spec.wants_prompt_logprobs:
            preempted_at.append(sequence.request.prompt_logprobs_done)
        preempt(self, worker, sequence)

    monkeypatch.setattr(Scheduler, "_preempt", listen)
    prompt = list(b"a prompt that is long enough for a few chunks of eight tokens")
    async with whole_cell(folder, ForcedEngine(num_blocks=512)) as cell:
        undisturbed = await cell.whole(with_logprobs(prompt, 20))
    async with whole_cell(folder, ForcedEngine(num_blocks=22), scheduler={"token_budget": 7}) as cell:
        growing = [asyncio.ensure_future(receive(cell.stub.GenerateStream(request(f"{i}", 90)))) for i in range(6)]
        await until(lambda: cell.scheduler.core.num_running == 6)
        disturbed = await cell.whole(with_logprobs(prompt, 20))
        await asyncio.gather(*growing)
        await cell.until_idle()
    assert any(0 < done < len(prompt) for done in preempted_at), preempted_at
    assert list(disturbed.prompt_logprobs) == list(undisturbed.prompt_logprobs)
    assert [entry.chosen.token_id for entry in disturbed.prompt_logprobs[1:]] == prompt[1:]
    assert disturbed.choices == undisturbed.choices


async def test_case_43_no_step_after_a_disconnect_holds_the_row(folder: Path) -> None:
    async with whole_cell(folder, ForcedEngine(num_blocks=160)) as cell:
        engine = cell.engine
        engine.hold()
        call = cell.stub.GenerateStream(request("p", 2048))
        answer = Answer()
        for count in (1, 2, 3):
            engine.release(1)
            answer.take(await call.read())
            assert len(answer.tokens[0]) == count
        call.cancel()
        await until(lambda: not cell.scheduler.core.requests)
        engine.release()
        other = await receive(cell.stub.GenerateStream(request("other", 40)))
        assert other.tokens[0] == expected_tokens(list(b"other"), 40)
        assert engine.rows[ord("p")] <= 5, "more than the two steps that were issued"
        await cell.until_idle()
        pool = cell.scheduler.core.workers["w"].pool
        assert pool.num_free + pool.num_cached == 160
        assert not cell.gateway.table._by_handle


async def test_case_45_a_cancellation_in_the_middle_of_a_step_touches_no_other_row(folder: Path) -> None:
    async with whole_cell(folder, ForcedEngine(step_ms=2)) as cell:
        prompts = [list(f"{name} of four".encode()) for name in ("one", "two", "three")]
        leaver = cell.stub.GenerateStream(request("leaver", 200))
        others = [receive(cell.stub.GenerateStream(request(prompt, 60, temperature=0.7))) for prompt in prompts]
        staying = asyncio.gather(*others)
        await until(lambda: cell.scheduler.core.num_running == 4)
        assert (await leaver.read()).deltas
        cell.engine.hold()
        await until(cell.engine.entered.is_set)
        assert len(cell.scheduler.core.requests) == 4, "the others were too quick"
        leaver.cancel()
        await until(lambda: len(cell.scheduler.core.requests) == 3)
        cell.engine.release()
        for prompt, answer in zip(prompts, await staying, strict=True):
            assert answer.tokens[0] == expected_tokens(prompt, 60, temperature=0.7)
        await cell.until_idle()


async def test_case_50_a_deadline_is_kept_while_the_job_before_hangs(folder: Path) -> None:
    """The scheduler's own doing: no client is there that could give up by itself."""
    async with whole_cell(folder, ForcedEngine(max_sequences=1)) as cell:
        cell.engine.hold()
        long = asyncio.ensure_future(receive(cell.stub.GenerateStream(request("long", 40))))
        await until(cell.engine.entered.is_set)
        # A busy machine delays some answers; what tells at a tick, or when something else happens, delays them all.
        waits: list[float] = []
        while not waits or (min(waits) >= 0.1 and len(waits) < 50):
            waits.append(await _until_deadline(cell, len(waits) + 1))
        assert 0.049 <= min(waits) < 0.1
        cell.engine.release()
        assert (await long).tokens[0] == expected_tokens(list(b"long"), 40)
        assert cell.engine.rows[10] == 0
        assert cell.scheduler.core.counters.prefill_tokens == len("long")
        await cell.until_idle()


async def _until_deadline(cell: WholeCell, handle: int) -> float:
    """Seconds until a request with a deadline of 50 ms is told so, on a session of its own."""
    channel = connect(cell.scheduler_address)
    gateway = Gateway(scheduler_pb2_grpc.SchedulerServiceStub(channel).Session())
    await gateway.send(hello=scheduler_pb2.SessionHello(gateway_id=f"g{handle}"))
    await gateway.read()
    began = time.perf_counter()
    # Its prompt begins with token 10.
    await gateway.send(submits=[submit(handle, model=MODEL, remaining_s=0.05)])
    assert (await gateway.error(handle)).code == code_pb2.DEADLINE_EXCEEDED
    took = time.perf_counter() - began
    await channel.close()
    return took


async def test_case_56_output_stays_output_after_a_preemption(folder: Path) -> None:
    """The same text, penalties counted alike, and the same usage as without."""
    prompts = [list(f"number {index} of four".encode()) for index in range(4)]
    async with whole_cell(folder, ForcedEngine(num_blocks=12)) as cell:
        calls = [cell.stub.GenerateStream(request(prompt, 70, frequency_penalty=1.0)) for prompt in prompts]
        answers = await asyncio.gather(*(receive(call) for call in calls))
        assert cell.scheduler.core.counters.preemptions > 0
        await cell.until_idle()
    assert sum(answer.usage.resumptions for answer in answers) > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens[0] == expected_tokens(prompt, 70, frequency_penalty=1.0)
        assert answer.tokens[0] != expected_tokens(prompt, 70), "the penalty changes nothing here"
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 70)
        assert answer.usage.cached_tokens == 0, "what it had itself computed before is no prefix hit of the client's"


async def test_case_60_the_prefix_cache_changes_no_token(folder: Path) -> None:
    shared = list(b"forty-eight tokens make three blocks of sixteen.")
    async with whole_cell(folder, ForcedEngine(num_blocks=256)) as cell:
        for index in range(5):
            prompt = [*shared, *f" tail {index}".encode()]
            truth = expected_tokens(prompt, 24)
            for salt, cached in (("", 48 if index else 0), (f"salt {index}", 0)):
                answer = await receive(cell.stub.GenerateStream(request(prompt, 24, cache_salt=salt)))
                assert answer.usage.cached_tokens == cached
                assert answer.tokens[0] == truth
