"""How flags become a request, and an answer JSON."""

from __future__ import annotations

import argparse
import io
import json
from typing import Any

import pytest

from cli import session
from cli.__main__ import build_parser
from cli.failures import UsageError
from cli.generate import prompt_of, request_options
from tandem_client import Choice, Chunk, Delta, FinishReason, Generation, Message, Request, Speculation, Usage


def parse(*flags: str) -> argparse.Namespace:
    return build_parser().parse_args(["generate", *flags])


@pytest.mark.parametrize(
    ("flags", "prompt"),
    [
        (["--prompt", "a b"], "a b"),
        (["--prompt", ""], ""),
        (["--token-ids", "1, 2,3 4"], [1, 2, 3, 4]),
        (["--chat", "hi"], [Message("user", "hi")]),
        (["--chat", "--prompt", "hi"], [Message("user", "hi")]),
        (["--chat", "hi", "--system", "s"], [Message("system", "s"), Message("user", "hi")]),
    ],
)
def test_prompts(flags: list[str], prompt: Any) -> None:
    assert prompt_of(parse(*flags)) == prompt


def test_a_prompt_from_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from\nstdin"))
    assert prompt_of(parse("--prompt", "-")) == "from\nstdin"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "one of"),
        (["--prompt", "a", "--token-ids", "1"], "one of"),
        (["--prompt", "a", "--chat", "b"], "one of"),
        (["--chat", "b", "--token-ids", "1"], "one of"),
        (["--prompt", "a", "--system", "s"], "--system"),
        (["--token-ids", "1,x"], "whole numbers"),
        (["--token-ids=-1"], "not negative"),
    ],
)
def test_prompts_that_make_no_sense(flags: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        prompt_of(parse(*flags))


def test_every_flag_reaches_the_request() -> None:
    """Each with a value of its own, so that two mixed up ones show."""
    args = parse(
        *("--prompt=x", "--model=m", "--request-id=r", "--n=2", "--priority=-3", "--echo", "--logprobs=4"),
        *("--prompt-logprobs=5", "--max-tokens=6", "--min-tokens=7", "--temperature=0.8", "--top-k=9", "--top-p=0.10"),
        *("--min-p=0.11", "--seed=12", "--repetition-penalty=1.3", "--presence-penalty=1.4", "--frequency-penalty=1.5"),
        *("--stop=16", "--stop=17", "--stop-token-id=18", "--bad-word=19", "--ignore-eos", "--include-stop"),
        *("--speculation=ngram", "--max-draft-tokens=20"),
    )
    assert Request(prompt="x", **request_options(args)) == Request(
        prompt="x",
        model="m",
        request_id="r",
        n=2,
        priority=-3,
        echo=True,
        logprobs=True,
        top_logprobs=4,
        prompt_logprobs=5,
        max_tokens=6,
        min_tokens=7,
        temperature=0.8,
        top_k=9,
        top_p=0.10,
        min_p=0.11,
        seed=12,
        repetition_penalty=1.3,
        presence_penalty=1.4,
        frequency_penalty=1.5,
        stop=["16", "17"],
        stop_token_ids=[18],
        bad_words=["19"],
        ignore_eos=True,
        include_stop=True,
        speculation=Speculation.NGRAM,
        max_draft_tokens=20,
    )


def test_no_speculation_is_off() -> None:
    assert request_options(parse("--prompt=x", "--no-speculation"))["speculation"] == "off"


def test_what_is_not_given_stays_unset() -> None:
    options = request_options(parse("--prompt=x"))
    assert {name for name, value in options.items() if value not in (None, [], "")} == set()
    zero = request_options(parse("--prompt=x", "--temperature=0", "--seed=0", "--logprobs"))
    assert (zero["temperature"], zero["seed"], zero["logprobs"], zero["top_logprobs"]) == (0.0, 0, True, None)


def test_the_json_of_an_answer() -> None:
    choices = tuple(
        Choice(index=index, text=f"t{index}", token_ids=(index,), finish_reason=FinishReason.STOP, stop_string="t")
        for index in range(2)
    )
    answer = Generation(request_id="r", model="m", seed=2**64 - 1, choices=choices, usage=Usage(prompt_tokens=1))
    one = json.loads(json.dumps(session.answer_json(answer, 1)))
    assert (one["text"], one["token_ids"], one["finish_reason"], one["stop_string"]) == ("t0", [0], "stop", "t")
    assert (one["seed"], one["usage"]["prompt_tokens"]) == (2**64 - 1, 1)
    assert "choices" not in one
    two = json.loads(json.dumps(session.answer_json(answer, 2)))
    assert [choice["text"] for choice in two["choices"]] == ["t0", "t1"]


def test_the_json_of_a_chunk() -> None:
    delta = Delta(index=0, text="a", first_token_index=3, token_ids=(7,))
    chunk = session.chunk_json(Chunk(request_id="r", model="m", seed=1, deltas=(delta,)))
    assert chunk == {
        "request_id": "r",
        "deltas": [{"index": 0, "text": "a", "first_token_index": 3, "token_ids": (7,), "finish_reason": None}],
        "seed": 1,
    }
