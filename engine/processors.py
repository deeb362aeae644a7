"""What changes logits before the temperature, and what leaves tokens out after it.

Order: repetition penalty (prompt and output), presence and frequency penalty (output only), logit bias, bans (bad
words, and stop tokens before min_tokens); the sampler divides by the temperature; top-k, top-p, min-p. Everything
depends on one row alone. Penalties are numpy's on the host, one float32 operation after the other: a GPU would divide
by a number through its reciprocal, which rounds differently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine import portable
from engine.logprobs import likeliest
from engine.sampling_params import SamplingParams
from engine.token_counts import TokenCounts, count_tokens

BANNED = -math.inf
_WINDOWS = (128, 1024, 8192)  # how many of the likeliest to look at before all
_UNREACHED = 1 << 62


class SampleRow(NamedTuple):
    """One token to choose: the one that follows known_token_ids + draft_prefix."""

    params: SamplingParams
    seed: int
    """the choice's own"""
    output_index: int
    """of the token to choose, absolute, from 0"""
    known_token_ids: Sequence[int]
    """prompt and output so far"""
    num_prompt_tokens: int
    draft_prefix: Sequence[int] = ()
    """draft tokens taken as output before this position"""
    counts: TokenCounts | None = None
    """of known_token_ids, where a sequence keeps them; without, penalties count anew"""


