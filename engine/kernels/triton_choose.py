"""The choice of a token on a GPU: argmax of (l − max l) / T + noise over the vocabulary, nothing materialised.

    peaks_kernel    per row and tile of the vocabulary: the highest logit, or NaN
    scores_kernel   per row and tile: the best score and the lowest id that has it; needs the row's highest logit
    winner_kernel   per row: the best of the tiles, the lowest of equals

A maximum has no order, so tiles decide no bit. The noise is `engine.noise`'s bit for bit: every operation is rounded on
its own (no fusion at launch), the division is IEEE's (`div_rn`), integers are uint32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton_math import gumbel

_TILE = 1024


@triton.jit
def peaks_kernel(logits, peaks, vocab_size, stride, BLOCK: tl.constexpr):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tile * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(logits + row * stride + at, at < vocab_size, other=float("-inf"))
    peak = tl.max(found, 0)
    has_nan = tl.max((found != found).to(tl.int32), 0)
    tl.store(peaks + row * tl.num_programs(1) + tile, tl.where(has_nan > 0, float("nan"), peak))


@triton.jit
def _peak_of(peaks, num_tiles, TILES: tl.constexpr):
    """The row's highest logit and whether it is one to choose by."""
    at = tl.arange(0, TILES)
    found = tl.load(peaks + at, at < num_tiles, other=float("-inf"))
    has_nan = tl.max((found != found).to(tl.int32), 0)
    peak = tl.max(tl.where(found != found, float("-inf"), found), 0)
    return peak, (has_nan == 0) & (tl.abs(peak) < float("inf"))


@triton.jit
def scores_kernel(
    logits,
    temperatures,
    noise_keys,
    peaks,
    best,
    best_ids,
    vocab_size,
    stride,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_tiles = tl.num_programs(1)
    at = tile * BLOCK + tl.arange(0, BLOCK)
    own = at < vocab_size
    scores = tl.load(logits + row * stride + at, own, other=float("-inf"))
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        peak, _ = _peak_of(peaks + row * num_tiles, num_tiles, TILES)
        k0 = tl.load(noise_keys + 2 * row).to(tl.uint32)
        k1 = tl.load(noise_keys + 2 * row + 1).to(tl.uint32)
        scaled = tl.div_rn(scores - peak, tl.full((BLOCK,), 0.0, tl.float32) + temperature)
        scores = scaled + gumbel(k0, k1, at.to(tl.uint32))
    highest = tl.max(scores, 0)
    tl.store(best + row * num_tiles + tile, highest)
    tl.store(best_ids + row * num_tiles + tile, tl.min(tl.where(own & (scores == highest), at, vocab_size), 0))


@triton.jit
def winner_kernel(peaks, best, best_ids, chosen, num_tiles, TILES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, TILES)
    own = at < num_tiles
    scores = tl.load(best + row * num_tiles + at, own, other=float("-inf"))
    ids = tl.load(best_ids + row * num_tiles + at, own, other=0)
    winner = tl.min(tl.where(own & (scores == tl.max(scores, 0)), ids, 0x7FFFFFFF), 0)
    _, is_usable = _peak_of(peaks + row * num_tiles, num_tiles, TILES)
    tl.store(chosen + row, tl.where(is_usable, winner, -1).to(tl.int64))


@triton.jit(do_not_specialize=["k0", "k1"])
def noise_kernel(noise, k0, k1, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low, high = tl.full((BLOCK,), 0, tl.uint32) + k0.to(tl.uint32), tl.full((BLOCK,), 0, tl.uint32) + k1.to(tl.uint32)
    tl.store(noise + at, gumbel(low, high, at.to(tl.uint32)), at < count)


def noise_of(key: tuple[int, int], vocab_size: int, device: torch.device) -> torch.Tensor:
    """float32 [vocab_size]: `engine.noise.gumbel` under this row key, as `choose` computes it; for tests."""
    noise = torch.empty(vocab_size, dtype=torch.float32, device=device)
    grid = (triton.cdiv(vocab_size, _TILE),)
    noise_kernel[grid](noise, *key, vocab_size, BLOCK=_TILE, enable_fp_fusion=False)
    return noise


def choose(logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """As `ops.Ops.choose`, with the result, int64 [L], left on the device; temperatures and keys are there too."""
    num_rows, vocab_size = logits.shape
    chosen = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return chosen
    num_tiles = triton.cdiv(vocab_size, _TILE)
    tiles = triton.next_power_of_2(num_tiles)
    peaks = torch.empty((num_rows, num_tiles), dtype=torch.float32, device=logits.device)
    best = torch.empty_like(peaks)
    best_ids = torch.empty((num_rows, num_tiles), dtype=torch.int32, device=logits.device)
    grid = (num_rows, num_tiles)
    peaks_kernel[grid](logits, peaks, vocab_size, logits.stride(0), BLOCK=_TILE)
    scores_kernel[grid](
        logits,
        temperatures,
        keys,
        peaks,
        best,
        best_ids,
        vocab_size,
        logits.stride(0),
        BLOCK=_TILE,
        TILES=tiles,
        enable_fp_fusion=False,
    )
    winner_kernel[(num_rows,)](peaks, best, best_ids, chosen, num_tiles, TILES=tiles)
    return chosen
