"""The live requests: for each one everything that is needed to resume it anywhere, and where its output goes.

A request lives from registration to `remove`. It has a handle per submission, so that whatever still arrives for an
earlier one finds nobody. States of a submission:

    waiting ──written to the session──▶ sent ──session lost, or an index gap──▶ waiting (attempt + 1)
"""

from __future__ import annotations

import asyncio
import enum
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.errors import AlreadyExists, TandemError
from gateway.admission import Sampling
from gateway.streams import ChoiceStream, Delta, IndexGap, OutputNews

MESSAGE_ENTRIES = 16_384
"""Token ids and (log-)probabilities in a message to a client; below the 4 MiB that clients take unless told otherwise,
however much has been waiting for a slow one."""
# A healthy scheduler never leaves a gap; one that keeps doing so won't get better.
MAX_GAPS = 3


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What never changes about a request."""

    request_id: str
    model: str
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    seed: int
    priority: int
    client: str
    cache_salt: str
    speculation_mode: int
    max_draft_tokens: int | None
    deadline: float | None
    """On the event loop's clock, in seconds."""


@dataclass(frozen=True, slots=True)
class UsageCounts:
    """What a request took, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    resumptions: int


class Reaction(enum.Enum):
    """What the session has to do after news."""

    NONE = "none"
    CANCEL_CHOICE = "cancel choice"
    RESUBMIT = "resubmit"


class LiveRequest:
    """One request with its choices. Owned by the event loop; `on_news` goes to whoever serves its client."""

    def __init__(self, spec: RequestSpec, choices: Sequence[ChoiceStream], arrived: float) -> None:
        self.spec = spec
        self.choices = list(choices)
        self.arrived = arrived
        """On the event loop's clock."""
        self.handle = 0
        self.attempt = 0
        self.cell = ""
        """Whose session has it; empty where there is only one."""
        self.sent = False
        """Whether the current attempt was written to a session."""
        self.error: TandemError | None = None
        self.prompt_logprobs: list[Any] = []
        self.on_news: Callable[[], None] = lambda: None
        """Called when there is something to take, or nothing more will come; see `announce`."""
        self._has_news = False
        self.last_token_at: float | None = None
        self._cached_tokens: int | None = None
        self._num_gaps = 0
        self._crashes: dict[int, int] = {}
        self._prompt_logprobs_taken = False
        self.held_back = False
        """whether the last `take` left tokens for the next one"""
        alternatives = spec.sampling.top_logprobs
        per_token = 1 if alternatives is None else 2 + alternatives
        self._most_tokens = max(1, MESSAGE_ENTRIES // (per_token * max(1, len(self.choices))))

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        if self.error is not None:
            return True
        for choice in self.choices:  # noqa: SIM110 - asked for every token, and a generator costs more than the answer
            if choice.finish is None:
                return False
        return True

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt are still incomplete."""
        if self.spec.sampling.prompt_logprobs is None:
            return False
        return len(self.prompt_logprobs) < len(self.spec.prompt_token_ids)

    @property
    def resumptions(self) -> int:
        """Times choices of this request were taken up again."""
        return sum(choice.resumptions for choice in self.choices)

    @property
    def crashes(self) -> int:
        """Crashes of workers in a row that a choice still running was part of, without a token of it since."""
        running = (choice.index for choice in self.choices if choice.finish is None)
        return max((self._crashes.get(index, 0) for index in running), default=0)

    def usage(self) -> UsageCounts:
        """What the request has taken so far."""
        return UsageCounts(
            prompt_tokens=len(self.spec.prompt_token_ids),
            completion_tokens=sum(len(choice.tokens) for choice in self.choices),
            cached_tokens=self._cached_tokens or 0,
            drafted_tokens=sum(choice.drafted_tokens for choice in self.choices),
            accepted_tokens=sum(choice.accepted_tokens for choice in self.choices),
            resumptions=self.resumptions,
        )

    def fail(self, error: TandemError) -> None:
        """End the request; what is pending is still delivered first. The first error counts."""
        if not self.finished:
            self.error = error
            self._has_news = True
            self.announce()

    def accept(self, news: OutputNews) -> tuple[Reaction, int]:
        """Take news of one choice; returns what to do, and how many new tokens counted. `announce` is to follow."""
        if self.finished or news.choice >= len(self.choices):
            return Reaction.NONE, 0
        choice = self.choices[news.choice]
        was_running = choice.finish is None
        try:
            self._accept_prompt_logprobs(news)
            num_new = choice.accept(news)
        except IndexGap:
            self._num_gaps += 1
            return Reaction.RESUBMIT, 0
        if num_new:
            self._num_gaps = 0
            if self._crashes:
                self._crashes.pop(news.choice, None)
        if news.crashes:
            self._crashes[news.choice] = news.crashes
        if self._cached_tokens is None and (news.token_ids or news.reason is not None):
            self._cached_tokens = news.cached_tokens
        if choice.has_pending or news.prompt_logprobs:
            self._has_news = True
        stopped_here = was_running and choice.finish is not None and news.reason is None
        return (Reaction.CANCEL_CHOICE if stopped_here else Reaction.NONE), num_new

    def announce(self) -> None:
        """Tell who serves the client, once for all that was accepted since the last time."""
        if self._has_news:
            self._has_news = False
            self.on_news()

    @property
    def gapped_too_often(self) -> bool:
        """Whether resubmitting has not helped against gaps."""
        return self._num_gaps > MAX_GAPS

    def take(self, bounded: bool = True) -> list[Delta]:
        """The pending deltas of all choices; none while the first message must still wait for the prompt's.

        `bounded`: as much as goes into a message; `held_back` says whether there is more.
        """
        if self.wants_prompt_logprobs and not self.finished:
            return []
        most = self._most_tokens if bounded else None
        deltas = [delta for choice in self.choices if (delta := choice.take(most)) is not None]
        self.held_back = False
        for delta in deltas:
            if len(delta.token_ids) == most and self.choices[delta.index].has_pending:
                self.held_back = True
        return deltas

    def take_prompt_logprobs(self) -> list[Any]:
        """The prompt's log-probabilities, once."""
        if self._prompt_logprobs_taken:
            return []
        self._prompt_logprobs_taken = True
        return self.prompt_logprobs

    def _accept_prompt_logprobs(self, news: OutputNews) -> None:
        if not news.prompt_logprobs or not self.wants_prompt_logprobs:
            return
        known = len(self.prompt_logprobs)
        if news.first_prompt_position > known:
            raise IndexGap(f"prompt: {known} positions known, {news.first_prompt_position} came next")
        self.prompt_logprobs += news.prompt_logprobs[known - news.first_prompt_position :]


class RequestTable:
    """All live requests of this gateway."""

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._by_handle: dict[int, LiveRequest] = {}
        self._handles = itertools.count(1)
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[LiveRequest]:
        """Every registered request, the oldest submission first."""
        return iter(list(self._by_handle.values()))

    def reserve(self, request_id: str) -> None:
        """Take an id for a request that is being prepared. Raises AlreadyExists if it is taken."""
        if request_id in self._ids:
            raise AlreadyExists("request", request_id, "a live request has this request_id")
        self._ids.add(request_id)
        self._idle.clear()

    def add(self, request: LiveRequest) -> None:
        """Register a request whose id is reserved, and give it its first handle."""
        request.handle = next(self._handles)
        self._by_handle[request.handle] = request

    def renew(self, request: LiveRequest) -> None:
        """A new handle, and a new attempt if the last one was sent; earlier submissions are deaf from now on."""
        self._by_handle.pop(request.handle, None)
        request.handle = next(self._handles)
        self._by_handle[request.handle] = request
        if request.sent:
            request.attempt += 1
            for choice in request.choices:
                if choice.finish is None:
                    choice.new_submit(resumed=True)
        request.sent = False

    def release(self, request_id: str, request: LiveRequest | None) -> None:
        """Forget a request, or a reservation that came to nothing. Idempotent."""
        if request is not None and self._by_handle.get(request.handle) is request:
            del self._by_handle[request.handle]
        self._ids.discard(request_id)
        if not self._ids:
            self._idle.set()

    def find(self, handle: int) -> LiveRequest | None:
        """The request whose current submission has this handle."""
        return self._by_handle.get(handle)

    def is_current(self, request: LiveRequest) -> bool:
        """Whether the request is still live."""
        return self._by_handle.get(request.handle) is request

    async def wait_idle(self) -> None:
        """Return once no request is live."""
        await self._idle.wait()
