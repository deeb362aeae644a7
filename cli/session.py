"""The client that a command talks through, and the JSON forms of what it answers."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from cli.arguments import targets
from tandem_client import Choice, Chunk, Generation, RetryPolicy, SyncTandemClient, TandemClient

# Somebody waits at the terminal: hear within a second that nobody is there, but sit out a gateway's restart.
_POLICY = RetryPolicy(max_first_attempts=4)


def client(args: argparse.Namespace) -> TandemClient:
    """The client of a command line."""
    return TandemClient(*targets(args), retry=_POLICY, timeout_s=args.timeout_s)


def sync_client(args: argparse.Namespace) -> SyncTandemClient:
    """The same without an event loop."""
    return SyncTandemClient(*targets(args), retry=_POLICY, timeout_s=args.timeout_s)


def answer_json(answer: Generation, num_choices: int) -> dict[str, Any]:
    """A whole answer; the first choice lies at the top level, `choices` comes with more than one."""
    form: dict[str, Any] = {
        "request_id": answer.request_id,
        "model": answer.model,
        **_choice_json(answer.choices[0]),
        "usage": dataclasses.asdict(answer.usage),
        "seed": answer.seed,
    }
    del form["index"]
    if num_choices > 1:
        form["choices"] = [_choice_json(choice) for choice in answer.choices]
    if answer.prompt_logprobs:
        form["prompt_logprobs"] = [dataclasses.asdict(position) for position in answer.prompt_logprobs]
    return form


def chunk_json(chunk: Chunk) -> dict[str, Any]:
    """One message of a stream."""
    form: dict[str, Any] = {
        "request_id": chunk.request_id,
        "deltas": [_without_unset(dataclasses.asdict(delta)) for delta in chunk.deltas],
        "seed": chunk.seed,
    }
    if chunk.prompt_logprobs:
        form["prompt_logprobs"] = [dataclasses.asdict(position) for position in chunk.prompt_logprobs]
    if chunk.usage is not None:
        form["usage"] = dataclasses.asdict(chunk.usage)
    return form


def _choice_json(choice: Choice) -> dict[str, Any]:
    return _without_unset(dataclasses.asdict(choice))


def _without_unset(form: dict[str, Any]) -> dict[str, Any]:
    """Without what was not asked for; the core of an answer is always there."""
    optional = ("stop_string", "stop_token_id", "logprobs", "prompt_text")
    return {name: value for name, value in form.items() if name not in optional or value not in (None, (), "")}
