"""What penalties ask of a context: its distinct ids, and how often each stands in the output.

Counted once per token as a sequence grows, not anew for every step. Penalties look at each id by itself, so the order
in which ids were first seen decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class TokenCounts:
    """Of one sequence's known tokens."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._ids = np.empty(64, np.int64)
        self._times = np.zeros(64, np.float32)
        self._num_counted = 0

    def catch_up(self, known_token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Count what was appended since the last call; earlier tokens and the prompt's length never change."""
        start = self._num_counted
        for position, token_id in enumerate(known_token_ids[start:], start):
            self._count(token_id, position >= num_prompt_tokens)
        self._num_counted = len(known_token_ids)

    def with_draft(self, draft: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Distinct ids int64 [N], and how often each stands in the output and in the draft, float32 [N]."""
        num_own = len(self._places)
        ids, times = self._ids[:num_own], self._times[:num_own]
        if not draft:
            return ids, times
        new = [token_id for token_id in dict.fromkeys(draft) if token_id not in self._places]
        places = {token_id: num_own + at for at, token_id in enumerate(new)}
        ids = np.concatenate([ids, np.array(new, np.int64)])
        times = np.concatenate([times, np.zeros(len(new), np.float32)])
        for token_id in draft:
            times[places[token_id] if token_id in places else self._places[token_id]] += 1
        return ids, times

    def _count(self, token_id: int, is_output: bool) -> None:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._times = np.concatenate([self._times, np.zeros_like(self._times)])
        self._ids[place] = token_id
        self._times[place] += is_output


def count_tokens(known_token_ids: Sequence[int], num_prompt_tokens: int) -> TokenCounts:
    """The counts of these."""
    counts = TokenCounts()
    counts.catch_up(known_token_ids, num_prompt_tokens)
    return counts
