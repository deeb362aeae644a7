"""The public service over real gRPC, with a scripted scheduler behind it."""

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

from .conftest import MODEL, Cell

Ask = generation_pb2.GenerateStreamRequest
STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH
EOS = 258


def ask(text: str = "hi", **fields: Any) -> Ask:
    return Ask(model="tiny", text=text, **fields)


async def collect(call: Any) -> list[Any]:
    messages = []
    async with asyncio.timeout(10):
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
    return messages


def joined(messages: list[Any], index: int = 0) -> tuple[str, list[int]]:
    deltas = [delta for message in messages for delta in message.deltas if delta.index == index]
    return "".join(delta.text for delta in deltas), [token for delta in deltas for token in delta.token_ids]


async def failure(call: Any) -> errors.TandemError:
    waiting = collect(call) if hasattr(call, "read") else asyncio.wait_for(call, 10)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await waiting
    return errors.from_rpc_error(error.value)


async def test_a_stream_from_prompt_to_usage(cell: Cell) -> None:
    scheduler = await cell.scheduler.connection()
    call = cell.stub.GenerateStream(ask("hello", request_id="r1"))
    submit = await scheduler.submit()
    assert bytes(submit.prompt_token_ids) == b"hello"
    assert (submit.request_id, submit.attempt, submit.model) == ("r1", 0, "tiny")
    assert [(choice.index, list(choice.token_ids)) for choice in submit.choices] == [(0, [])]
    assert not submit.HasField("remaining_s")
    scheduler.emit(submit, b"wor", cached_tokens=3)
    first = await call.read()
    assert (first.request_id, first.model, first.seed) == ("r1", "tiny", submit.seed)
    assert (first.deltas[0].text, list(first.deltas[0].token_ids)) == ("wor", list(b"wor"))
    assert not first.HasField("usage")
    scheduler.emit(
        submit, b"ld", 3, finish_reason=LENGTH, cached_tokens=9, drafted_tokens=4, accepted_tokens=2, resumptions=1
    )
    (last,) = await collect(call)
    assert (last.deltas[0].text, last.deltas[0].first_token_index) == ("ld", 3)
    assert last.deltas[0].finish_reason == LENGTH
    assert last.usage == types_pb2.Usage(
        prompt_tokens=5, completion_tokens=5, cached_tokens=3, drafted_tokens=4, accepted_tokens=2, resumptions=1
    )
    assert len(cell.gateway.table) == 0


async def test_generate_answers_once_and_draws_a_seed(cell: Cell) -> None:
    scheduler = await cell.scheduler.connection()
    seeds = set()
    for _ in range(2):
        call = cell.stub.Generate(generation_pb2.GenerateRequest(text="hi"))
        submit = await scheduler.submit()
        scheduler.emit(submit, b"ab")
        scheduler.emit(submit, [*b"c", EOS], 2, finish_reason=STOP, stop_token_id=EOS)
        answer = await call
        (choice,) = answer.choices
        assert (choice.text, list(choice.token_ids)) == ("abc", [*b"abc", EOS])
        assert (choice.finish_reason, choice.stop_token_id) == (STOP, EOS)
        assert (answer.usage.completion_tokens, answer.seed) == (4, submit.seed)
        assert answer.request_id
        seeds.add(answer.seed)
    assert len(seeds) == 2


async def test_headers_come_with_the_first_token(cell: Cell) -> None:
    scheduler = await cell.scheduler.connection()
    call = cell.stub.GenerateStream(ask())
    submit = await scheduler.submit()
    headers = asyncio.ensure_future(call.initial_metadata())
    await asyncio.wait({headers}, timeout=0.1)
    assert not headers.done()
    scheduler.emit(submit, b"x")
    await headers
    call.cancel()


# ------------------------------------------------------------------------------------------- every option arrives

