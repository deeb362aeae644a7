"""A client as the documentation tells clients to be: at one gateway, and at the next one with what it holds.

Everything that it receives is checked as it comes (each index once, in order, one usage), and every pause is noted.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import grpc
from tandem.v1 import generation_pb2_grpc

from cluster.channel import connect
from tests.chaos.loads import Ask

RETRY_S = 0.05
_PATIENT_S = 3600.0


@dataclass
class Answer:
    """What has come of one request, over as many calls as it took."""

    num_choices: int
    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    prompt_logprobs: list[Any] = field(default_factory=list)
    finish: dict[int, int] = field(default_factory=dict)
    usage: Any = None
    seed: int = 0
    calls: int = 0
    """that have brought something"""

    def take(self, response: Any, first: bool) -> None:
        """`first`: of its call."""
        self.seed = response.seed or self.seed
        self.calls += int(first)
        if response.prompt_logprobs and not self.prompt_logprobs:
            self.prompt_logprobs = [_spell(one) for one in response.prompt_logprobs]
        for delta in response.deltas:
            choice = delta.index
            assert choice < self.num_choices, f"choice {choice} was not asked for"
            tokens = self.tokens.setdefault(choice, [])
            if choice in self.finish:
                # A gateway that takes a stream over may say again that a choice is over, and nothing else.
                assert first, "news of a choice that had finished"
                assert not delta.token_ids, "tokens of a choice that had finished"
                continue
            if delta.token_ids:
                assert delta.first_token_index == len(tokens), (
                    f"choice {choice}: index {delta.first_token_index} came where {len(tokens)} was next"
                )
            tokens += delta.token_ids
            self.texts[choice] = self.texts.get(choice, "") + delta.text
            self.logprobs.setdefault(choice, []).extend(_spell(one) for one in delta.logprobs)
            if delta.finish_reason:
                self.finish[choice] = delta.finish_reason
        if response.HasField("usage"):
            assert self.usage is None, "usage came twice"
            assert len(self.finish) == self.num_choices, "usage came before every choice had ended"
            self.usage = response.usage

    def same_as(self, other: Answer) -> bool:
        """Whether both say the same, to the last bit of a log-probability."""
        return (
            (self.tokens, self.texts, self.finish, self.seed) == (other.tokens, other.texts, other.finish, other.seed)
            and self.logprobs == other.logprobs
            and self.prompt_logprobs == other.prompt_logprobs
        )

    @property
    def num_tokens(self) -> int:
        return sum(len(tokens) for tokens in self.tokens.values())


def _spell(position: Any) -> str:
    return str(position.SerializeToString(deterministic=True))


@dataclass(frozen=True, slots=True)
class Failure:
    """A call that ended with an error."""

    gateway: str
    code: str
    details: str
    held: int
    """tokens that the call itself had brought"""
    at: float


@dataclass
class Record:
    """One request from its first call to its end."""

    ask: Ask
    answer: Answer
    began: float
    ended: float = 0.0
    times: list[float] = field(default_factory=list)
    """when something came"""
    failures: list[Failure] = field(default_factory=list)

    def pauses(self) -> Iterator[tuple[float, float]]:
        """(from, to) of every wait for something to come."""
        return pairwise([self.began, *self.times, self.ended])

    def longest_pause_s(self, since: float, until: float) -> float:
        """Longest wait that lay in this span, or began in it; what was before it doesn't count."""
        spans = [(max(start, since), end) for start, end in self.pauses() if end > since and start < until]
        return max((end - start for start, end in spans), default=0.0)

    @property
    def resumptions(self) -> int:
        """Choices taken up again, by the usage's account or by a second call."""
        return int(self.answer.usage.resumptions) + (self.answer.calls - 1) * self.ask.n


class Gateways:
    """Connections to every gateway, with patience: a gateway that stands still is waited for."""

    def __init__(self, addresses: dict[str, str]) -> None:
        self.names = list(addresses)
        self._channels = {
            name: connect(address, keepalive_time_s=_PATIENT_S, keepalive_timeout_s=_PATIENT_S)
            for name, address in addresses.items()
        }

    def stub(self, name: str) -> Any:
        return generation_pb2_grpc.GenerationServiceStub(self._channels[name])

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()


OnProgress = Callable[[int], None]
"""told the number of tokens that the first choice has"""


async def run(gateways: Gateways, first: int, ask: Ask, on_progress: OnProgress = lambda count: None) -> Record:
    """Ask, beginning at gateway number `first`, until the whole answer is there. Raises for what no fault excuses."""
    record = Record(ask, Answer(ask.n), time.monotonic())
    message = ask.message()
    message.request_id = f"chaos-{uuid.uuid4().hex}"
    turn = first
    while record.answer.usage is None:
        name = gateways.names[turn % len(gateways.names)]
        before, new_call = record.answer.num_tokens, True
        _say_what_is_held(message, record.answer)
        try:
            async for response in gateways.stub(name).GenerateStream(message):
                record.answer.take(response, new_call)
                new_call = False
                record.times.append(time.monotonic())
                on_progress(len(record.answer.tokens.get(0, [])))
            if record.answer.usage is None:
                raise AssertionError(f"{name} ended the stream without usage and without an error")
        except grpc.aio.AioRpcError as error:
            held = record.answer.num_tokens - before
            code = error.code().name
            record.failures.append(Failure(name, code, error.details() or "", held, time.monotonic()))
            if code != "ALREADY_EXISTS":  # the cluster has not noticed yet that the first gateway is gone
                turn += 1
            await asyncio.sleep(RETRY_S)
    record.ended = time.monotonic()
    return record


def _say_what_is_held(message: Any, answer: Answer) -> None:
    del message.resume[:]
    for choice, tokens in answer.tokens.items():
        message.resume.add(index=choice, token_ids=tokens, seed=answer.seed)
