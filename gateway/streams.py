"""One choice on its way from tokens to a client: order, text, stops, and what still waits to be sent. Pure.

    scheduler ──OutputNews──▶ accept() ──▶ detokenizer ──▶ stop matcher ──▶ pending ──take()──▶ client

Tokens carry their output index and are taken in order, each once: what is already known is dropped, a gap is refused.
Whatever a slow client has not taken waits and is merged, so a stream never holds more than its own output.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gateway.detokenizer import Detokenizer
from gateway.stop_strings import StopMatcher


class FinishReason(enum.Enum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a choice, and the string or token that ended it where the reason is STOP."""

    reason: FinishReason
    stop_string: str | None = None
    stop_token_id: int | None = None


class OutputNews(NamedTuple):
    """What the scheduler says of one choice. Log-probabilities and error are opaque here."""

    handle: int
    choice: int
    first_token_index: int = 0
    token_ids: Sequence[int] = ()
    logprobs: Sequence[Any] = ()
    reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: Any = None
    first_prompt_position: int = 0
    prompt_logprobs: Sequence[Any] = ()
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    resumptions: int = 0
    crashes: int = 0
    """in a row that the choice was part of, without a token since; 0: nothing new"""


@dataclass(slots=True)
class Delta:
    """What a client is told of one choice at once."""

    index: int
    text: str
    first_token_index: int
    token_ids: list[int]
    logprobs: list[Any]
    finish: Finish | None
    prompt_text: str


@dataclass(frozen=True, slots=True)
class StopRules:
    """When the gateway itself ends a choice, and how ends are shown."""

    strings: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()
    """Every id that ends a choice, end-of-sequence ids included unless they are ignored."""
    shown_token_ids: frozenset[int] = frozenset()
    """Those whose text is left in."""
    special_strings: Mapping[int, str] = field(default_factory=dict)
    """Stop strings that are spelt like a special token, which has no text to match."""
    include: bool = False
    min_tokens: int = 0


class IndexGap(Exception):
    """Tokens are missing between what is known and what came."""


