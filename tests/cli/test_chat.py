"""The conversation loop, with a client that is told what to answer."""

from __future__ import annotations

import argparse
import io
from collections.abc import Generator, Sequence
from typing import Any, cast

import pytest
from rich.console import Console

from cli.__main__ import build_parser
from cli.chat import Conversation
from cluster.errors import Unavailable
from tandem_client import Chunk, Delta, Message, SyncTandemClient


class FakeClient:
    """Answers each question with the next of its pieces; an exception among them is raised."""

    def __init__(self, *answers: Sequence[str | BaseException]) -> None:
        self._answers = list(answers)
        self.asked: list[list[Message]] = []
        self.num_closed = 0

    def stream(self, messages: Sequence[Message], **options: Any) -> Generator[Chunk, None, None]:
        self.asked.append(list(messages))
        pieces = self._answers.pop(0)
        try:
            for index, piece in enumerate(pieces):
                if isinstance(piece, BaseException):
                    raise piece
                delta = Delta(index=0, text=piece, first_token_index=index, token_ids=(1,))
                yield Chunk(request_id="r", model="m", seed=1, deltas=(delta,))
        finally:
            self.num_closed += 1


def talk(monkeypatch: pytest.MonkeyPatch, client: FakeClient, lines: str, *flags: str) -> tuple[str, Conversation]:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    args: argparse.Namespace = build_parser().parse_args(["chat", *flags])
    output = io.StringIO()
    conversation = Conversation(cast(SyncTandemClient, client), Console(file=output, width=200), args)
    conversation.talk()
    return output.getvalue(), conversation


def test_the_whole_conversation_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient(["Hel", "lo [b]you[/b]"], ["Fine"])
    shown, _ = talk(monkeypatch, client, "hi\n\nhow are you\n/exit\nnever\n", "--system", "be nice")
    # Text is shown as it is, square brackets too.
    assert "Hello [b]you[/b]" in shown
    assert client.asked[1] == [
        Message("system", "be nice"),
        Message("user", "hi"),
        Message("assistant", "Hello [b]you[/b]"),
        Message("user", "how are you"),
    ]
    assert len(client.asked) == 2


def test_reset_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient(["a"], ["b"])
    talk(monkeypatch, client, "one\n/reset\ntwo\n")
    assert client.asked[1] == [Message("user", "two")]


def test_ctrl_c_stops_the_answer_only(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient(["half", KeyboardInterrupt()], ["whole"])
    shown, _ = talk(monkeypatch, client, "one\ntwo\n")
    assert "stopped" in shown
    assert client.num_closed == 2
    assert client.asked[1] == [Message("user", "one"), Message("assistant", "half"), Message("user", "two")]


def test_a_failed_question_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient([Unavailable("no [worker]")], ["fine"])
    shown, conversation = talk(monkeypatch, client, "one\ntwo\n")
    assert "UNAVAILABLE no [worker]" in shown
    assert conversation.messages == [Message("user", "two"), Message("assistant", "fine")]


def test_unknown_commands_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient()
    shown, _ = talk(monkeypatch, client, "/rest\n")
    assert "/reset" in shown
    assert client.asked == []
