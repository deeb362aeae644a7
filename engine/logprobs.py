"""Log-probabilities of the model itself: before processors and temperature, in float32.

    logprob(v) = (l_v − max l) − log Σ exp(l − max l)

The sum is engine.portable's, so a number depends on its own position's logits alone. Tokens are ordered by falling
logit, equal ones by rising id; a rank is a place in that order, from 1. Nothing is below FLOOR, infinite or NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine import portable
from engine.kernels import cpp_choose

FLOOR = -9999.0
_NOT_FINITE = "the model's logits are not finite"
_CHUNK_ELEMENTS = 1 << 18


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One alternative at one position."""

    token_id: int
    logprob: float
    rank: int
    """from 1, the likeliest"""


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The token that stands at a position, and the likeliest ones, best first."""

    chosen: TokenLogprob | None
    """None for a prompt's first token, which nothing precedes"""
    top: tuple[TokenLogprob, ...]


def position_logprobs(logits: torch.Tensor, token_ids: Sequence[int], top: Sequence[int]) -> list[PositionLogprobs]:
    """One entry for each row of float32 logits [P, V]: its token and its `top` likeliest.

    Raises ValueError where a row has no finite maximum or holds NaN, and for an id outside the vocabulary.
    """
    num_rows, vocab_size = logits.shape
    if not len(token_ids) == len(top) == num_rows:
        raise ValueError(f"{num_rows} rows of logits, {len(token_ids)} token ids, {len(top)} counts")
    if any(not 0 <= token_id < vocab_size for token_id in token_ids):
        raise ValueError(f"a token id lies outside the vocabulary of {vocab_size}")
    if not num_rows:
        return []
    kernels = cpp_choose.kernels_for(logits)
    if kernels is not None:
        return _with_kernels(kernels, logits, token_ids, top)
    step = max(1, _CHUNK_ELEMENTS // vocab_size)
    entries: list[PositionLogprobs] = []
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        entries += _chunk(logits[rows], token_ids[rows], top[rows])
    return entries


def prompt_logprobs(logits: torch.Tensor, token_ids: Sequence[int], top: int) -> list[PositionLogprobs]:
    """The same for a stretch of the prompt: logits [P, V] at positions p …, token_ids those at p + 1 …"""
    return position_logprobs(logits, token_ids, [top] * len(token_ids))


def _entries(
    token_ids: Sequence[int],
    top: Sequence[int],
    ranks: list[int],
    numbers: list[list[float]],
    top_ids: list[list[int]],
) -> list[PositionLogprobs]:
    """Of the numbers of each row, the first is that of its own token."""
    places = range(1, len(top_ids[0]) + 1)
    entries = []
    for token_id, rank, count, (own, *others), ids in zip(token_ids, ranks, top, numbers, top_ids, strict=True):
        best = [TokenLogprob(*entry) for entry in zip(ids, others, places, strict=True)][:count]
        entries.append(PositionLogprobs(TokenLogprob(int(token_id), own, rank), tuple(best)))
    return entries


def _with_kernels(
    kernels: cpp_choose.CppChoose, logits: torch.Tensor, token_ids: Sequence[int], top: Sequence[int]
) -> list[PositionLogprobs]:
    own = torch.tensor(token_ids, dtype=torch.int64)
    numbers, ranks, top_ids = kernels.logprobs(logits, own, min(max(top), logits.shape[1]))
    if not bool(ranks.all()):
        raise ValueError(_NOT_FINITE)
    return _entries(token_ids, top, ranks.tolist(), numbers.tolist(), top_ids.tolist())


def _chunk(logits: torch.Tensor, token_ids: Sequence[int], top: Sequence[int]) -> list[PositionLogprobs]:
    peak = logits.amax(-1, keepdim=True)
    if not bool(torch.isfinite(peak).all()):
        raise ValueError(_NOT_FINITE)
    below = logits - peak
    log_sum = portable.log_of_sum(portable.weights_of(portable.exp(below)).sum(-1, keepdim=True))
    chosen = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)[:, None]
    chosen_logit = logits.gather(-1, chosen)
    before = torch.arange(logits.shape[-1], device=logits.device) < chosen
    ranks = ((logits > chosen_logit) | ((logits == chosen_logit) & before)).sum(-1).add_(1).tolist()
    num_top = min(max(top), logits.shape[-1])
    top_ids = likeliest(logits, num_top)
    numbers = (below.gather(-1, torch.cat([chosen, top_ids], -1)) - log_sum).clamp_(min=FLOOR).tolist()
    return _entries(token_ids, top, ranks, numbers, top_ids.tolist())


def likeliest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Ids [P, count] of the largest logits [P, V], by falling logit and rising id; no NaN, count ≤ V."""
    if count == 0:
        return torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
    values, ids = logits.topk(min(count + 1, logits.shape[-1]))
    # topk leaves open in which order equal values come, and which of them it takes at the edge.
    ids = ids[:, :count].sort(-1).values
    if values.shape[-1] > count:
        for row in torch.nonzero(values[:, count - 1] == values[:, count]).flatten().tolist():
            edge = values[row, count]
            above = torch.nonzero(logits[row] > edge).flatten()
            level = torch.nonzero(logits[row] == edge).flatten()
            ids[row] = torch.cat([above, level[: count - len(above)]]).sort().values
    order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(-1, order)