OPTIONS: list[tuple[dict[str, Any], Callable[[scheduler_pb2.Submit], Any], Any]] = [
    ({"sampling": {"temperature": 0.5}}, lambda s: s.params.temperature, 0.5),
    ({"sampling": {"top_k": 7}}, lambda s: s.params.top_k, 7),
    ({"sampling": {"top_p": 0.5}}, lambda s: s.params.top_p, 0.5),
    ({"sampling": {"min_p": 0.25}}, lambda s: s.params.min_p, 0.25),
    ({"sampling": {"seed": 2**64 - 1}}, lambda s: s.seed, 2**64 - 1),
    ({"sampling": {"seed": 0}}, lambda s: s.seed, 0),
    ({"sampling": {"repetition_penalty": 1.5}}, lambda s: s.params.repetition_penalty, 1.5),
    ({"sampling": {"presence_penalty": -0.5}}, lambda s: s.params.presence_penalty, -0.5),
    ({"sampling": {"frequency_penalty": 0.5}}, lambda s: s.params.frequency_penalty, 0.5),
    ({"sampling": {"logit_bias": {7: -1.5}}}, lambda s: dict(s.params.logit_bias), {7: -1.5}),
    (
        {"sampling": {"bad_words": ["ab"]}},
        lambda s: sorted(bytes(word.ids) for word in s.params.bad_words),
        [b" ab", b"ab"],
    ),
    ({"stop": {"max_tokens": 9}}, lambda s: s.params.max_tokens, 9),
    ({}, lambda s: s.params.HasField("max_tokens"), False),
    ({"stop": {"min_tokens": 3}}, lambda s: s.params.min_tokens, 3),
    ({"stop": {"token_ids": [9, 5]}}, lambda s: list(s.params.stop_token_ids), [5, 9, EOS]),
    ({"stop": {"token_ids": [9], "ignore_eos": True}}, lambda s: list(s.params.stop_token_ids), [9]),
    ({"stop": {"ignore_eos": True}}, lambda s: list(s.params.stop_token_ids), []),
    ({"stop": {"strings": ["<|im_start|>"]}}, lambda s: list(s.params.stop_token_ids), [257, EOS]),
    ({"output": {"logprobs": True}}, lambda s: (s.params.HasField("top_logprobs"), s.params.top_logprobs), (True, 0)),
    ({"output": {"top_logprobs": 5}}, lambda s: s.params.top_logprobs, 5),
    ({}, lambda s: s.params.HasField("top_logprobs"), False),
    ({"output": {"prompt_logprobs": 0}}, lambda s: s.params.HasField("prompt_logprobs"), True),
    ({"output": {"prompt_logprobs": 2}}, lambda s: s.params.prompt_logprobs, 2),
    ({"n": 3}, lambda s: [choice.index for choice in s.choices], [0, 1, 2]),
    ({"priority": -4}, lambda s: s.priority, -4),
    ({"cache_salt": "tenant"}, lambda s: s.cache_salt, "tenant"),
    ({"speculation": {"mode": types_pb2.SPECULATION_MODE_OFF}}, lambda s: s.speculation.mode, 1),
    ({"speculation": {"max_draft_tokens": 0}}, lambda s: s.speculation.HasField("max_draft_tokens"), True),
    ({"speculation": {"max_draft_tokens": 3}}, lambda s: s.speculation.max_draft_tokens, 3),
    (
        {"resume": [{"index": 0, "token_ids": [104], "seed": 5}]},
        lambda s: (s.seed, list(s.choices[0].token_ids)),
        (5, [104]),
    ),
]


@pytest.mark.parametrize("streamed", [True, False])
async def test_every_option_reaches_the_scheduler(cell: Cell, streamed: bool) -> None:
    scheduler = await cell.scheduler.connection()
    for fields, read, expected in OPTIONS:
        kind = Ask if streamed else generation_pb2.GenerateRequest
        method = cell.stub.GenerateStream if streamed else cell.stub.Generate
        call = method(kind(model="tiny", text="hi", **fields))
        submit = await scheduler.submit()
        assert read(submit) == expected, fields
        call.cancel()
        await scheduler.cancel()


def test_no_public_option_is_missing_from_the_table() -> None:
    """Every field of the request's parameter messages is tried above, or named here with its own test."""
    tried = {(group, name) for fields, _, _ in OPTIONS for group in fields for name in _names(fields[group])}
    elsewhere = {("stop", "include_stop"), ("output", "echo")}
    for group in ("sampling", "stop", "output", "speculation"):
        message = Ask.DESCRIPTOR.fields_by_name[group].message_type
        assert message is not None
        assert {(group, field.name) for field in message.fields} <= tried | elsewhere
    top_level = {field.name for field in Ask.DESCRIPTOR.fields}
    assert top_level - {group for group, _ in tried} == {"model", "request_id", "text", "token_ids", "chat"}


def _names(value: Any) -> list[str]:
    return list(value) if isinstance(value, dict) else [""]


# --------------------------------------------------------------------------------------------------------- stops


async def test_a_stop_string_across_tokens_and_messages(cell: Cell) -> None:
    scheduler = await cell.scheduler.connection()
    call = cell.stub.GenerateStream(ask(stop={"strings": ["QRSTU"]}, output={"logprobs": True}))
    submit = await scheduler.submit()
    entry = types_pb2.PositionLogprobs(chosen=types_pb2.TokenLogprob(token_id=1, logprob=-1.0))
    scheduler.emit(submit, b"aQR", logprobs=[entry] * 3)
    first = await call.read()
    assert first.deltas[0].text == "a"
    # More tokens than the stop needs come at once: as after a verified draft.
    scheduler.emit(submit, b"STUxyz", 3, logprobs=[entry] * 6)
    (last,) = await collect(call)
    (delta,) = last.deltas
    assert (delta.text, bytes(delta.token_ids), len(delta.logprobs)) == ("", b"STU", 3)
    assert (delta.finish_reason, delta.stop_string) == (STOP, "QRSTU")
    assert last.usage.completion_tokens == 6
    cancel = await scheduler.cancel()
    assert (cancel.handle, cancel.choice) == (submit.handle, 0)


