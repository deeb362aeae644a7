"""The session with the scheduler: lost, found again, stale, out of order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem.v1 import generation_pb2, scheduler_pb2, types_pb2

from cluster import errors
from gateway import session as session_module

from .calls import LENGTH, STOP, ask, collect, failure, joined
from .conftest import Cell


async def test_a_lost_scheduler_is_a_pause(cell: Cell) -> None:
    scheduler = await cell.scheduler.connection()
    calls = [cell.stub.GenerateStream(ask(text, n=2, request_id=text, sampling={"seed": 3})) for text in ("one", "two")]
    submits = {submit.request_id: submit for submit in [await scheduler.submit(), await scheduler.submit()]}
    scheduler.emit(submits["one"], b"ab", drafted_tokens=5, accepted_tokens=4, resumptions=1, cached_tokens=2)
    scheduler.emit(submits["one"], b"x", choice=1, finish_reason=LENGTH)
    first = await calls[0].read()
    scheduler.drop()

    cell.scheduler.term = 9
    again = await cell.scheduler.connection()
    assert again.hello.highest_term == 7
    assert again.hello.gateway_id == scheduler.hello.gateway_id
    renewed = {submit.request_id: submit for submit in [await again.submit(), await again.submit()]}
    one, two = renewed["one"], renewed["two"]
    assert (one.attempt, two.attempt) == (1, 1)
    assert one.handle not in (submits["one"].handle, submits["two"].handle)
    # The choice that has ended is left out; the other one brings what it has emitted.
    assert [(choice.index, bytes(choice.token_ids)) for choice in one.choices] == [(0, b"ab")]
    assert [(choice.index, bytes(choice.token_ids)) for choice in two.choices] == [(0, b""), (1, b"")]
    assert (one.seed, one.resumptions, one.params) == (3, 2, submits["one"].params)

    again.emit(one, b"cd", 2, finish_reason=LENGTH, drafted_tokens=3, accepted_tokens=1, resumptions=1, cached_tokens=9)
    messages = [first, *await collect(calls[0])]
    assert joined(messages) == ("abcd", list(b"abcd"))
    assert joined(messages, 1) == ("x", list(b"x"))
    assert messages[-1].usage == types_pb2.Usage(
        prompt_tokens=3, completion_tokens=5, cached_tokens=2, drafted_tokens=8, accepted_tokens=5, resumptions=3
    )
    again.say(
        *(scheduler_pb2.Output(handle=two.handle, choice=c, token_ids=b"z", finish_reason=LENGTH) for c in (0, 1))
    )
    assert joined(await collect(calls[1]), 1) == ("z", [122])


async def test_the_scheduler_may_be_lost_again_and_again(cell: Cell) -> None:
    scheduler = await cell.scheduler.connection()
    call = cell.stub.GenerateStream(ask(stop={"strings": ["jk"]}))
    text = b"abcdefghijklm"
    for index in range(9):
        submit = await scheduler.submit()
        assert submit.attempt == index
        assert bytes(submit.choices[0].token_ids) == text[:index]
        scheduler.emit(submit, text[index : index + 1], index)
        async with asyncio.timeout(5):
            await call.read()
        scheduler.drop()
        scheduler = await cell.scheduler.connection()
    submit = await scheduler.submit()
    scheduler.emit(submit, text[9:], 9)
    messages = await collect(call)
    # "j" is never shown: it turns out to be the beginning of the stop string.
    assert joined(messages) == ("", list(b"jk"))
    assert messages[-1].usage.completion_tokens == 11
    assert messages[-1].usage.resumptions == 9
    assert messages[-1].deltas[-1].finish_reason == STOP


async def test_duplicates_are_dropped_by_index(cell: Cell) -> None:
    scheduler = await cell.scheduler.connection()
    call = cell.stub.GenerateStream(ask(output={"logprobs": True}))
    submit = await scheduler.submit()
    rows = [types_pb2.PositionLogprobs(chosen=types_pb2.TokenLogprob(token_id=token)) for token in b"abcde"]
    scheduler.emit(submit, b"abc", logprobs=rows[:3])
    scheduler.emit(submit, b"bc", 1, logprobs=rows[1:3])
    scheduler.emit(submit, b"cd", 2, logprobs=rows[2:4])
    scheduler.emit(submit, b"abcde", 0, logprobs=rows, finish_reason=LENGTH)
    messages = await collect(call)
    assert joined(messages) == ("abcde", list(b"abcde"))
    sent = [entry.chosen.token_id for message in messages for delta in message.deltas for entry in delta.logprobs]
    assert bytes(sent) == b"abcde"


async def test_a_message_may_hold_tokens_by_themselves_and_more(cell: Cell) -> None:
    """Each goes to its own request; an index that is known already doesn't count again."""
    scheduler = await cell.scheduler.connection()
    calls = [cell.stub.GenerateStream(ask(request_id=name)) for name in ("one", "two", "three")]
    submits = {submit.request_id: submit for submit in [await scheduler.submit() for _ in calls]}
    one, two, three = (submits[name].handle for name in ("one", "two", "three"))
    scheduler.outbox.put_nowait(
        scheduler_pb2.SessionResponse(
            plain_outputs=scheduler_pb2.PlainOutputs(
                handles=[one, two, 999, two, two], token_indices=[0, 0, 0, 0, 1], token_ids=b"axyxy"
            ),
            outputs=[scheduler_pb2.Output(handle=three, token_ids=b"end", finish_reason=LENGTH)],
        )
    )
    scheduler.emit(submits["one"], b"b", 1, finish_reason=LENGTH)
    scheduler.emit(submits["two"], b"z", 2, finish_reason=LENGTH)
    assert [joined(await collect(call)) for call in calls] == [
        ("ab", list(b"ab")),
        ("xyz", list(b"xyz")),
        ("end", list(b"end")),
    ]


