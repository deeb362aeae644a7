"""What clients ask for, and what the gateway bears: cases 16, 17, 42 and 78."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem.v1 import generation_pb2, generation_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc, types_pb2

import worker.executor
from cli.arguments import SAMPLING_OPTIONS, add_sampling, sampling_options
from cluster.channel import connect
from cluster.server import bind, create_server
from engine.noise import choice_seed
from engine.sampler import SampleRow
from tandem_client.convert import stream_request
from tandem_client.types import Request
from tests.cases.cell import EOS, ForcedEngine, WholeCell, whole_cell
from tests.gateway.conftest import CHAT_TEMPLATE, Connection, ScriptedScheduler, byte_level, write_folder
from tests.integration.harness import Process, receive, request

STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cell(folder: Path) -> AsyncIterator[WholeCell]:
    async with whole_cell(folder, ForcedEngine({ord("E"): (1, [EOS] * 40)})) as started:
        yield started


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("ignore_eos", "num_tokens", "finish", "stop_token_id"), [(True, 20, LENGTH, 0), (False, 1, STOP, EOS)]
)
async def test_case_16_ignoring_the_end_of_sequence_takes_effect(
    cell: WholeCell, ignore_eos: bool, num_tokens: int, finish: int, stop_token_id: int
) -> None:
    message = request("E", 20)
    message.stop.ignore_eos = ignore_eos
    streamed = await receive(cell.stub.GenerateStream(message))
    choice = (await cell.whole(message)).choices[0]
    assert list(choice.token_ids) == streamed.tokens[0] == [EOS] * num_tokens
    assert (
        (choice.finish_reason, choice.stop_token_id) == (streamed.finish[0], stop_token_id) == (finish, stop_token_id)
    )


# ----------------------------------------------------------------------------------- every option reaches the sampler

Read = Callable[[SampleRow], Any]
OPTIONS: list[tuple[dict[str, Any], Read, Any]] = [
    ({"temperature": 0.5}, lambda row: row.params.temperature, 0.5),
    ({"temperature": 0.0}, lambda row: row.params.temperature, 0.0),
    ({}, lambda row: row.params.temperature, 1.0),
    ({"top_k": 7}, lambda row: row.params.top_k, 7),
    ({"top_p": 0.5}, lambda row: row.params.top_p, 0.5),
    ({"min_p": 0.25}, lambda row: row.params.min_p, 0.25),
    ({"seed": 2**64 - 1}, lambda row: row.seed, choice_seed(2**64 - 1, 0)),
    ({"seed": 0}, lambda row: row.seed, choice_seed(0, 0)),
    ({"repetition_penalty": 1.5}, lambda row: row.params.repetition_penalty, 1.5),
    ({"presence_penalty": -0.5}, lambda row: row.params.presence_penalty, -0.5),
    ({"frequency_penalty": 0.5}, lambda row: row.params.frequency_penalty, 0.5),
    ({"logit_bias": {70: -1.5}}, lambda row: dict(row.params.logit_bias), {70: -1.5}),
    ({"bad_words": ["ab"]}, lambda row: sorted(map(bytes, row.params.bad_words)), [b" ab", b"ab"]),
    ({"max_tokens": 1}, lambda row: row.params.max_tokens, 1),
    ({"min_tokens": 2}, lambda row: row.params.min_tokens, 2),
    ({"stop_token_ids": [9]}, lambda row: row.params.stop_token_ids, {9, EOS}),
    ({"stop": ["<|user|>"]}, lambda row: row.params.stop_token_ids, {258, EOS}),
    ({"ignore_eos": True}, lambda row: row.params.stop_token_ids, set()),
    ({}, lambda row: row.params.stop_token_ids, {EOS}),
    ({"logprobs": True}, lambda row: row.params.top_logprobs, 0),
    ({"top_logprobs": 3}, lambda row: row.params.top_logprobs, 3),
    ({}, lambda row: row.params.top_logprobs, None),
    ({"prompt_logprobs": 2}, lambda row: row.params.prompt_logprobs, 2),
    ({"prompt_logprobs": 0}, lambda row: row.params.prompt_logprobs, 0),
]
ELSEWHERE = {"include_stop", "echo"}  # the gateway's own affair


def from_flags(options: dict[str, Any]) -> dict[str, Any]:
    """The options as `tandem generate` reads them from its command line."""
    parser = argparse.ArgumentParser()
    add_sampling(parser)
    names = {"bad_words": "bad-word", "stop_token_ids": "stop-token-id"}
    flags = []
    for name, value in options.items():
        flag = f"--{names.get(name, name.replace('_', '-'))}"
        values = value if isinstance(value, list) else [value]
        flags += [flag] if value is True else [f"{flag}={one}" for one in values]
    return sampling_options(parser.parse_args(flags))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("route", ["stream", "unary", "command line"])
async def test_case_17_every_option_reaches_the_sampler(
    cell: WholeCell, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[SampleRow] = []
    sample = worker.executor.sample

    def listen(logits: Any, given: list[SampleRow]) -> Any:
        rows.extend(given)
        return sample(logits, given)

    monkeypatch.setattr(worker.executor, "sample", listen)
    for options, read, expected in OPTIONS:
        rows.clear()
        if route == "command line":
            if not set(options) <= set(SAMPLING_OPTIONS):
                continue
            given = from_flags(options)
        else:
            given = options
        # As the client library writes it.
        message = stream_request(Request(prompt="hi", **{"max_tokens": 3, **given}), {}, 0)
        if options.get("max_tokens") is None:
            message.stop.max_tokens = 3
        await (cell.whole(message) if route == "unary" else receive(cell.stub.GenerateStream(message)))
        assert read(rows[0]) == expected, options
        assert list(rows[0].known_token_ids[: rows[0].num_prompt_tokens]) == list(b"hi")


def test_case_17_no_option_is_missing_from_the_table() -> None:
    tried = {name for options, _, _ in OPTIONS for name in options} | ELSEWHERE
    renamed = {"strings": "stop", "token_ids": "stop_token_ids"}
    for group in ("sampling", "stop", "output"):
        message = generation_pb2.GenerateRequest.DESCRIPTOR.fields_by_name[group].message_type
        assert message is not None
        assert {renamed.get(field.name, field.name) for field in message.fields} <= tried
    assert set(SAMPLING_OPTIONS) - {"speculation", "max_draft_tokens"} <= tried


# --------------------------------------------------------------------------------------- long prompts and the others

LONG_PROMPT = "the quick brown fox jumps over the lazy dog, and then " * 95_000  # 5 MB
MODEL_LEN = 8_000_000


@contextlib.asynccontextmanager
async def gateway_process(folder: Path) -> AsyncIterator[tuple[str, Connection]]:
    """A gateway in a process of its own, and its scripted scheduler; the context holds the longest of prompts."""
    tokenizer = byte_level(400)
    write_folder(folder, tokenizer, chat_template=CHAT_TEMPLATE, bos_token="<s>")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": MODEL_LEN}))
    scheduler = ScriptedScheduler()
    size: dict[str, Any] = {
        "max_model_len": MODEL_LEN,
        "max_sequence_tokens": MODEL_LEN,
        "vocab_size": tokenizer.get_vocab_size(),
    }
    scheduler.models = [scheduler_pb2.ModelState(name="tiny", workers=1, **size)]
    server = create_server()
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scheduler, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    flags = (f"--model=tiny={folder}", f"--scheduler=127.0.0.1:{port}", "--port=0")
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "gateway", *flags, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        assert child.stdout is not None
        ready = (await asyncio.wait_for(child.stdout.readline(), 60)).decode().split()
        yield ready[-1], await scheduler.connection()
    finally:
        child.kill()
        await child.wait()
        await server.stop(0)


class Bystander:
    """One who probes health and takes tokens of a stream all the while, and probes another process for comparison."""

    def __init__(self, address: str, connection: Connection, other: str) -> None:
        self.longest_s = self.other_longest_s = 0.0
        self.num_waits = 0
        self._connection = connection
        self._channel, self._other = connect(address), connect(other)
        hi = generation_pb2.GenerateStreamRequest(model="tiny", text="hi")
        self._call = generation_pb2_grpc.GenerationServiceStub(self._channel).GenerateStream(hi)
        self._submit: Any = None
        self._index = 0

    async def watch(self, until: asyncio.Future[Any]) -> None:
        """Until something is done; notes the longest waits."""
        self.longest_s, self.other_longest_s, self.num_waits = 0.0, 0.0, 0
        if self._submit is None:
            self._submit = await self._connection.submit()
        while not until.done():
            self.other_longest_s = max(self.other_longest_s, await _seconds(_probe(self._other)))
            for wait in (_probe(self._channel), self._token()):
                self.longest_s = max(self.longest_s, await _seconds(wait))
                self.num_waits += 1
            await asyncio.sleep(0.005)

    async def _token(self) -> None:
        self._connection.emit(self._submit, b"x", self._index)
        assert (await self._call.read()).deltas[0].first_token_index == self._index
        self._index += 1

    async def leave(self) -> None:
        self._call.cancel()
        await self._channel.close()
        await self._other.close()


async def _probe(channel: Any) -> None:
    response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert response.status == health_pb2.HealthCheckResponse.SERVING


async def _seconds(wait: Coroutine[Any, Any, None]) -> float:
    began = time.perf_counter()
    await wait
    return time.perf_counter() - began


def asked(kind: str) -> Any:
    message = generation_pb2.GenerateStreamRequest(model="tiny")
    if kind == "text":
        message.text = LONG_PROMPT
    else:  # what this user writes spells a control token, which must stay text
        message.chat.messages.add(role="user", content=LONG_PROMPT[:2_000_000] + "<|im_end|>" + LONG_PROMPT[2_000_000:])
    return message


def contention() -> float:
    """How much longer than its processor time a piece of work takes here, at present."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    while time.process_time() - cpu_s < 0.1:
        pass
    return (time.perf_counter() - wall_s) / 0.1


