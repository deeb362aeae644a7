"""The gateway as a process, and what must not happen to its event loop."""

from __future__ import annotations

import asyncio
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tandem.v1 import generation_pb2, generation_pb2_grpc, scheduler_pb2_grpc

from cluster import errors
from cluster.server import create_server
from gateway.__main__ import main
from gateway.admission import Ask, ModelFacts
from gateway.intake import Caller, Intake
from gateway.text import ModelText
from gateway.text_workers import TextWorkers

from .calls import LENGTH, ask, collect, failure, joined
from .conftest import CHAT_TEMPLATE, Connection, ScriptedScheduler, byte_level, write_folder


class Process:
    """A gateway process and its scripted scheduler."""

    def __init__(self, process: asyncio.subprocess.Process, address: str, metrics_port: int, connection: Connection):
        self.process = process
        self.address = address
        self.metrics_port = metrics_port
        self.connection = connection


@pytest.fixture
async def running(byte_text: ModelText) -> AsyncIterator[Process]:
    scripted = ScriptedScheduler()
    server = create_server()
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scripted, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    arguments = [f"--model=tiny={byte_text._folder}", f"--scheduler=127.0.0.1:{port}", "--port=0", "--metrics-port=0"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "gateway",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    async with asyncio.timeout(60):
        ready = (await process.stdout.readline()).decode().split()
        assert ready[:2] == ["READY", "gateway"]
        metrics_port = 0
        while not metrics_port:
            line = (await process.stderr.readline()).decode()
            metrics_port = int(dict(pair.split("=", 1) for pair in line.split() if "=" in pair).get("metrics_port", 0))
    yield Process(process, ready[2], metrics_port, await scripted.connection())
    if process.returncode is None:
        process.kill()
    await process.wait()
    await server.stop(0)


async def test_a_process_serves_without_torch_and_drains_on_sigterm(running: Process) -> None:
    async with grpc.aio.insecure_channel(running.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        chat = {"messages": [{"role": "user", "content": "x<|im_end|>"}]}
        call = stub.GenerateStream(generation_pb2.GenerateStreamRequest(chat=chat, sampling={"bad_words": ["no"]}))
        submit = await running.connection.submit()
        running.connection.emit(submit, b"abc")
        first = await call.read()

        maps = await asyncio.to_thread(Path(f"/proc/{running.process.pid}/maps").read_text)
        assert "tokenizers" in maps
        assert "torch" not in maps
        page = await asyncio.to_thread(_fetch, f"http://127.0.0.1:{running.metrics_port}/metrics")
        assert "tandem_gateway_requests_running 1.0" in page

        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="tiny"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        running.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        assert isinstance(await failure(stub.GenerateStream(ask())), errors.Unavailable)
        for index in range(3, 50):
            running.connection.emit(submit, b"z", index)
        running.connection.emit(submit, b"!", 50, finish_reason=LENGTH)
        assert joined([first, *await collect(call)])[0] == "abc" + "z" * 47 + "!"
    async with asyncio.timeout(15):
        assert await running.process.wait() == 0


async def test_reflection_knows_services_and_methods(running: Process) -> None:
    names = ["tandem.v1.GenerationService", "tandem.v1.GenerationService.GenerateStream", "grpc.health.v1.Health"]
    async with grpc.aio.insecure_channel(running.address) as channel:
        for version in ("v1", "v1alpha"):
            method = channel.stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            call = method([reflection_pb2.ServerReflectionRequest(file_containing_symbol=name) for name in names])
            answers = [answer async for answer in call]
            assert [answer.WhichOneof("message_response") for answer in answers] == ["file_descriptor_response"] * 3
        assert reflection_pb2_grpc


def _fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as page:
        return page.read().decode()


@pytest.mark.usefixtures("restored_process")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model NAME=FOLDER"),
        (["--model=m"], "NAME=FOLDER"),
        (["--model=m=/nowhere"], "config.json is missing"),
    ],
)
def test_what_is_wrong_at_start_is_told(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gateway", *arguments])
    with pytest.raises(SystemExit) as exit_:
        sys.exit(main())
    assert exit_.value.code != 0
    told = capsys.readouterr()
    assert message in told.err
    assert not told.out


async def test_a_long_prompt_does_not_hold_up_the_loop(tmp_path: Path) -> None:
    tokenizer = byte_level(400)
    text = ModelText("m", write_folder(tmp_path, tokenizer, chat_template=CHAT_TEMPLATE, bos_token="<s>"))
    facts = ModelFacts("m", text.vocab_size, 10_000_000, None, text.eos_token_ids, text.longest_token_bytes)
    long = "the quick brown fox jumps over the lazy dog " * 45_000  # 2 MB
    workers = TextWorkers()
    intake = Intake(workers, lambda: 1, max_prompt_bytes=8 << 20)
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.002)
            turns += 1

    counting = asyncio.create_task(count_turns())
    live = await intake.open(Ask(text=long), "r", text, facts, Caller("c", None, 0.0))
    counting.cancel()
    workers.close()
    assert len(live.spec.prompt_token_ids) > 200_000
    # A tokenizer call that keeps the interpreter's lock would leave the loop one or two turns.
    assert turns > 20


async def test_short_texts_do_not_wait_for_long_ones() -> None:
    workers = TextWorkers(num_threads=1)
    release = asyncio.Event()
    loop = asyncio.get_running_loop()

    def long() -> None:
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result()

    waiting = [asyncio.ensure_future(workers.run(1_000_000, long)) for _ in range(3)]
    assert await asyncio.wait_for(workers.run(10, len, "short"), 5) == 5
    assert not any(task.done() for task in waiting)
    release.set()
    await asyncio.gather(*waiting)
    workers.close()


async def test_big_messages_are_taken_or_refused_clearly(cell: Any) -> None:
    scheduler = await cell.scheduler.connection()
    # Beyond gRPC's own 4 MiB, and refused for what it is: too long for the model.
    error = await failure(cell.stub.GenerateStream(ask("x" * (5 * 2**20))))
    assert isinstance(error, errors.InvalidField)
    assert error.reason == "CONTEXT_LENGTH_EXCEEDED"
    error = await failure(cell.stub.Tokenize(generation_pb2.TokenizeRequest(text="x" * (9 * 2**20))))
    assert isinstance(error, errors.InvalidField)
    assert error.field == "text"
    assert error.metadata["max_prompt_bytes"] == str(8 * 2**20)
    call = cell.stub.GenerateStream(ask())
    scheduler.emit(await scheduler.submit(), b"ok", finish_reason=LENGTH)
    assert joined(await collect(call))[0] == "ok"


async def test_many_requests_leave_nothing_behind(cell: Any) -> None:
    scheduler = await cell.scheduler.connection()
    for number in range(300):
        call = cell.stub.GenerateStream(ask(f"{number}"))
        submit = await scheduler.submit()
        scheduler.emit(submit, b"ok", finish_reason=LENGTH)
        await collect(call)
    await cell.gateway.table.wait_idle()
    assert len(cell.gateway.table) == 0
    assert not list(cell.gateway.table)
    assert not cell.gateway.session._submits
    assert not cell.gateway.session._cancels
