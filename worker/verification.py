"""Accept-iff-equal: which of a row's sampled tokens are emitted.

A row with the draft d_1 … d_k has k + 1 sampled tokens y_1 … y_{k+1}. y_j was sampled with the history known + d_1 …
d_{j-1}, so it is plain decoding's token exactly as long as the draft before it was right:

    draft      d1 d2 d3 d4
    sampled    d1 d2  x  ·  ·        emitted: d1 d2 x      accepted: 2
    sampled    d1 d2 d3 d4  b        emitted: all five     accepted: 4, b is the bonus

Whatever the draft is, what is emitted is what plain decoding would have emitted. The run is then cut after its first
stop token and at the sequence's length limit, as plain decoding would have been.
"""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Seq
from typing import NamedTuple

from worker.steps import Finish


class Verdict(NamedTuple):
    """The outcome of one sampling row."""

    num_emitted: int
    """the first so many sampled tokens are emitted"""
    num_accepted: int
    """emitted tokens that the draft had right"""
    finish: Finish


def verify(draft: Seq[int], sampled: Seq[int], stop_token_ids: Container[int], max_new_tokens: int) -> Verdict:
    """Judge one row; sampled has len(draft) + 1 tokens and max_new_tokens, what the limits leave, is at least 1."""
    num_draft = len(draft)
    accepted = 0
    while accepted < num_draft and sampled[accepted] == draft[accepted]:
        if sampled[accepted] in stop_token_ids or accepted + 1 >= max_new_tokens:
            break
        accepted += 1
    # sampled[accepted] is the last one emitted: a mismatch, the bonus, or an accepted one that ends the sequence.
    last = sampled[accepted]
    emitted = accepted + 1
    if accepted < num_draft and last == draft[accepted]:
        accepted += 1
    return Verdict(emitted, accepted, finish_after(last, emitted, stop_token_ids, max_new_tokens))


def finish_after(last: int, num_emitted: int, stop_token_ids: Container[int], max_new_tokens: int) -> Finish:
    """Whether the last of so many tokens ends the sequence; a row without a draft needs no more of a verdict."""
    if last in stop_token_ids:
        return Finish.STOP
    return Finish.LENGTH if num_emitted >= max_new_tokens else Finish.NOT
