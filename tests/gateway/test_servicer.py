"""The public service over real gRPC, with a scripted scheduler behind it: answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tandem.v1 import generation_pb2, scheduler_pb2, types_pb2

from .calls import EOS, LENGTH, STOP, Ask, ask, collect, joined
from .conftest import Cell


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
    ({"speculation": {"mode": types_pb2.SPECULATION_MODE_COMBINED}}, lambda s: s.speculation.mode, 5),
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
