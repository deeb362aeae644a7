"""The token at output index i is argmax_v (l_v − max l) / T + g(seed, i, v) over what the processors leave; see
engine.processors for their order and engine.noise for g. T = 0 means g = 0. Ties go to the lowest id (torch.argmax
promises the first of several).

A row's token and log-probabilities depend on that row alone, bit for bit: what runs on whole blocks is elementwise, a
maximum or a sum of integers.

Where nothing is truncated, noise is computed only where it can matter. With s = (l − max l) / T and b just below the
g of the likeliest token, whose s is 0:

    v can win only if  s_v + g_v ≥ b;  g_v = −log E_v and u_v ≤ E_v,  so only if  u_v ≤ exp(s_v − b)

That test, with room for rounding, leaves out only losers: the winner is the one that noise on every id would give.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine import noise
from engine.logprobs import PositionLogprobs, position_logprobs
from engine.processors import SampleRow, change_logits_, kept_token_ids

__all__ = ["SampleResult", "SampleRow", "sample"]

Candidates = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""row index, token id and score of each, int64, int64 and float32 [C]"""

_MARGIN = 1.001  # far above what rounding of scores and noise amounts to: 1e-5
_EXP_SCALE = 2.0**23 / math.log(2.0)
_EXP_BIAS = 127 * 2.0**23
_CHUNK_ELEMENTS = {"cpu": 1 << 17}  # what stays in a core's cache
_DEVICE_CHUNK_ELEMENTS = 1 << 24
NOT_FINITE = "the model's logits are not finite"
ALL_BANNED = "logit_bias, bad_words and min_tokens leave no finite token"


@dataclass(frozen=True, slots=True)
class SampleResult:
    """One entry per row."""

    token_ids: list[int | None]
    """None where the row failed"""
    logprobs: list[PositionLogprobs | None]
    """set where params.top_logprobs is"""
    errors: dict[int, str]
    """why a row failed, by its index; other rows are not touched"""


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> SampleResult:
    """Choose one token for each row of float32 logits [L, V], which are left as they are."""
    if logits.dtype != torch.float32 or logits.dim() != 2 or len(logits) != len(rows):
        raise ValueError(f"{len(rows)} rows need float32 logits [{len(rows)}, V]; got {logits.dtype} {logits.shape}")
    result = SampleResult([None] * len(rows), [None] * len(rows), {})
    if not rows:
        return result
    finite = torch.isfinite(logits.amax(-1)).tolist()
    result.errors.update({index: NOT_FINITE for index, good in enumerate(finite) if not good})
    plain: list[int] = []
    other: list[int] = []
    for index, row in enumerate(rows):
        if finite[index]:
            (plain if row.params.greedy and not row.params.changes_logits else other).append(index)
    if plain:
        best = (logits if len(plain) == len(rows) else logits[plain]).argmax(-1).tolist()
        for index, token_id in zip(plain, best, strict=True):
            result.token_ids[index] = token_id
    _sample_others(logits, rows, other, result)
    _add_logprobs(logits, rows, result)
    return result