@pytest.mark.parametrize(
    ("fields", "tokens", "finish", "text", "num_tokens"),
    [
        ({"strings": ["b c"]}, b"ab cd", {}, "a", 4),
        ({"strings": ["b c"], "include_stop": True}, b"ab cd", {}, "ab c", 4),
        ({"strings": ["end###"]}, [*b"the end", EOS], {"finish_reason": STOP, "stop_token_id": EOS}, "the end", 8),
        ({"strings": ["end###"]}, b"the end", {"finish_reason": LENGTH}, "the end", 7),
        ({"strings": ["\n"], "min_tokens": 4}, b"\n\n\na\nb", {}, "\n\n\na", 5),
        ({"token_ids": [120]}, b"abx", {"finish_reason": STOP, "stop_token_id": 120}, "ab", 3),
        (
            {"token_ids": [120], "include_stop": True},
            b"abx",
            {"finish_reason": STOP, "stop_token_id": 120},
            "abx",
            3,
        ),
        ({"include_stop": True}, [97, EOS], {"finish_reason": STOP, "stop_token_id": EOS}, "a", 2),
        (
            {"token_ids": [EOS], "include_stop": True},
            [97, EOS],
            {"finish_reason": STOP, "stop_token_id": EOS},
            "a<|im_end|>",
            2,
        ),
        ({}, "a好".encode()[:-1], {"finish_reason": LENGTH}, "a", 3),
        ({}, b"a\xffb", {"finish_reason": LENGTH}, "a\ufffdb", 3),
    ],
)
@pytest.mark.parametrize("one_by_one", [True, False])
async def test_ends(
    cell: Cell,
    fields: dict[str, Any],
    tokens: bytes | list[int],
    finish: dict[str, Any],
    text: str,
    num_tokens: int,
    one_by_one: bool,
) -> None:
    """The same text and ids, streamed or not, token by token or all at once."""
    scheduler = await cell.scheduler.connection()
    streamed = cell.stub.GenerateStream(ask(stop=fields))
    whole = asyncio.ensure_future(_generate(cell, stop=fields))
    for _ in range(2):
        submit = await scheduler.submit()
        ids = list(tokens)
        if one_by_one:
            for index, token_id in enumerate(ids[:-1]):
                scheduler.emit(submit, [token_id], index)
            scheduler.emit(submit, ids[-1:], len(ids) - 1, **finish)
        else:
            scheduler.emit(submit, ids, **finish)
    messages, answer = await collect(streamed), await whole
    assert joined(messages) == (text, list(tokens)[:num_tokens])
    assert (answer.choices[0].text, list(answer.choices[0].token_ids)) == joined(messages)
    assert messages[-1].usage.completion_tokens == num_tokens == answer.usage.completion_tokens
    last = messages[-1].deltas[-1]
    assert last.finish_reason == answer.choices[0].finish_reason == finish.get("finish_reason", STOP)


async def _generate(cell: Cell, **fields: Any) -> generation_pb2.GenerateResponse:
    return await cell.stub.Generate(generation_pb2.GenerateRequest(text="hi", **fields))


async def test_a_stop_that_is_a_special_token(cell: Cell) -> None:
    scheduler = await cell.scheduler.connection()
    call = cell.stub.GenerateStream(ask(stop={"strings": ["<|im_start|>"]}))
    submit = await scheduler.submit()
    scheduler.emit(submit, [97, 257], finish_reason=STOP, stop_token_id=257)
    (message,) = await collect(call)
    assert (message.deltas[0].text, message.deltas[0].stop_string) == ("a", "<|im_start|>")


# ------------------------------------------------------------------------------------------------ several choices


