"""The examples, run against a real cluster, and what clients written by others find through reflection.

Every language asks the same two questions; the expected text is the harness's own, of the fake engine in a plain loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from google.protobuf import descriptor_pb2
from tandem.v1 import generation_pb2, types_pb2

from cli.fake_model import ASSISTANT_ID, BOS_ID, EOS_ID, USER_ID
from tests.integration.harness import Cluster, expected_tokens, running

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
NODE = EXAMPLES / "node"
SERVICE = "tandem.v1.GenerationService"
NUM_TOKENS = 32


@dataclass(frozen=True)
class Done:
    """A program that ran to its end."""

    status: int
    output: str
    errors: str


async def run(*command: str | Path, folder: Path = ROOT, timeout_s: float = 60.0) -> Done:
    child = await asyncio.create_subprocess_exec(
        *map(str, command), cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        output, errors = await asyncio.wait_for(child.communicate(), timeout_s)
    except TimeoutError:
        raise AssertionError(f"{' '.join(map(str, command))} took longer than {timeout_s} s") from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    assert child.returncode is not None
    return Done(child.returncode, output.decode(), errors.decode())


def texts(tokens: list[int]) -> str:
    assert EOS_ID not in tokens, "the answer would end before it is long enough"
    return bytes(tokens).decode()


@pytest.fixture(scope="module")
def once() -> str:
    """The answer to "Once upon a time" at temperature 0.7 with seed 1."""
    return texts(expected_tokens(list(b"Once upon a time"), NUM_TOKENS, seed=1, temperature=0.7))


@pytest.fixture(scope="module")
def sky() -> str:
    """The answer to "Why is the sky blue?", as a chat, at temperature 0."""
    return texts(expected_tokens([BOS_ID, USER_ID, *b"Why is the sky blue?", ASSISTANT_ID], NUM_TOKENS))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: Any) -> AsyncIterator[Cluster]:
    """Slow enough that a second is not enough for a whole context."""
    async with running(tmp_path_factory.mktemp("cluster"), num_blocks=512, fake_step_ms=2) as started:
        yield started


def address(cluster: Cluster) -> str:
    return cluster.processes["gateway"].address


async def check_output(done: Done, cluster: Cluster, once: str, sky: str) -> None:
    """What every example prints, whatever its language."""
    assert done.status == 0, done.errors
    unary, chat, *rest = done.output.splitlines()
    quoted = unary.removeprefix("unary: ")
    assert (quoted[1:-1] if quoted[0] == "'" else json.loads(quoted)) == once
    assert chat == f"chat: {sky}"
    assert [line.replace("DeadlineExceeded", "DEADLINE_EXCEEDED") for line in rest] == [
        f"usage: 23 prompt tokens, {NUM_TOKENS} completion tokens",
        "deadline: DEADLINE_EXCEEDED after some tokens",
        "cancelled after 5 tokens or a few more",
        "error: INVALID_ARGUMENT INVALID_FIELD sampling.temperature: must be at least 0, not -1",
    ]
    await cluster.assert_baseline()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", ["typed_client.py", "plain_grpc.py"])
async def test_python(cluster: Cluster, once: str, sky: str, name: str) -> None:
    done = await run(sys.executable, EXAMPLES / "python" / name, address(cluster))
    await check_output(done, cluster, once, sky)


@pytest.mark.asyncio(loop_scope="module")
async def test_what_the_page_shows(cluster: Cluster, grpcurl: str, once: str) -> None:
    """The code on docs/calling.md, as it stands there but for the address; most of it has no seed."""
    page = (ROOT / "docs" / "calling.md").read_text("utf-8").replace("127.0.0.1:50051", address(cluster))
    programs = re.findall(r"^```(python|bash)\n(.*?)^```", page, re.M | re.S)
    (_, typed), (_, stubs), (_, tool) = programs
    done = await run(sys.executable, "-c", typed)
    assert done.status == 0, done.errors
    assert done.output.startswith(once)
    done = await run(sys.executable, "-c", stubs)
    assert done.status == 0, done.errors
    done = await run("sh", "-c", tool.replace("grpcurl", grpcurl))
    assert done.status == 0, done.errors
    assert json.loads(done.output)["choices"][0]["finish_reason"] in ("FINISH_REASON_STOP", "FINISH_REASON_LENGTH")


@pytest.mark.asyncio(loop_scope="module")
async def test_node(cluster: Cluster, once: str, sky: str) -> None:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed")
    lock, installed = NODE / "package-lock.json", NODE / "node_modules" / ".package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < lock.stat().st_mtime:
        flags = ["--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline", "--fetch-retries=1"]
        flags.append(f"--cache={ROOT / '.cache' / 'npm'}")
        got = await run(npm, "ci", *flags, folder=NODE)
        assert got.status == 0, f"npm ci failed:\n{got.output}{got.errors}"
    await check_output(await run(node, NODE / "client.mjs", address(cluster)), cluster, once, sky)


@pytest.fixture
def grpcurl() -> str:
    """The tool, from the development packages or the system."""
    beside = Path(sys.executable).parent / "grpcurl"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("grpcurl")
    if found is None:
        pytest.skip("grpcurl is not installed; its package is for Linux on x86-64 only")
    return found


@pytest.mark.asyncio(loop_scope="module")
async def test_grpcurl_script(
    cluster: Cluster, grpcurl: str, once: str, sky: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.path.dirname(grpcurl), prepend=os.pathsep)
    done = await run(EXAMPLES / "grpcurl" / "calls.sh", address(cluster))
    assert done.status == 0, done.errors
    _, serves, whole, stream, error = done.output.split("\n# ")
    assert json.loads(body(serves)) == {"status": "SERVING"}
    assert json.loads(body(whole))["choices"][0]["text"] == once
    messages = json_values(body(stream))
    assert "".join(delta["text"] for message in messages for delta in message["deltas"]) == sky
    assert messages[-1]["usage"]["completion_tokens"] == NUM_TOKENS
    # grpcurl prints errors on stderr, and ends with 64 + the code.
    assert "exit status 67" in error
    status = json.loads(done.errors)
    details = {detail.pop("@type").split(".")[-1]: detail for detail in status["details"]}
    assert details["ErrorInfo"]["domain"] == "tandem"
    assert details["BadRequest"]["field_violations"][0]["field"] == "sampling.temperature"


@pytest.mark.asyncio(loop_scope="module")
async def test_grpcurl_finds_the_whole_api(cluster: Cluster, grpcurl: str, tmp_path: Path) -> None:
    """What it writes down of the gateway's own description is what the protos say, comments left out."""
    methods = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].methods_by_name
    listed = await run(grpcurl, "-plaintext", address(cluster), "list", SERVICE)
    assert listed.output.split() == sorted(f"{SERVICE}.{method}" for method in methods)
    saved = tmp_path / "api.protoset"
    described = await run(grpcurl, "-plaintext", "-protoset-out", saved, address(cluster), "describe", SERVICE)
    assert described.status == 0, described.errors
    files = {file.name: file for file in descriptor_pb2.FileDescriptorSet.FromString(saved.read_bytes()).file}
    for module in (generation_pb2, types_pb2):
        expected = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(expected)
        assert files[expected.name] == expected
    admin = await run(grpcurl, "-plaintext", cluster.scheduler, "tandem.v1.AdminService/GetStatus")
    assert json.loads(admin.output)["workers"][0]["state"] == "WORKER_STATE_SERVING"


