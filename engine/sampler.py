"""The token at output index i is argmax_v (l_v − max l) / T + g(seed, i, v) over what the processors leave; see
engine.processors for their order and engine.noise for g. T = 0 means g = 0. Ties go to the lowest id.

A row's token and log-probabilities depend on that row alone, bit for bit. On a CPU with the C++ kernels one operation
chooses for all rows, cuts included; elsewhere engine.processors cuts, and Triton or torch chooses. The bits are the
same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import numpy as np
import torch

from engine import noise
from engine.kernels import cpp_choose, torch_choose
from engine.kernels.cpp_choose import Cuts
from engine.logprobs import PositionLogprobs, position_logprobs
from engine.processors import ChangedRow, SampleRow, change_logits, kept_token_ids
from engine.sampling_params import SamplingParams

__all__ = ["SampleResult", "SampleRow", "sample", "sampled_tokens"]

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
    changed = [index for index, row in enumerate(rows) if row.params.changes_logits]
    noisy = [index for index, row in enumerate(rows) if not row.params.greedy and not row.params.changes_logits]
    for index, token_id in enumerate(_choose(logits, rows, noisy)):
        if token_id < 0:
            result.errors[index] = NOT_FINITE
        else:
            result.token_ids[index] = token_id
    if changed:
        _choose_changed(logits, rows, [index for index in changed if index not in result.errors], result)
    _add_logprobs(logits, rows, result)
    return result


def sampled_tokens(token_ids: Sequence[int]) -> SampleResult:
    """The result where an engine chose, `engine.batch.ChoosingEngine`."""
    errors = {index: NOT_FINITE for index, token_id in enumerate(token_ids) if token_id < 0}
    tokens = [None if token_id < 0 else token_id for token_id in token_ids]
    return SampleResult(tokens, [None] * len(tokens), errors)


def _choose_changed(logits: torch.Tensor, rows: Sequence[SampleRow], indices: list[int], result: SampleResult) -> None:
    """Choose anew for those whose logits the processors change."""
    own = logits if len(indices) == len(rows) else logits[indices]
    some = [rows[index] for index in indices]
    # A few hundred numbers are written over and put back: a copy of all of a row's would take longer than the choice.
    changed = [ChangedRow(own[at]) for at in range(len(indices))]
    try:
        for at, index in enumerate(indices):
            try:
                change_logits(changed[at], some[at])
            except ValueError as error:
                result.errors[index] = str(error)
        token_ids = _choose(own, some, [at for at, row in enumerate(some) if not row.params.greedy])
    finally:
        for one in changed:
            one.restore()
    for index, token_id in zip(indices, token_ids, strict=True):
        if token_id < 0:
            result.errors.setdefault(index, ALL_BANNED)
        result.token_ids[index] = None if index in result.errors else token_id


def _choose(logits: torch.Tensor, rows: Sequence[SampleRow], noisy: list[int]) -> list[int]:
    """The token of each row, -1 where its highest logit isn't finite or one is NaN; noise and cuts in `noisy` ones."""
    temperatures = np.zeros(len(rows), np.float32)
    keys = np.zeros((len(rows), 2), np.int64)
    cut: list[int] = []
    if noisy:
        temperatures[noisy] = [rows[index].params.temperature for index in noisy]
        keys[noisy] = noise.row_keys(
            [rows[index].seed for index in noisy], [rows[index].output_index for index in noisy]
        )
        cut = [index for index in noisy if rows[index].params.truncates]
    kernels = cpp_choose.kernels_for(logits)
    if kernels is not None:
        cuts = _cuts(rows, cut, logits.shape[1]) if cut else None
        chosen = kernels.choose(logits, torch.from_numpy(temperatures), torch.from_numpy(keys), cuts)
        token_ids: list[int] = chosen.tolist()
        return token_ids
    uncut = temperatures.copy()
    uncut[cut] = 0
    token_ids = _choose_uncut(logits, torch.from_numpy(uncut), torch.from_numpy(keys)).tolist()
    limit = _CHUNK_ELEMENTS.get(logits.device.type, _DEVICE_CHUNK_ELEMENTS)
    step = max(1, limit // logits.shape[1])
    cut = [index for index in cut if token_ids[index] >= 0]
    for start in range(0, len(cut), step):
        chunk = cut[start : start + step]
        params = [rows[index].params for index in chunk]
        winners = _choose_kept(logits[chunk], params, temperatures[chunk], keys[chunk])
        for index, token_id in zip(chunk, winners, strict=True):
            token_ids[index] = token_id
    return token_ids


def _choose_uncut(logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    triton_choose = _triton_choose() if _is_on_gpu(logits) else None
    if triton_choose is None:
        return torch_choose.choose(logits, temperatures, keys)
    device = logits.device
    chosen: torch.Tensor = triton_choose.choose(logits, temperatures.to(device), keys.to(device))
    return chosen


def _is_on_gpu(logits: torch.Tensor) -> bool:
    return logits.is_cuda


@cache
def _triton_choose() -> ModuleType | None:
    """The kernels for GPUs, where Triton is installed."""
    try:
        from engine.kernels import triton_choose
    except ImportError:
        return None
    return triton_choose


def _cuts(rows: Sequence[SampleRow], cut: list[int], vocab_size: int) -> Cuts:
    top_k = np.zeros(len(rows), np.int64)
    top_p = np.ones(len(rows), np.float64)
    min_p = np.zeros(len(rows), np.float32)
    top_k[cut] = [min(rows[index].params.top_k, vocab_size) for index in cut]
    top_p[cut] = [rows[index].params.top_p for index in cut]
    min_p[cut] = [rows[index].params.min_p for index in cut]
    return Cuts(torch.from_numpy(top_k), torch.from_numpy(top_p), torch.from_numpy(min_p))


def _choose_kept(
    logits: torch.Tensor, params: list[SamplingParams], temperatures: np.ndarray, keys: np.ndarray
) -> list[int]:
    """Of logits [N, V], which are changed, the ids with the highest score plus noise that the cuts leave."""
    num_rows, vocab_size = logits.shape
    device = logits.device
    scores = logits.sub_(logits.amax(-1, keepdim=True)).div_(torch.from_numpy(temperatures).to(device)[:, None])
    at, ids = kept_token_ids(scores, params)
    key = torch.from_numpy(keys).to(device)[at]
    totals = scores[at, ids] + noise.gumbel_from_bits(noise.uniform_bits(key[:, 0], key[:, 1], ids))
    highest = torch.full((num_rows,), -torch.inf, device=device).scatter_reduce_(0, at, totals, "amax")
    wins = torch.nonzero(totals == highest[at]).flatten()
    lowest = torch.full((num_rows,), vocab_size, dtype=torch.int64, device=device)
    winners: list[int] = lowest.scatter_reduce_(0, at[wins], ids[wins], "amin").tolist()
    return winners


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