async def test_an_earlier_submission_speaks_to_nobody(cell: Cell) -> None:
    scheduler = await cell.scheduler.connection()
    call = cell.stub.GenerateStream(ask())
    old = await scheduler.submit()
    scheduler.drop()
    scheduler = await cell.scheduler.connection()
    new = await scheduler.submit()
    scheduler.emit(old, b"WRONG", finish_reason=LENGTH)
    scheduler.say(scheduler_pb2.Output(handle=old.handle, error=errors.to_status(errors.Internal("old"))))
    scheduler.emit(new, b"right", finish_reason=LENGTH)
    assert joined(await collect(call))[0] == "right"


async def test_a_gap_is_never_forwarded(cell: Cell) -> None:
    scheduler = await cell.scheduler.connection()
    call = cell.stub.GenerateStream(ask())
    submit = await scheduler.submit()
    scheduler.emit(submit, b"ab")
    scheduler.emit(submit, b"d", 3)
    renewed = await scheduler.submit()
    assert (renewed.attempt, bytes(renewed.choices[0].token_ids)) == (1, b"ab")
    scheduler.emit(submit, b"e", 4)
    scheduler.emit(renewed, b"cd", 2, finish_reason=LENGTH)
    assert joined(await collect(call)) == ("abcd", list(b"abcd"))


async def test_a_scheduler_that_keeps_skipping_is_not_asked_for_ever(cell: Cell) -> None:
    scheduler = await cell.scheduler.connection()
    call = cell.stub.GenerateStream(ask())
    for _ in range(4):
        scheduler.emit(await scheduler.submit(), b"d", 3)
    error = await failure(call)
    assert error.code is grpc.StatusCode.INTERNAL
    await scheduler.cancel()