def _sample_others(logits: torch.Tensor, rows: Sequence[SampleRow], indices: list[int], result: SampleResult) -> None:
    """Choose for rows that need more than an argmax, a chunk at a time; the noise of the few candidates at the end."""
    keys = {i: noise.row_key(rows[i].seed, rows[i].output_index) for i in indices if not rows[i].params.greedy}
    limit = _CHUNK_ELEMENTS.get(logits.device.type, _DEVICE_CHUNK_ELEMENTS)
    step = max(1, limit // logits.shape[1])
    candidates: list[Candidates] = []
    for start in range(0, len(indices), step):
        chunk = indices[start : start + step]
        scores, best = _changed(logits, rows, chunk, result)
        noisy = [at for at, index in enumerate(chunk) if index in keys and index not in result.errors]
        if noisy:
            if len(noisy) < len(chunk):
                scores = scores[noisy]
            bounds = [noise.gumbel_floor(keys[chunk[at]], best[at]) for at in noisy]
            candidates.append(_candidates(scores, [chunk[at] for at in noisy], rows, bounds, keys))
    if candidates:
        at, ids, scores = (torch.cat(parts) for parts in zip(*candidates, strict=True))
        for index, token_id in _winners(at, ids, scores, keys, len(rows), logits.shape[1]).items():
            result.token_ids[index] = token_id


def _changed(
    logits: torch.Tensor, rows: Sequence[SampleRow], indices: list[int], result: SampleResult
) -> tuple[torch.Tensor, list[int]]:
    """Scores [N, V] = (changed logits − their maximum) / T, and the likeliest ids; settles greedy rows and failures."""
    whole = indices[-1] - indices[0] == len(indices) - 1
    scores = logits[indices[0] : indices[-1] + 1].clone() if whole else logits[indices]
    for at, index in enumerate(indices):
        if rows[index].params.changes_logits:
            try:
                change_logits_(scores[at], rows[index])
            except ValueError as error:
                result.errors[index] = str(error)
    peaks = scores.amax(-1, keepdim=True)
    best: list[int] = scores.argmax(-1).tolist()
    for at, good in enumerate(torch.isfinite(peaks).flatten().tolist()):
        index = indices[at]
        if not good:
            result.errors.setdefault(index, ALL_BANNED)
        elif rows[index].params.greedy and index not in result.errors:
            result.token_ids[index] = best[at]
    temperatures = torch.tensor([rows[index].params.temperature or 1.0 for index in indices], dtype=torch.float32)
    return scores.sub_(peaks).div_(temperatures.to(logits.device)[:, None]), best


def _candidates(
    scores: torch.Tensor,
    indices: list[int],
    rows: Sequence[SampleRow],
    bounds: list[float],
    keys: dict[int, tuple[int, int]],
) -> Candidates:
    """Of scores [N, V], which stand for the rows at `indices`, all that may win."""
    device = scores.device
    own = torch.tensor(indices, device=device)
    found = []
    whole = [at for at, index in enumerate(indices) if not rows[index].params.truncates]
    if whole:
        chosen = torch.tensor(whole, device=device)
        key = torch.tensor([keys[indices[at]] for at in whole], dtype=torch.int64, device=device)
        bound = torch.tensor([bounds[at] for at in whole], dtype=torch.float32, device=device)
        at, ids = _possible_winners(scores if len(whole) == len(indices) else scores[chosen], bound, key)
        found.append((chosen[at], ids))
    truncated = [at for at, index in enumerate(indices) if rows[index].params.truncates]
    if truncated:
        some = scores if len(truncated) == len(indices) else scores[truncated]
        at, ids = kept_token_ids(some, [rows[indices[at]].params for at in truncated])
        found.append((torch.tensor(truncated, device=device)[at], ids))
    at, ids = torch.cat([pair[0] for pair in found]), torch.cat([pair[1] for pair in found])
    return own[at], ids, scores[at, ids]


def _possible_winners(
    scores: torch.Tensor, bound: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and token id of each (row, token) of scores [N, V] that can reach the row's bound; see the module's text."""
    # 2^y ≤ 2^⌊y⌋ · (1 + frac y), and the right side is what y · 2^23 reads as, once the exponent's bias is added.
    reach = (scores - bound[:, None]).mul_(_EXP_SCALE).add_(_EXP_BIAS).clamp_(min=0.0)
    reach = reach.to(torch.int32).view(torch.float32).mul_(_MARGIN * 2.0**32).add_(1.0)
    bits = noise.uniform_bits(key[:, :1], key[:, 1:], torch.arange(scores.shape[1], device=scores.device)[None])
    at, ids = torch.nonzero(bits.to(torch.float32) <= reach, as_tuple=True)
    return at, ids


def _winners(
    at: torch.Tensor,
    ids: torch.Tensor,
    scores: torch.Tensor,
    keys: dict[int, tuple[int, int]],
    num_rows: int,
    vocab_size: int,
) -> dict[int, int]:
    """By row, the candidate whose score plus noise is highest; of several the lowest id."""
    device = scores.device
    table = torch.zeros((num_rows, 2), dtype=torch.int64)
    table[list(keys)] = torch.tensor(list(keys.values()), dtype=torch.int64)
    key = table.to(device)[at]
    totals = scores + noise.gumbel_from_bits(noise.uniform_bits(key[:, 0], key[:, 1], ids))
    highest = torch.full((num_rows,), -torch.inf, device=device).scatter_reduce_(0, at, totals, "amax")
    wins = torch.nonzero(totals == highest[at]).flatten()
    lowest = torch.full((num_rows,), vocab_size, dtype=torch.int64, device=device)
    winners = lowest.scatter_reduce_(0, at[wins], ids[wins], "amin").tolist()
    return {index: token_id for index, token_id in enumerate(winners) if token_id < vocab_size}


def _add_logprobs(logits: torch.Tensor, rows: Sequence[SampleRow], result: SampleResult) -> None:
    wanted, ids, top = [], [], []
    for index, (row, token_id) in enumerate(zip(rows, result.token_ids, strict=True)):
        if row.params.top_logprobs is not None and token_id is not None:
            wanted.append(index)
            ids.append(token_id)
            top.append(row.params.top_logprobs)
    if wanted:
        some = logits if len(wanted) == len(rows) else logits[wanted]
        for index, entry in zip(wanted, position_logprobs(some, ids, top), strict=True):
            result.logprobs[index] = entry