async def test_three_choices_end_on_their_own(cell: Cell) -> None:
    scheduler = await cell.scheduler.connection()
    call = cell.stub.GenerateStream(ask(n=3, stop={"strings": ["!"]}, output={"echo": True}))
    submit = await scheduler.submit()
    scheduler.say(
        *(
            scheduler_pb2.Output(handle=submit.handle, choice=choice, token_ids=list(tokens), drafted_tokens=2)
            for choice, tokens in enumerate([b"a", b"b!", b"c"])
        )
    )
    first = await call.read()
    assert [(delta.index, delta.text, delta.prompt_text) for delta in first.deltas] == [
        (0, "a", "hi"),
        (1, "b", "hi"),
        (2, "c", "hi"),
    ]
    assert (await scheduler.cancel()).choice == 1
    scheduler.emit(submit, b"A", 1, choice=2, finish_reason=LENGTH)
    scheduler.emit(submit, b"B", 1, finish_reason=LENGTH, drafted_tokens=3)
    messages = await collect(call)
    assert joined([first, *messages], 0) == ("aB", list(b"aB"))
    assert joined([first, *messages], 1) == ("b", list(b"b!"))
    assert joined([first, *messages], 2) == ("cA", list(b"cA"))
    assert [message.HasField("usage") for message in messages] == [False] * (len(messages) - 1) + [True]
    assert (messages[-1].usage.completion_tokens, messages[-1].usage.drafted_tokens) == (6, 7)
    assert all(not delta.prompt_text for message in messages for delta in message.deltas)


async def test_prompt_logprobs_come_whole_with_the_first_message(cell: Cell) -> None:
    scheduler = await cell.scheduler.connection()
    call = cell.stub.GenerateStream(ask("abc", output={"prompt_logprobs": 0}))
    submit = await scheduler.submit()
    rows = [types_pb2.PositionLogprobs()] + [
        types_pb2.PositionLogprobs(chosen=types_pb2.TokenLogprob(token_id=token)) for token in b"bc"
    ]
    scheduler.say(scheduler_pb2.Output(handle=submit.handle, prompt_logprobs=rows[:2]))
    scheduler.say(scheduler_pb2.Output(handle=submit.handle, first_prompt_position=1, prompt_logprobs=rows[1:]))
    scheduler.emit(submit, b"x")
    first = await call.read()
    assert list(first.prompt_logprobs) == rows
    scheduler.emit(submit, b"y", 1, finish_reason=LENGTH)
    (last,) = await collect(call)
    assert not last.prompt_logprobs


# --------------------------------------------------------------------------------------------- client-side resume


async def test_a_client_comes_back_with_what_it_holds(cell: Cell) -> None:
    scheduler = await cell.scheduler.connection()
    held = "a好".encode()[:3]
    resume = [{"index": 0, "token_ids": list(held), "seed": 9}, {"index": 1, "token_ids": [], "seed": 9}]
    call = cell.stub.GenerateStream(ask(n=2, resume=resume, stop={"strings": ["!!"]}, output={"echo": True}))
    submit = await scheduler.submit()
    assert [(choice.index, bytes(choice.token_ids)) for choice in submit.choices] == [(0, held), (1, b"")]
    assert submit.seed == 9
    scheduler.emit(submit, "好".encode()[2:], 3)
    first = await call.read()
    assert (first.deltas[0].text, first.deltas[0].first_token_index, first.deltas[0].prompt_text) == ("好", 3, "")
    scheduler.emit(submit, b"!!", 4)
    scheduler.emit(submit, b"b", 0, choice=1, finish_reason=LENGTH)
    messages = [first, *await collect(call)]
    assert joined(messages) == ("好", [*"好".encode()[2:], *b"!!"])
    assert joined(messages, 1) == ("b", list(b"b"))
    assert messages[-1].usage.completion_tokens == 7


async def test_held_back_text_of_a_resumed_choice_comes_once(cell: Cell) -> None:
    scheduler = await cell.scheduler.connection()
    call = cell.stub.GenerateStream(ask(resume=[{"token_ids": list(b"ab"), "seed": 1}], stop={"strings": ["bx"]}))
    submit = await scheduler.submit()
    scheduler.emit(submit, b"c", 2, finish_reason=LENGTH)
    assert joined(await collect(call)) == ("bc", list(b"c"))


@pytest.mark.parametrize(
    ("stop", "held", "expected"),
    [
        ({"strings": ["!"]}, list(b"ab!"), ("stop_string", "!")),
        ({}, [97, EOS], ("stop_token_id", EOS)),
        ({"max_tokens": 2}, list(b"ab"), None),
    ],
)
async def test_a_resumed_choice_that_is_over_ends_at_once(
    cell: Cell, stop: dict[str, Any], held: list[int], expected: tuple[str, Any] | None
) -> None:
    scheduler = await cell.scheduler.connection()
    (message,) = await collect(cell.stub.GenerateStream(ask(resume=[{"token_ids": held, "seed": 1}], stop=stop)))
    (delta,) = message.deltas
    assert (delta.text, list(delta.token_ids)) == ("", [])
    assert delta.finish_reason == (LENGTH if expected is None else STOP)
    if expected is not None:
        assert getattr(delta, expected[0]) == expected[1]
    assert message.usage.completion_tokens == len(held)
    assert scheduler.submits.empty()


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