async def test_a_lower_term_is_not_obeyed(cell: Cell) -> None:
    scheduler = await cell.scheduler.connection()
    call = cell.stub.GenerateStream(ask())
    await scheduler.submit()
    cell.scheduler.term = 6
    scheduler.drop()
    stale = await cell.scheduler.connection()
    assert stale.hello.highest_term == 7
    assert not cell.gateway.session.up
    cell.scheduler.term = 8
    while not (await cell.gateway.session.wait_up(0.2)):
        pass
    while True:
        connection = await cell.scheduler.connection()
        if cell.scheduler.connections.empty():
            break
    submit = await connection.submit()
    assert stale.submits.empty()
    connection.emit(submit, b"ok", finish_reason=LENGTH)
    assert joined(await collect(call))[0] == "ok"


async def test_without_any_scheduler_live_requests_end_after_a_while(cell_with: Callable[..., Any]) -> None:
    cell = await cell_with(scheduler_loss_s=0.2, scheduler_wait_s=0.05)
    scheduler = await cell.scheduler.connection()
    call = cell.stub.GenerateStream(ask())
    submit = await scheduler.submit()
    scheduler.emit(submit, b"ab")
    first = await call.read()
    cell.scheduler.accepting = False
    scheduler.drop()
    error = await failure(call)
    assert first.deltas[0].text == "ab"
    assert isinstance(error, errors.Unavailable)
    assert error.retry_after_s > 0
    # A new one is refused soon, not after the long wait of those that have begun.
    error = await failure(cell.stub.GenerateStream(ask()))
    assert isinstance(error, errors.Unavailable)
    assert error.reason == "NO_SCHEDULER"
    cell.scheduler.accepting = True
    connection = await cell.scheduler.connection()
    call = cell.stub.GenerateStream(ask())
    connection.emit(await connection.submit(), b"ok", finish_reason=LENGTH)
    assert joined(await collect(call))[0] == "ok"


async def test_the_gateway_starts_before_its_scheduler(cell_with: Callable[..., Any]) -> None:
    cell = await cell_with(scheduler=False, scheduler_wait_s=0.05)
    assert (await cell.stub.ListModels(generation_pb2.ListModelsRequest())).models[0].workers == 0
    assert (await cell.stub.Tokenize(generation_pb2.TokenizeRequest(text="hi"))).token_ids == [104, 105]
    error = await failure(cell.stub.GenerateStream(ask()))
    assert isinstance(error, errors.Unavailable)
    assert (await failure(cell.stub.GenerateStream(ask("")))).code is grpc.StatusCode.INVALID_ARGUMENT


