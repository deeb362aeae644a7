"""What changes logits before the temperature, and what leaves tokens out after it.

Order: repetition penalty (prompt and output), presence and frequency penalty (output only), logit bias, bans (bad
words, and stop tokens before min_tokens); the sampler divides by the temperature; top-k, top-p, min-p. Everything
depends on one row alone. Each arithmetic step is one float32 operation on tensors: a GPU divides by a Python number
through its reciprocal, which rounds differently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine import portable
from engine.logprobs import likeliest
from engine.sampling_params import SamplingParams

BANNED = -math.inf


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One token to choose: the one that follows known_token_ids + draft_prefix."""

    params: SamplingParams
    seed: int
    """the choice's own"""
    output_index: int
    """of the token to choose, absolute, from 0"""
    known_token_ids: Sequence[int]
    """prompt and output so far"""
    num_prompt_tokens: int
    draft_prefix: Sequence[int] = field(default=())
    """draft tokens taken as output before this position"""


def change_logits_(logits: torch.Tensor, row: SampleRow) -> None:
    """Apply everything before the temperature to float32 logits [V], in place.

    Raises ValueError for an id outside the vocabulary.
    """
    params = row.params
    if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
        _penalise_(logits, row)
    if params.logit_bias:
        ids = _ids(list(params.logit_bias), logits, "logit_bias")
        logits[ids] += torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=logits.device)
    banned = banned_token_ids(row)
    if banned:
        logits[_ids(sorted(banned), logits, "bad_words or stop_token_ids")] = BANNED


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


def kept_token_ids(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Ids, rising, that top-k, top-p and min-p leave of float32 scores [V] = (l − max l) / T. At least one."""
    ids = None
    if 0 < params.top_k < len(scores):
        ids = likeliest(scores[None], params.top_k)[0].sort().values
    kept = scores if ids is None else scores[ids]
    if params.top_p < 1:
        nucleus = _nucleus(kept, params.top_p)
        ids = nucleus if ids is None else ids[nucleus]
        kept = kept[nucleus]
    allowed = kept > BANNED
    if params.min_p > 0:
        allowed &= portable.exp(kept) >= torch.tensor(params.min_p, dtype=torch.float32, device=kept.device)
    allowed_at = torch.nonzero(allowed).flatten()
    return allowed_at if ids is None else ids[allowed_at]


def _nucleus(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Indices, rising, of the smallest likeliest set whose weight reaches top_p of all; of equal ones, the first."""
    weights = portable.weights(scores)
    numerator, denominator = float(top_p).as_integer_ratio()
    needed = -(-int(weights.sum()) * numerator // denominator)
    # Only the likely ones need sorting; which window holds them changes nothing in the answer.
    for depth in (6.0, 12.0, math.inf):
        window = torch.nonzero(scores >= -depth).flatten()
        if int(weights[window].sum()) >= needed:
            break
    order = window[scores[window].sort(descending=True, stable=True).indices]
    reached = torch.cumsum(weights[order], 0)
    count = int((reached < needed).sum()) + 1
    return order[:count].sort().values


def _penalise_(logits: torch.Tensor, row: SampleRow) -> None:
    params, device = row.params, logits.device
    known = np.asarray(row.known_token_ids, dtype=np.int64)
    draft = np.asarray(row.draft_prefix, dtype=np.int64)
    output = np.concatenate([known[row.num_prompt_tokens :], draft])
    if params.repetition_penalty != 1:
        seen = _ids(np.unique(np.concatenate([known, draft])), logits, "context")
        values = logits[seen]
        penalty = torch.full_like(values, params.repetition_penalty)
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if len(output) and (params.presence_penalty or params.frequency_penalty):
        distinct, counts = np.unique(output, return_counts=True)
        ids = _ids(distinct, logits, "context")
        times = torch.from_numpy(counts.astype(np.float32)).to(device)
        values = logits[ids] - times * torch.full_like(times, params.frequency_penalty)
        logits[ids] = values - torch.full_like(times, params.presence_penalty)


def _last(row: SampleRow, count: int) -> list[int]:
    """The last `count` tokens of the context, or all where it is shorter."""
    draft = list(row.draft_prefix)
    from_known = max(0, count - len(draft))
    known = list(row.known_token_ids[max(0, len(row.known_token_ids) - from_known) :])
    return (known + draft)[max(0, len(known) + len(draft) - count) :]


def _ids(ids: Sequence[int] | np.ndarray, logits: torch.Tensor, source: str) -> torch.Tensor:
    found = torch.as_tensor(np.asarray(ids, dtype=np.int64))
    if len(found) and not (int(found.min()) >= 0 and int(found.max()) < len(logits)):
        raise ValueError(f"{source}: token id outside the vocabulary of {len(logits)}")
    return found.to(logits.device)