class ChangedRow:
    """Float32 logits [V] of one row while some are overwritten; `restore` puts everything back."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits
        # numpy reads and writes a few hundred of them in a third of the time.
        self._numbers = logits.numpy() if logits.device.type == "cpu" else None
        self._before: list[tuple[np.ndarray, np.ndarray]] = []

    def read(self, ids: np.ndarray, source: str) -> np.ndarray:
        """Raises ValueError for an id outside the vocabulary; `source`: where ids are from."""
        vocab_size = len(self._logits)
        if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
            raise ValueError(f"{source}: token id outside the vocabulary of {vocab_size}")
        if self._numbers is not None:
            return self._numbers[ids]
        values: np.ndarray = self._logits[self._on_device(ids)].cpu().numpy()
        return values

    def write(self, ids: np.ndarray, values: np.ndarray, before: np.ndarray) -> None:
        """ids int64, distinct, that were `read`, and what that gave."""
        self._before.append((ids, before))
        self._put(ids, values)

    def restore(self) -> None:
        while self._before:
            self._put(*self._before.pop())

    def _put(self, ids: np.ndarray, values: np.ndarray) -> None:
        if self._numbers is not None:
            self._numbers[ids] = values
        else:
            self._logits[self._on_device(ids)] = torch.from_numpy(values).to(self._logits.device)

    def _on_device(self, ids: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(ids).to(self._logits.device)


def change_logits(logits: ChangedRow, row: SampleRow) -> None:
    """Apply everything before the temperature. Raises ValueError for an id outside the vocabulary."""
    params = row.params
    if params.penalises:
        _penalise(logits, row)
    if params.logit_bias:
        ids = np.array(list(params.logit_bias), np.int64)
        before = logits.read(ids, "logit_bias")
        logits.write(ids, before + np.array(list(params.logit_bias.values()), np.float32), before)
    banned = banned_token_ids(row)
    if banned:
        ids = np.array(sorted(banned), np.int64)
        before = logits.read(ids, "bad_words or stop_token_ids")
        logits.write(ids, np.full(len(ids), BANNED, np.float32), before)


def banned_token_ids(row: SampleRow) -> set[int]:
    """Ids that bad words and min_tokens forbid at this position."""
    banned: set[int] = set()
    if row.params.bad_words:
        longest = max(len(word) for word in row.params.bad_words) - 1
        suffix = _last(row, longest)
        for word in row.params.bad_words:
            start = len(suffix) - (len(word) - 1)
            if start >= 0 and suffix[start:] == list(word[:-1]):
                banned.add(word[-1])
    if row.output_index < row.params.min_tokens:
        banned |= row.params.stop_token_ids
    return banned


def kept_token_ids(scores: torch.Tensor, params: Sequence[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor]:
    """What top-k, top-p and min-p leave of float32 scores [N, V] = (l − max l) / T, as (row, token id) pairs.

    Each row keeps at least one. top_p keeps the first ids, by falling score and rising id, whose weights sum to top_p
    of all that top-k left; min_p compares with the likeliest. The sum is of integers, so its order can't matter.
    """
    vocab_size = scores.shape[1]
    nucleus = [row for row, wish in enumerate(params) if wish.top_p < 1 and _limit(wish, vocab_size) == vocab_size]
    totals = dict(zip(nucleus, _total_weights(scores, nucleus), strict=True))
    found = []
    open_rows = list(range(len(params)))
    for window in (*(size for size in _WINDOWS if size < vocab_size), vocab_size):
        at, ids, settled = _truncate(scores, params, totals, open_rows, window)
        found.append((at, ids))
        open_rows = [row for row, done in zip(open_rows, settled, strict=True) if not done]
        if not open_rows:
            break
    return torch.cat([at for at, _ in found]), torch.cat([ids for _, ids in found])


def _truncate(
    scores: torch.Tensor, params: Sequence[SamplingParams], totals: dict[int, int], rows: list[int], window: int
) -> tuple[torch.Tensor, torch.Tensor, list[bool]]:
    """The kept (row, id) pairs of those `rows` whose `window` likeliest ids hold all that is kept, and which these are.

    What a row keeps doesn't depend on the window that settles it.
    """
    vocab_size, device = scores.shape[1], scores.device
    chosen = [params[row] for row in rows]
    limits = [_limit(wish, vocab_size) for wish in chosen]
    at = torch.tensor(rows, device=device)
    some = scores if len(rows) == len(scores) else scores[at]
    ordered = likeliest(some, window)
    ranked = some.gather(-1, ordered)
    probabilities = portable.exp(ranked)
    kept = torch.arange(window, device=device) < torch.tensor(limits, device=device)[:, None]
    kept &= ranked > BANNED
    weights = portable.weights_of(probabilities) * kept
    reached = weights.cumsum(-1)
    ends = reached[:, -1].tolist()
    needed = [
        _share(wish.top_p, totals.get(row, end)) if wish.top_p < 1 else _UNREACHED
        for row, wish, end in zip(rows, chosen, ends, strict=True)
    ]
    kept &= reached - weights < torch.tensor(needed, device=device)[:, None]
    min_p = torch.tensor([wish.min_p for wish in chosen], dtype=torch.float32, device=device)[:, None]
    kept &= probabilities >= min_p
    likely_enough = (probabilities[:, -1:] >= min_p).flatten().tolist()
    settled = [
        limit <= window or (limit == vocab_size and (end >= need or not beyond))
        for limit, end, need, beyond in zip(limits, ends, needed, likely_enough, strict=True)
    ]
    kept &= torch.tensor(settled, device=device)[:, None]
    pairs = torch.nonzero(kept, as_tuple=True)
    return at[pairs[0]], ordered[pairs], settled


def _limit(params: SamplingParams, vocab_size: int) -> int:
    return params.top_k if 0 < params.top_k < vocab_size else vocab_size


def _share(top_p: float, total: int) -> int:
    """The least integer that is top_p of total or more, exactly."""
    numerator, denominator = float(top_p).as_integer_ratio()
    return -(-total * numerator // denominator)


def _total_weights(scores: torch.Tensor, rows: list[int]) -> list[int]:
    if not rows:
        return []
    some = scores if len(rows) == len(scores) else scores[rows]
    totals: list[int] = portable.weights_of(portable.exp(some)).sum(-1).tolist()
    return totals


def _penalise(logits: ChangedRow, row: SampleRow) -> None:
    params = row.params
    counts = row.counts or count_tokens(row.known_token_ids, row.num_prompt_tokens)
    ids, times = counts.with_draft(row.draft_prefix)
    before = values = logits.read(ids, "context")
    with np.errstate(over="ignore"):
        if params.repetition_penalty != 1:
            penalty = np.float32(params.repetition_penalty)
            values = np.where(values > 0, values / penalty, values * penalty)
        if params.presence_penalty or params.frequency_penalty:
            values = values - times * np.float32(params.frequency_penalty)
            values = values - np.where(times > 0, np.float32(params.presence_penalty), np.float32(0))
    logits.write(ids, values, before)


def _last(row: SampleRow, count: int) -> list[int]:
    """The last `count` tokens of the context, or all where it is shorter."""
    draft = list(row.draft_prefix)
    from_known = max(0, count - len(draft))
    known = list(row.known_token_ids[max(0, len(row.known_token_ids) - from_known) :])
    return (known + draft)[max(0, len(known) + len(draft) - count) :]
