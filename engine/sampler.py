"""The token at output index i is argmax_v (l_v − max l) / T + g(seed, i, v) over what the processors leave; see
engine.processors for their order and engine.noise for g. T = 0 means g = 0. Ties go to the lowest id (torch.argmax
promises the first of several).

A row's token and log-probabilities depend on that row alone, bit for bit: what runs on whole blocks is elementwise, a
maximum or a sum of integers.

Where nothing is truncated, noise is computed only where it can matter. With s = (l − max l) / T and b = g of the
likeliest token, which scores b:

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
    tokens: list[int | None] = [None] * len(rows)
    errors: dict[int, str] = {}
    if not rows:
        return SampleResult(tokens, [], errors)
    finite = torch.isfinite(logits.amax(-1)).tolist()
    errors.update({index: NOT_FINITE for index, good in enumerate(finite) if not good})
    plain: list[int] = []
    other: list[int] = []
    for index, row in enumerate(rows):
        if finite[index]:
            (plain if row.params.greedy and not row.params.changes_logits else other).append(index)
    if plain:
        best = (logits if len(plain) == len(rows) else logits[plain]).argmax(-1).tolist()
        for index, token_id in zip(plain, best, strict=True):
            tokens[index] = token_id
    limit = _CHUNK_ELEMENTS.get(logits.device.type, _DEVICE_CHUNK_ELEMENTS)
    step = max(1, limit // logits.shape[1])
    for start in range(0, len(other), step):
        _sample_chunk(logits, rows, other[start : start + step], tokens, errors)
    return SampleResult(tokens, _logprobs(logits, rows, tokens), errors)


def _sample_chunk(
    logits: torch.Tensor,
    rows: Sequence[SampleRow],
    indices: list[int],
    tokens: list[int | None],
    errors: dict[int, str],
) -> None:
    """Choose for the rows at `indices`; fills `tokens` and `errors`."""
    scores = logits[indices]
    for at, index in enumerate(indices):
        if rows[index].params.changes_logits:
            try:
                change_logits_(scores[at], rows[index])
            except ValueError as error:
                errors[index] = str(error)
    peaks, best = scores.amax(-1, keepdim=True), scores.argmax(-1)
    for index, good in zip(indices, torch.isfinite(peaks).flatten().tolist(), strict=True):
        if not good:
            errors.setdefault(index, ALL_BANNED)
    greedy = [at for at, index in enumerate(indices) if rows[index].params.greedy and index not in errors]
    best_ids = best.tolist()
    for at in greedy:
        tokens[indices[at]] = best_ids[at]
    noisy = [at for at, index in enumerate(indices) if not rows[index].params.greedy and index not in errors]
    if not noisy:
        return
    if len(noisy) < len(indices):
        scores, peaks, best = scores[noisy], peaks[noisy], best[noisy]
    chosen = [rows[indices[at]] for at in noisy]
    temperatures = torch.tensor([row.params.temperature for row in chosen], dtype=torch.float32, device=logits.device)
    scores.sub_(peaks).div_(temperatures[:, None])
    for at, token_id in zip(noisy, _noisy_argmax(scores, best, chosen), strict=True):
        tokens[indices[at]] = token_id


def _noisy_argmax(scores: torch.Tensor, best: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    """The winners of scores [N, V] plus noise; `best` [N] holds ids whose score is 0, the maximum."""
    device = scores.device
    keys = torch.tensor([noise.row_key(row.seed, row.output_index) for row in rows], dtype=torch.int64, device=device)
    whole = [at for at, row in enumerate(rows) if not row.params.truncates]
    found = []
    if len(whole) == len(rows):
        found.append(_possible_winners(scores, best, keys))
    elif whole:
        at, ids = _possible_winners(scores[whole], best[whole], keys[whole])
        found.append((torch.tensor(whole, device=device)[at], ids))
    for index, row in enumerate(rows):
        if row.params.truncates:
            ids = kept_token_ids(scores[index], row.params)
            found.append((torch.full_like(ids, index), ids))
    at, ids = torch.cat([pair[0] for pair in found]), torch.cat([pair[1] for pair in found])
    totals = scores[at, ids] + noise.gumbel_from_bits(noise.uniform_bits(keys[at, 0], keys[at, 1], ids))
    highest = torch.full((len(rows),), -torch.inf, device=device).scatter_reduce_(0, at, totals, "amax")
    wins = torch.nonzero(totals == highest[at]).flatten()
    lowest = torch.full((len(rows),), scores.shape[1], dtype=torch.int64, device=device)
    winners: list[int] = lowest.scatter_reduce_(0, at[wins], ids[wins], "amin").tolist()
    return winners


def _possible_winners(
    scores: torch.Tensor, best: torch.Tensor, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and token id of each (row, token) of scores [N, V] that noise may make the winner; see the module's text."""
    k0, k1 = keys[:, :1], keys[:, 1:]
    bound = noise.gumbel_from_bits(noise.uniform_bits(k0, k1, best[:, None]))
    # 2^y ≤ 2^⌊y⌋ · (1 + frac y), and the right side is what y · 2^23 reads as, once the exponent's bias is added.
    reach = (scores - bound).mul_(_EXP_SCALE).add_(_EXP_BIAS).clamp_(min=0.0).to(torch.int32).view(torch.float32)
    reach.mul_(_MARGIN * 2.0**32).add_(1.0)
    bits = noise.uniform_bits(k0, k1, torch.arange(scores.shape[1], device=scores.device)[None])
    at, ids = torch.nonzero(bits.to(torch.float32) <= reach, as_tuple=True)
    return at, ids


def _logprobs(
    logits: torch.Tensor, rows: Sequence[SampleRow], tokens: list[int | None]
) -> list[PositionLogprobs | None]:
    found: list[PositionLogprobs | None] = [None] * len(rows)
    wanted, ids, top = [], [], []
    for index, (row, token_id) in enumerate(zip(rows, tokens, strict=True)):
        if row.params.top_logprobs is not None and token_id is not None:
            wanted.append(index)
            ids.append(token_id)
            top.append(row.params.top_logprobs)
    if wanted:
        for index, entry in zip(wanted, position_logprobs(logits[wanted], ids, top), strict=True):
            found[index] = entry
    return found