@pytest.mark.asyncio(loop_scope="module")
async def test_grpc_requests(cluster: Cluster, once: str, sky: str) -> None:
    """A client that knows nothing but the address."""
    grpc_requests = pytest.importorskip("grpc_requests")

    def calls() -> tuple[Any, list[Any]]:
        client = grpc_requests.Client(address(cluster))
        assert SERVICE in client.service_names
        service = client.service(SERVICE)
        stop = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
        text = {"text": "Once upon a time", "sampling": {"temperature": 0.7, "seed": 1}, "stop": stop}
        question = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
        chat = {"chat": question, "sampling": {"temperature": 0}, "stop": stop}
        return service.Generate(text), list(service.GenerateStream(chat))

    whole, messages = await asyncio.to_thread(calls)
    assert whole["choices"][0]["text"] == once
    assert "".join(delta["text"] for message in messages for delta in message["deltas"]) == sky


def body(section: str) -> str:
    """What follows a section's title."""
    return section.split("\n", 1)[1]


def json_values(text: str) -> list[Any]:
    """JSON values, one after the other."""
    decoder, values = json.JSONDecoder(), []
    text = text.lstrip()
    while text:
        value, end = decoder.raw_decode(text)
        values.append(value)
        text = text[end:].lstrip()
    return values