class ChoiceStream:
    """One choice. `tokens` is all of its output that counts; it grows until `finish` is set."""

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stop: StopRules,
        token_text: Callable[[int], str] = lambda token_id: "",
        prompt_text: str = "",
    ) -> None:
        """`token_text(id)`: a token spelt as it is, special or not; `prompt_text`: shown with the first delta."""
        self.index = index
        self.tokens: list[int] = []
        self.finish: Finish | None = None
        self._detokenizer = detokenizer
        self._stop = stop
        self._matcher = StopMatcher(stop.strings, stop.include)
        self._token_text = token_text
        self._prompt_text = prompt_text
        self._num_taken = 0
        self._text: list[str] = []
        self._text_at: list[int] = []
        """tokens there were when each of these came"""
        self._logprobs: list[Any] = []
        self._finish_taken = False
        # Counters that arrive cumulative since the latest submit, and their sums over earlier submits.
        self._counts = [0, 0, 0]
        self._earlier = [0, 0, 0]

    # ---------------------------------------------------------------------------------------------- receive

    def accept(self, news: OutputNews) -> int:
        """Take news in; return how many new tokens counted. Raises IndexGap and then changes nothing."""
        if news.drafted_tokens or news.resumptions:
            counts = (news.drafted_tokens, news.accepted_tokens, news.resumptions)
            self._counts = [max(pair) for pair in zip(self._counts, counts, strict=True)]
        if self.finish is not None:
            return 0
        known = len(self.tokens)
        if news.first_token_index > known:
            raise IndexGap(f"choice {self.index}: {known} tokens known, {news.first_token_index} came next")
        skipped = known - news.first_token_index
        token_ids = news.token_ids[skipped:]
        logprobs = news.logprobs[skipped:]
        ends = news.reason is not None and news.first_token_index + len(news.token_ids) >= known
        for offset, token_id in enumerate(token_ids):
            is_stop_token = ends and news.stop_token_id == token_id and offset == len(token_ids) - 1
            self.tokens.append(token_id)
            if logprobs:
                self._logprobs += logprobs[offset : offset + 1]
            if is_stop_token:
                break
            self._feed(self._detokenizer.feed(token_id))
            if self.finish is not None:
                return len(self.tokens) - known
        if ends and news.reason is not None:
            self._end(news.reason, news.stop_token_id)
        return len(self.tokens) - known

    def restore(self, token_ids: Sequence[int], max_tokens: int) -> None:
        """Take in what a client already holds; none of it will be sent again. `max_tokens`: most the choice can have.

        Where the tokens already contain the choice's end, it is over, and what followed that end doesn't count.
        """
        for token_id in token_ids:
            self.tokens.append(token_id)
            if token_id in self._stop.token_ids and len(self.tokens) > self._stop.min_tokens:
                self._end(FinishReason.STOP, token_id)
            else:
                self._feed(self._detokenizer.feed(token_id))
            if self.finish is None and len(self.tokens) >= max_tokens:
                self._end(FinishReason.LENGTH, None)
            if self.finish is not None:
                break
        self._num_taken = len(self.tokens)
        self._text.clear()
        self._text_at.clear()
        if self.tokens:
            self._prompt_text = ""

    def new_submit(self, *, resumed: bool) -> None:
        """The request is submitted anew: counters start again; `resumed` counts as a resumption."""
        self._earlier = [earlier + count for earlier, count in zip(self._earlier, self._counts, strict=True)]
        self._counts = [0, 0, 0]
        self._earlier[2] += int(resumed)

    def _feed(self, text: str) -> None:
        armed = len(self.tokens) >= self._stop.min_tokens
        shown, match = self._matcher.feed(text, armed)
        if shown:
            self._show(shown)
        if match is not None:
            self.finish = Finish(FinishReason.STOP, stop_string=match.string)

    def _show(self, text: str) -> None:
        self._text.append(text)
        self._text_at.append(len(self.tokens))

    def _end(self, reason: FinishReason, stop_token_id: int | None) -> None:
        """The last token has come; text that was held back is text after all."""
        self._feed(self._detokenizer.finish())
        if self.finish is not None:
            return
        self._show(self._matcher.flush())
        special = None if stop_token_id is None else self._stop.special_strings.get(stop_token_id)
        if stop_token_id is not None and self._stop.include and stop_token_id in self._stop.shown_token_ids:
            self._show(self._detokenizer.feed(stop_token_id) or self._token_text(stop_token_id))
        if special is not None:
            self.finish = Finish(reason, stop_string=special)
        else:
            self.finish = Finish(reason, stop_token_id=stop_token_id)

    # ------------------------------------------------------------------------------------------------- send

    def take(self, most: int | None = None) -> Delta | None:
        """What has become known since the last take, as one delta, of `most` tokens at most; None if nothing has.

        Text comes with the token that completed it: who goes on from a delta's tokens elsewhere has all of their text.
        """
        first, known = self._num_taken, len(self.tokens)
        end = known if most is None else min(known, first + most)
        num_texts = len(self._text) if end == known else bisect_right(self._text_at, end)
        text = "".join(self._text[:num_texts])
        finish = self.finish if end == known and not self._finish_taken else None
        if not text and first == end and finish is None:
            return None
        logprobs, self._logprobs = self._logprobs[: end - first], self._logprobs[end - first :]
        delta = Delta(self.index, text, first, self.tokens[first:end], logprobs, finish, self._prompt_text)
        self._num_taken = end
        self._finish_taken = self._finish_taken or finish is not None
        del self._text[:num_texts], self._text_at[:num_texts]
        self._prompt_text = ""
        return delta

    @property
    def has_pending(self) -> bool:
        """Whether `take` would return a delta."""
        if self._num_taken < len(self.tokens) or any(self._text):
            return True
        return self.finish is not None and not self._finish_taken

    # ------------------------------------------------------------------------------------------------ usage

    @property
    def drafted_tokens(self) -> int:
        """Tokens drafted and verified so far."""
        return self._earlier[0] + self._counts[0]

    @property
    def accepted_tokens(self) -> int:
        """Drafted tokens that were right so far."""
        return self._earlier[1] + self._counts[1]

    @property
    def resumptions(self) -> int:
        """Times the choice was taken up again so far."""
        return self._earlier[2] + self._counts[2]
