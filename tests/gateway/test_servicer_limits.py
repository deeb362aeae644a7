"""The public service over real gRPC, with a scripted scheduler behind it: refusals, leaving, models, operation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem.v1 import generation_pb2, scheduler_pb2, types_pb2

from cluster import errors

from .calls import LENGTH, Ask, ask, collect, failure, joined
from .conftest import MODEL, Cell

# ------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Ask(text=""), "text"),
        (Ask(), "prompt"),
        (Ask(token_ids={"ids": []}), "token_ids"),
        (Ask(token_ids={"ids": [5, 264]}), "token_ids.ids[1]"),
        (ask("x" * 512), "text"),
        (ask("x" * 256), "text"),
        (ask("x" * 200, stop={"max_tokens": 57}), "stop.max_tokens"),
        (ask("x" * 5_000_000), "text"),
        (ask(stop={"strings": [""]}), "stop.strings[0]"),
        (ask(sampling={"temperature": -1}), "sampling.temperature"),
        (ask(sampling={"temperature": float("nan")}), "sampling.temperature"),
        (ask(sampling={"logit_bias": {269: 1}}), "sampling.logit_bias[269]"),
        (ask(n=0), "n"),
        (ask(speculation={"mode": 99}), "speculation.mode"),
        (ask(speculation={"max_draft_tokens": 65}), "speculation.max_draft_tokens"),
        (Ask(chat={"messages": []}), "chat.messages"),
        (Ask(chat={"messages": [{"role": "", "content": "x"}]}), "chat.messages[0].role"),
        (
            Ask(chat={"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]}),
            "chat",
        ),
    ],
)
async def test_bad_fields_are_refused_by_name_and_the_next_request_is_served(
    cell: Cell, request_: Ask, field: str
) -> None:
    scheduler = await cell.scheduler.connection()
    error = await failure(cell.stub.GenerateStream(request_))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(error, errors.InvalidField)
    assert error.field == field
    assert len(cell.gateway.table) == 0
    call = cell.stub.GenerateStream(ask())
    scheduler.emit(await scheduler.submit(), b"ok", finish_reason=LENGTH)
    assert joined(await collect(call))[0] == "ok"


async def test_a_templates_message_reaches_the_client(cell: Cell) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]
    error = await failure(cell.stub.GenerateStream(Ask(chat={"messages": messages})))
    assert "system must come first" in error.message


async def test_unknown_models_are_not_found(cell: Cell) -> None:
    for call in (
        cell.stub.GenerateStream(Ask(model="other", text="hi")),
        cell.stub.Generate(generation_pb2.GenerateRequest(model="other", text="hi")),
        cell.stub.GetModel(generation_pb2.GetModelRequest(model="other")),
        cell.stub.Tokenize(generation_pb2.TokenizeRequest(model="other", text="hi")),
    ):
        error = await failure(call)
        assert isinstance(error, errors.NotFound)
        assert error.resource_name == "other"


async def test_a_second_live_request_of_one_id_is_refused_and_the_first_untouched(cell: Cell) -> None:
    scheduler = await cell.scheduler.connection()
    first = cell.stub.GenerateStream(ask(request_id="same"))
    submit = await scheduler.submit()
    error = await failure(cell.stub.GenerateStream(ask(request_id="same")))
    assert isinstance(error, errors.AlreadyExists)
    scheduler.emit(submit, b"fine", finish_reason=LENGTH)
    assert joined(await collect(first))[0] == "fine"
    again = cell.stub.GenerateStream(ask(request_id="same"))
    scheduler.emit(await scheduler.submit(), b"new", finish_reason=LENGTH)
    assert joined(await collect(again))[0] == "new"


async def test_the_schedulers_refusal_is_passed_on_and_touches_nobody_else(cell: Cell) -> None:
    scheduler = await cell.scheduler.connection()
    refused, served = cell.stub.GenerateStream(ask("a")), cell.stub.GenerateStream(ask("b"))
    submits = {
        bytes(submit.prompt_token_ids): submit for submit in [await scheduler.submit(), await scheduler.submit()]
    }
    status = errors.to_status(errors.QueueFull("too many wait", 2.5))
    scheduler.say(scheduler_pb2.Output(handle=submits[b"a"].handle, error=status))
    error = await failure(refused)
    assert isinstance(error, errors.QueueFull)
    assert (error.message, error.retry_after_s) == ("too many wait", 2.5)
    scheduler.emit(submits[b"b"], b"ok", finish_reason=LENGTH)
    assert joined(await collect(served))[0] == "ok"
    assert scheduler.cancels.empty()


async def test_errors_carry_details_and_never_the_prompt(cell: Cell) -> None:
    call = cell.stub.GenerateStream(ask("secret " * 100))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await collect(call)
    details = dict(error.value.trailing_metadata())["grpc-status-details-bin"]
    status = status_pb2.Status.FromString(details)
    assert "secret" not in str(status)
    kinds = {detail.TypeName() for detail in status.details}
    assert kinds == {"google.rpc.ErrorInfo", "google.rpc.BadRequest"}
    info = error_details_pb2.ErrorInfo()
    status.details[0].Unpack(info)
    assert info.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert info.metadata["max_model_len"] == "512"


# ------------------------------------------------------------------------------------------ leaving and deadlines


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_is_cancelled_everywhere(cell: Cell, streamed: bool) -> None:
    scheduler = await cell.scheduler.connection()
    if streamed:
        call = cell.stub.GenerateStream(ask())
        submit = await scheduler.submit()
        scheduler.emit(submit, b"abc")
        await call.read()
    else:
        call = cell.stub.Generate(generation_pb2.GenerateRequest(text="hi"))
        submit = await scheduler.submit()
    call.cancel()
    cancel = await scheduler.cancel()
    assert cancel.handle == submit.handle
    assert not cancel.HasField("choice")
    async with asyncio.timeout(5):
        await cell.gateway.table.wait_idle()


async def test_the_deadline_goes_along_and_is_kept_here_too(cell: Cell) -> None:
    scheduler = await cell.scheduler.connection()
    call = cell.stub.GenerateStream(ask(), timeout=1)
    submit = await scheduler.submit()
    assert 0 < submit.remaining_s < 1.1  # gRPC rounds a timeout up
    error = await failure(call)
    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (await scheduler.cancel()).handle == submit.handle


async def test_clients_are_told_apart_by_tenant_or_connection(cell: Cell) -> None:
    scheduler = await cell.scheduler.connection()
    calls = [
        cell.stub.GenerateStream(ask(), metadata=(("x-tenant-id", "acme"),)),
        cell.stub.GenerateStream(ask()),
        cell.stub.GenerateStream(ask()),
    ]
    clients = sorted([(await scheduler.submit()).client for _ in calls])
    assert clients.count("acme") == 1
    assert len(set(clients)) == 2
    for call in calls:
        call.cancel()


async def test_a_slow_client_holds_up_nobody_and_gets_everything_merged(cell: Cell) -> None:
    scheduler = await cell.scheduler.connection()
    options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(cell.address, options=options) as channel:
        slow = type(cell.stub)(channel).GenerateStream(ask("slow", stop={"max_tokens": 250}))
        slow_submit = await scheduler.submit()
        quick = cell.stub.GenerateStream(ask("quick", stop={"max_tokens": 200}))
        quick_submit = await scheduler.submit()
        big = [types_pb2.PositionLogprobs(top=[types_pb2.TokenLogprob(token_id=1, logprob=-1.0, rank=1)] * 200)]
        for index in range(200):
            # Far more than the slow client's window takes.
            scheduler.emit(slow_submit, [97 + index % 26], index, logprobs=big)
            scheduler.emit(quick_submit, [97], index)
        scheduler.emit(quick_submit, b"", 200, finish_reason=LENGTH)
        assert joined(await collect(quick))[0] == "a" * 200
        scheduler.emit(slow_submit, b"!", 200, finish_reason=LENGTH)
        messages = await collect(slow)
        assert joined(messages)[0] == "".join(chr(97 + index % 26) for index in range(200)) + "!"
        assert sum(len(delta.logprobs) for message in messages for delta in message.deltas) == 200
        assert len(messages) < 200


async def test_what_waits_for_a_slow_client_comes_in_messages_that_clients_take(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain client takes 4 MiB at once; how slowly it reads must not cost it its stream."""
    monkeypatch.setattr("gateway.requests.MESSAGE_ENTRIES", 60)  # ten tokens with four alternatives each
    scheduler = await cell.scheduler.connection()
    options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(cell.address, options=options) as channel:
        output = {"logprobs": True, "top_logprobs": 4}
        slow = type(cell.stub)(channel).GenerateStream(ask("slow", stop={"max_tokens": 250}, output=output))
        submit = await scheduler.submit()
        quick = cell.stub.GenerateStream(ask("quick"))
        quick_submit = await scheduler.submit()
        big = [types_pb2.PositionLogprobs(top=[types_pb2.TokenLogprob(token_id=1, logprob=-1.0, rank=1)] * 200)]
        for index in range(200):
            scheduler.emit(submit, [97 + index % 26], index, logprobs=big)
        scheduler.emit(submit, b"!", 200, finish_reason=LENGTH)
        scheduler.emit(quick_submit, b"!", 0, finish_reason=LENGTH)
        await collect(quick)  # all that came before it has come, too
        messages = await collect(slow)
    deltas = [delta for message in messages for delta in message.deltas]
    assert joined(messages)[0] == "".join(chr(97 + index % 26) for index in range(200)) + "!"
    assert max(len(delta.token_ids) for delta in deltas) == 10, "more than that had waited"
    assert [bool(delta.finish_reason) for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert [message.HasField("usage") for message in messages] == [False] * (len(messages) - 1) + [True]


async def test_too_many_requests_are_refused(cell_with: Callable[..., Any]) -> None:
    cell = await cell_with(max_concurrent_requests=1)
    scheduler = await cell.scheduler.connection()
    call = cell.stub.GenerateStream(ask())
    await scheduler.submit()
    error = await failure(cell.stub.GenerateStream(ask()))
    assert isinstance(error, errors.QueueFull)
    call.cancel()


# -------------------------------------------------------------------------------------------------- text and models


async def test_tokenize_and_detokenize(cell: Cell) -> None:
    answer = await cell.stub.Tokenize(generation_pb2.TokenizeRequest(text="hé"))
    assert bytes(answer.token_ids) == "hé".encode()
    assert len(answer.pieces) == 3
    # Longer than one part of the answer, which is put together from several.
    long = "".join(chr(97 + index % 26) for index in range(40_000))
    answer = await cell.stub.Tokenize(generation_pb2.TokenizeRequest(text=long))
    assert bytes(answer.token_ids).decode() == long == "".join(answer.pieces)
    chat = {"messages": [{"role": "user", "content": "x"}]}
    answer = await cell.stub.Tokenize(generation_pb2.TokenizeRequest(model="tiny", chat=chat))
    assert answer.pieces[0] == "<s>"
    back = await cell.stub.Detokenize(generation_pb2.DetokenizeRequest(token_ids=answer.token_ids))
    assert back.text == "user\nx\nassistant\n"
    whole = generation_pb2.DetokenizeRequest(token_ids=answer.token_ids, skip_special_tokens=False)
    assert (await cell.stub.Detokenize(whole)).text.startswith("<s><|im_start|>user")
    error = await failure(cell.stub.Detokenize(generation_pb2.DetokenizeRequest(token_ids=[1, 999])))
    assert isinstance(error, errors.InvalidField)
    assert error.field == "token_ids[1]"


async def test_models_are_listed_as_the_scheduler_says(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = await cell.scheduler.connection()
    (model,) = (await cell.stub.ListModels(generation_pb2.ListModelsRequest())).models
    assert (model.name, model.workers, model.max_model_len, model.vocab_size) == ("tiny", 1, 512, 264)
    assert (model.chat, list(model.fingerprints), model.max_sequence_tokens) == (True, ["f"], 256)
    changed = scheduler_pb2.ModelState()
    changed.CopyFrom(MODEL)
    changed.workers = 3
    told = asyncio.Event()
    update = cell.gateway.catalog.update

    def update_and_tell(models: Any) -> None:
        update(models)
        told.set()

    monkeypatch.setattr(cell.gateway.catalog, "update", update_and_tell)
    scheduler.outbox.put_nowait(scheduler_pb2.SessionResponse(models=scheduler_pb2.ModelList(models=[changed])))
    async with asyncio.timeout(5):
        await told.wait()
    assert (await cell.stub.GetModel(generation_pb2.GetModelRequest(model="tiny"))).model.workers == 3


# ------------------------------------------------------------------------------------------------------ operation


async def test_health_follows_the_session_and_the_workers(cell: Cell) -> None:
    scheduler = await cell.scheduler.connection()
    health = health_pb2_grpc.HealthStub(cell.channel)
    kinds = health_pb2.HealthCheckResponse
    for name in ("", "tandem.v1.GenerationService", "tiny"):
        assert (await health.Check(health_pb2.HealthCheckRequest(service=name))).status == kinds.SERVING
    watch = health.Watch(health_pb2.HealthCheckRequest(service="tiny"))
    assert (await watch.read()).status == kinds.SERVING
    scheduler.outbox.put_nowait(scheduler_pb2.SessionResponse(models=scheduler_pb2.ModelList()))
    assert (await watch.read()).status == kinds.NOT_SERVING
    scheduler.outbox.put_nowait(scheduler_pb2.SessionResponse(models=scheduler_pb2.ModelList(models=[MODEL])))
    assert (await watch.read()).status == kinds.SERVING
    scheduler.drop()
    assert (await watch.read()).status == kinds.NOT_SERVING
    await cell.scheduler.connection()
    assert (await watch.read()).status == kinds.SERVING
    watch.cancel()


async def test_draining_finishes_the_old_and_refuses_the_new(cell: Cell) -> None:
    scheduler = await cell.scheduler.connection()
    call = cell.stub.GenerateStream(ask())
    submit = await scheduler.submit()
    scheduler.emit(submit, b"a")
    first = await call.read()
    drained = asyncio.ensure_future(cell.gateway.drain())
    await asyncio.sleep(0)
    error = await failure(cell.stub.GenerateStream(ask()))
    assert isinstance(error, errors.Unavailable)
    assert error.retry_after_s > 0
    assert not drained.done()
    for index in range(1, 50):
        scheduler.emit(submit, b"a", index)
    scheduler.emit(submit, b"b", 50, finish_reason=LENGTH)
    assert joined([first, *await collect(call)])[0] == "a" * 50 + "b"
    await drained


async def test_metrics_fall_back_to_zero(cell: Cell) -> None:
    scheduler = await cell.scheduler.connection()
    calls = [cell.stub.GenerateStream(ask(request_id=f"{number}")) for number in range(3)]
    submits = {submit.request_id: submit for submit in [await scheduler.submit() for _ in calls]}
    page = cell.gateway.telemetry.render().decode()
    assert "tandem_gateway_requests_running 3.0" in page
    scheduler.emit(submits["0"], b"ab")
    scheduler.emit(submits["0"], b"c", 2, finish_reason=LENGTH)
    for call in calls[1:]:
        call.cancel()
    async with asyncio.timeout(5):
        await asyncio.gather(*(collect(call) for call in calls), return_exceptions=True)
        await cell.gateway.table.wait_idle()
    page = cell.gateway.telemetry.render().decode()
    for line in (
        "tandem_gateway_requests_running 0.0",
        'tandem_gateway_requests_total{model="tiny",outcome="cancelled"} 2.0',
        'tandem_gateway_requests_total{model="tiny",outcome="length"} 1.0',
        'tandem_gateway_generation_tokens_total{model="tiny"} 3.0',
        'tandem_gateway_time_to_first_token_seconds_count{model="tiny"} 1.0',
    ):
        assert line in page