async def test_requests_that_nobody_waits_for_are_not_submitted_again(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = await cell.scheduler.connection()
    gone, stays = cell.stub.GenerateStream(ask("gone")), cell.stub.GenerateStream(ask("stays"))
    await scheduler.submit()
    await scheduler.submit()
    cell.scheduler.accepting = False
    scheduler.drop()
    released = asyncio.Event()
    release = cell.gateway.table.release

    def release_and_tell(*request: Any) -> None:
        release(*request)
        released.set()

    monkeypatch.setattr(cell.gateway.table, "release", release_and_tell)
    gone.cancel()
    async with asyncio.timeout(5):
        await released.wait()
    cell.scheduler.accepting = True
    scheduler = await cell.scheduler.connection()
    submit = await scheduler.submit()
    assert bytes(submit.prompt_token_ids) == b"stays"
    scheduler.emit(submit, b"ok", finish_reason=LENGTH)
    assert joined(await collect(stays))[0] == "ok"
    assert scheduler.submits.empty()


async def test_resubmissions_are_paced_and_keep_their_order(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "_MAX_SUBMITS", 4)
    scheduler = await cell.scheduler.connection()
    calls = []
    for number in range(10):
        calls.append(cell.stub.GenerateStream(ask(f"{number}")))
        await scheduler.submit()
    scheduler.drop()
    scheduler = await cell.scheduler.connection()
    order = [bytes((await scheduler.submit()).prompt_token_ids) for _ in calls]
    assert order == [str(number).encode() for number in range(10)]
    for call in calls:
        call.cancel()


async def test_prompt_logprobs_are_asked_for_once(cell: Cell) -> None:
    scheduler = await cell.scheduler.connection()
    call = cell.stub.GenerateStream(ask("abc", output={"prompt_logprobs": 1}))
    submit = await scheduler.submit()
    rows = [types_pb2.PositionLogprobs(top=[types_pb2.TokenLogprob(token_id=index)]) for index in range(3)]
    scheduler.say(scheduler_pb2.Output(handle=submit.handle, prompt_logprobs=rows[:2]))
    scheduler.drop()
    scheduler = await cell.scheduler.connection()
    submit = await scheduler.submit()
    assert submit.params.HasField("prompt_logprobs")
    scheduler.say(scheduler_pb2.Output(handle=submit.handle, prompt_logprobs=rows))
    scheduler.emit(submit, b"a")
    first = await call.read()
    assert list(first.prompt_logprobs) == rows
    scheduler.drop()
    scheduler = await cell.scheduler.connection()
    submit = await scheduler.submit()
    assert not submit.params.HasField("prompt_logprobs")
    scheduler.emit(submit, b"b", 1, finish_reason=LENGTH)
    assert joined([first, *await collect(call)])[0] == "ab"


async def test_one_broken_request_does_not_take_the_session_down(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = await cell.scheduler.connection()
    broken, fine = cell.stub.GenerateStream(ask("a")), cell.stub.GenerateStream(ask("b"))
    submits = {
        bytes(submit.prompt_token_ids): submit for submit in [await scheduler.submit(), await scheduler.submit()]
    }
    request = cell.gateway.table.find(submits[b"a"].handle)
    assert request is not None

    def explode(news: Any) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(request.choices[0], "accept", explode)
    scheduler.emit(submits[b"a"], b"x")
    scheduler.emit(submits[b"b"], b"ok", finish_reason=LENGTH)
    error = await failure(broken)
    assert error.code is grpc.StatusCode.INTERNAL
    assert "boom" not in error.message
    assert joined(await collect(fine))[0] == "ok"
    assert (await scheduler.cancel()).handle == submits[b"a"].handle


async def test_other_schedulers_are_tried_in_turn(cell_with: Callable[..., Any]) -> None:
    cell = await cell_with(before="127.0.0.1:1")
    connection = await cell.scheduler.connection()
    call = cell.stub.GenerateStream(ask())
    connection.emit(await connection.submit(), b"ok", finish_reason=LENGTH)
    assert joined(await collect(call))[0] == "ok"


async def test_a_draining_scheduler_finishes_what_it_has(cell: Cell) -> None:
    scheduler = await cell.scheduler.connection()
    call = cell.stub.GenerateStream(ask())
    submit = await scheduler.submit()
    health = health_pb2_grpc.HealthStub(cell.channel).Watch(health_pb2.HealthCheckRequest(service="tiny"))
    assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
    scheduler.outbox.put_nowait(scheduler_pb2.SessionResponse(draining=True))
    assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    health.cancel()
    # It is the scheduler that refuses new requests, in its own words.
    refused = cell.stub.GenerateStream(ask())
    status = errors.to_status(errors.Unavailable("the scheduler is draining", 2.0))
    scheduler.outbox.put_nowait(
        scheduler_pb2.SessionResponse(
            draining=True, outputs=[scheduler_pb2.Output(handle=(await scheduler.submit()).handle, error=status)]
        )
    )
    assert (await failure(refused)).message == "the scheduler is draining"
    output = scheduler_pb2.Output(handle=submit.handle, token_ids=b"ok", finish_reason=LENGTH)
    scheduler.outbox.put_nowait(scheduler_pb2.SessionResponse(draining=True, outputs=[output]))
    assert joined(await collect(call))[0] == "ok"
