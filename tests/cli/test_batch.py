"""Files of requests and answers, with a client that is told what to answer."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli import batch, session
from cli.__main__ import build_parser
from cli.failures import UsageError
from cluster.errors import InvalidField, Unavailable
from tandem_client import Choice, FinishReason, Generation, Message, Request, Usage


class FakeClient:
    """Answers with what the prompt says; "fail" fails, "lost" is UNAVAILABLE."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.running = 0
        self.most_running = 0
        self.stop_after: int | None = None

    async def __aenter__(self) -> FakeClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def generate(self, request: Request) -> Generation:
        if self.stop_after is not None and len(self.requests) >= self.stop_after:
            raise asyncio.CancelledError
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        if request.prompt == "fail":
            raise InvalidField("text", "is bad")
        if request.prompt == "lost":
            raise Unavailable("gone")
        choice = Choice(index=0, text=f"{request.prompt}!", token_ids=(1,), finish_reason=FinishReason.STOP)
        return Generation(request_id="r", model="m", seed=1, choices=(choice,), usage=Usage())


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    fake = FakeClient()
    monkeypatch.setattr(session, "client", lambda args: fake)
    return fake


Batch = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path, client: FakeClient) -> Batch:
    """Runs the command on in.jsonl and out.jsonl."""

    def run(*flags: str) -> int:
        arguments = ["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), *flags]
        args: argparse.Namespace = build_parser().parse_args(arguments)
        return batch.run(args)

    return run


def write(path: Path, *entries: Any) -> None:
    path.write_text("".join((json.dumps(entry) if not isinstance(entry, str) else entry) + "\n" for entry in entries))


def answers(folder: Path) -> dict[str, Any]:
    entries = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert len({entry["id"] for entry in entries}) == len(entries)
    return {entry["id"]: entry for entry in entries}


def test_each_line_is_answered_once(run: Batch, tmp_path: Path, client: FakeClient) -> None:
    write(tmp_path / "in.jsonl", {"id": "a", "prompt": "x"}, "", {"prompt": "y"}, {"id": 7, "token_ids": [1, 2]})
    assert run("--concurrency=2", "--max-tokens=9") == 0
    found = answers(tmp_path)
    assert set(found) == {"a", "line-3", "7"}
    assert (found["a"]["text"], found["a"]["finish_reason"]) == ("x!", "stop")
    assert {request.max_tokens for request in client.requests} == {9}
    # Again: all is done.
    assert run() == 0
    assert len(client.requests) == 3


def test_a_line_wins_over_the_flags(run: Batch, tmp_path: Path, client: FakeClient) -> None:
    messages = [{"role": "user", "content": "hi"}]
    write(
        tmp_path / "in.jsonl",
        {"messages": messages, "max_tokens": 3, "stop": "x", "logit_bias": {"5": 1.5}, "temperature": 0},
    )
    assert run("--max-tokens=9", "--temperature=1", "--seed=4") == 0
    (request,) = client.requests
    assert request.prompt == [Message("user", "hi")]
    assert (request.max_tokens, request.temperature, request.seed) == (3, 0, 4)
    assert (request.stop, request.logit_bias) == (["x"], {5: 1.5})


def test_errors_are_recorded_per_line_and_can_be_asked_again(run: Batch, tmp_path: Path, client: FakeClient) -> None:
    write(
        tmp_path / "in.jsonl", {"id": "a", "prompt": "fail"}, {"id": "b", "prompt": "ok"}, {"id": "c", "prompt": "lost"}
    )
    assert run() == 1
    found = answers(tmp_path)
    assert found["a"]["error"] == {
        "code": "INVALID_ARGUMENT",
        "reason": "INVALID_FIELD",
        "message": "text: is bad",
        "field": "text",
    }
    assert found["c"]["error"]["code"] == "UNAVAILABLE"
    assert found["b"]["text"] == "ok!"
    assert run() == 0
    assert len(client.requests) == 3
    assert run("--retry-errors") == 1
    assert sorted(str(request.prompt) for request in client.requests[3:]) == ["fail", "lost"]


def test_a_run_that_was_cut_off_goes_on(run: Batch, tmp_path: Path, client: FakeClient) -> None:
    write(tmp_path / "in.jsonl", *({"prompt": f"p{number}"} for number in range(20)))
    client.stop_after = 7
    with pytest.raises(asyncio.CancelledError):
        run("--concurrency=1")
    assert len(answers(tmp_path)) == 7
    # A crash in the middle of a write leaves half a line.
    with (tmp_path / "out.jsonl").open("a") as output:
        output.write('{"id": "line-8", "te')
    client.stop_after = None
    assert run("--concurrency=4") == 0
    assert set(answers(tmp_path)) == {f"line-{number}" for number in range(1, 21)}
    assert len(client.requests) == 20
    assert 1 < client.most_running <= 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Expecting"),
        ("[]", "line 2: not a JSON object"),
        ({"max_tokens": 1}, "line 2: needs one of prompt, token_ids, messages"),
        ({"prompt": "x", "token_ids": [1]}, "line 2: needs one of"),
        ({"prompt": "x", "temprature": 1}, "line 2: unknown temprature"),
        ({"prompt": "x", "max_tokens": "many"}, "line 2: "),
        ({"token_ids": [-1]}, "line 2: "),
        ({"messages": [{"role": "user"}]}, "line 2: messages"),
        ({"id": "first", "prompt": "x"}, "line 2: id 'first' is that of line 1"),
    ],
)
def test_a_bad_line_is_told_before_anything_is_sent(
    run: Batch, tmp_path: Path, client: FakeClient, line: Any, message: str
) -> None:
    write(tmp_path / "in.jsonl", {"id": "first", "prompt": "x"}, line)
    with pytest.raises(UsageError, match=message):
        run()
    assert client.requests == []


def test_a_foreign_output_is_left_alone(run: Batch, tmp_path: Path, client: FakeClient) -> None:
    write(tmp_path / "in.jsonl", {"prompt": "x"})
    write(tmp_path / "out.jsonl", {"something": "else"})
    with pytest.raises(UsageError, match="no answer of ours"):
        run()
    assert (tmp_path / "out.jsonl").read_text() == '{"something": "else"}\n'