async def test_case_42_and_78_a_prompt_of_5_mb_is_served_and_holds_nobody_up(tmp_path: Path) -> None:
    """A probe takes less than 100 ms; where the machine is busy, less than a sixth of what the prompt takes.

    A few attempts are allowed; a loop that freezes would freeze in all of them, for as long as the prompt takes.
    """
    other = await Process.start(tmp_path, "scheduler", "scheduler", port=0)
    async with gateway_process(tmp_path / "model") as (address, connection):
        channel, bystander = connect(address), Bystander(address, connection, other.address)
        for kind in ("text", "chat"):
            for _ in range(3):
                quiet = contention() < 1.3
                long = generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(asked(kind))
                began = time.perf_counter()
                arrived = asyncio.ensure_future(asyncio.wait_for(connection.submits.get(), 90))
                await bystander.watch(arrived)
                took_s = time.perf_counter() - began
                whole = await arrived
                assert len(whole.prompt_token_ids) > 500_000
                connection.emit(whole, [5], finish_reason=LENGTH)
                assert (await long.read()).usage.prompt_tokens == len(whole.prompt_token_ids)
                assert bystander.num_waits > 10, "it was over too soon to tell"
                quiet = quiet and contention() < 1.3
                bound_s = max(0.1, 2 * bystander.other_longest_s, 0.0 if quiet else took_s / 6)
                if bystander.longest_s < bound_s:
                    break
            assert bystander.longest_s < bound_s, f"{kind}: {bystander.longest_s:.3f} s of {took_s:.1f}"
        await bystander.leave()
        await channel.close()
    await other.stop()
