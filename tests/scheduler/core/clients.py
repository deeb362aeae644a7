"""The clients of a simulated cell: what each has received, compared with the oracle as it arrives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler.core.sequence import RequestSpec
from scheduler.core.step import Failure, Refusal, RefusalKind, Update
from tests.scheduler.core.model_worker import Params, expected_output, prompt_logprob


@dataclass
class Client:
    """What one request has received so far."""

    spec: RequestSpec
    tokens: dict[int, list[int]]
    finish: dict[int, int] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    failure: Refusal | None = None
    prompt_logprobs: list[object] = field(default_factory=list)
    crashes: dict[int, int] = field(default_factory=dict)
    """crashes in a row that each choice was part of, as far as it was told, without a token since"""

    @property
    def open_choices(self) -> list[int]:
        """Choices that still await something."""
        if self.failure is not None:
            return []
        return [one for one in self.tokens if one not in self.finish and one not in self.cancelled]


class Clients:
    """All clients by request key."""

    def __init__(self, capacity_wait_s: float) -> None:
        self.capacity_wait_s = capacity_wait_s
        self.by_key: dict[object, Client] = {}
        self.delivered = 0
        """tokens received from the present scheduler"""
        self.progressed: set[tuple[object, int]] = set()
        """choices that received a token since somebody looked"""
        self.news: list[Update | Failure] = []
        """whatever was told, for a reader of scenarios"""

    def __getitem__(self, key: object) -> Client:
        return self.by_key[key]

    def add(self, spec: RequestSpec) -> None:
        """A request was taken in."""
        self.by_key[spec.key] = Client(spec, {index: list(emitted) for index, emitted in spec.choices})

    @property
    def live(self) -> dict[object, Client]:
        """Those that still await something."""
        return {key: client for key, client in self.by_key.items() if client.open_choices}

    def take(self, news: Iterable[Update | Failure], now: float) -> None:
        """News from the scheduler. Asserts that each is what its client must get next."""
        for item in news:
            self.news.append(item)
            if isinstance(item, Failure):
                self._take_failure(item, now)
            else:
                self._take_update(item)

    def _take_update(self, update: Update) -> None:
        sequence = update.sequence
        spec = sequence.request.spec
        client = self.by_key[spec.key]
        choice = sequence.choice
        assert choice in client.open_choices, f"{spec.key!r}/{choice} gets news after its end"
        if update.prompt_logprobs:
            assert spec.wants_prompt_logprobs
            assert update.first_prompt_position == len(client.prompt_logprobs), "prompt log-probabilities jump"
            client.prompt_logprobs += update.prompt_logprobs
            assert client.prompt_logprobs == [
                prompt_logprob(spec.prompt_token_ids, position) for position in range(len(client.prompt_logprobs))
            ]
        if not update.token_ids:
            assert not update.finish
            if not update.prompt_logprobs:
                assert sequence.crashes == client.crashes.get(choice, 0) + 1, "news without anything new"
                client.crashes[choice] = sequence.crashes
            return
        client.crashes.pop(choice, None)
        tokens = client.tokens[choice]
        assert update.first_index == len(tokens), (
            f"index {update.first_index} after {len(tokens)}: {spec.key!r}/{choice}"
        )
        tokens += update.token_ids
        self.delivered += len(update.token_ids)
        self.progressed.add((spec.key, choice))
        assert sequence.limit is not None
        if spec.max_tokens is not None:
            assert sequence.limit == len(spec.prompt_token_ids) + spec.max_tokens
        whole, finish = self.expected(spec, choice, sequence.limit)
        assert tokens == whole[: len(tokens)], f"{spec.key!r}/{choice}: {tokens} instead of {whole}"
        assert update.finish == (finish if len(tokens) == len(whole) else 0)
        if update.finish:
            client.finish[choice] = update.finish
            if spec.wants_prompt_logprobs and choice == spec.choices[0][0]:
                assert len(client.prompt_logprobs) == len(spec.prompt_token_ids)

    def _take_failure(self, failure: Failure, now: float) -> None:
        client = self.by_key[failure.request.spec.key]
        kind = failure.refusal.kind
        assert client.open_choices, "a request fails after its end"
        if kind is RefusalKind.DEADLINE:
            assert client.spec.deadline is not None
            assert client.spec.deadline <= now
        elif kind is RefusalKind.NO_WORKER:
            assert client.spec.deadline is None
            assert now - failure.request.submitted_at >= self.capacity_wait_s
        elif kind is RefusalKind.INVALID:
            assert not any(client.tokens.values()), "a stream that had begun is refused"
            assert not client.spec.resumed
        else:
            assert kind is RefusalKind.POISON
        client.failure = failure.refusal

    @staticmethod
    def expected(spec: RequestSpec, choice: int, limit: int) -> tuple[list[int], int]:
        """The oracle's output of a choice."""
        assert isinstance(spec.params, Params)
        max_tokens = limit - len(spec.prompt_token_ids)
        return expected_output(spec.prompt_token_ids, spec.seed, choice, spec.params.stop, max_tokens)
