"""Gumbel noise as a hash: g(seed, i, v) for the choice's seed, the absolute output index and the target's token id.

Whoever knows the three gets the same float32, bit for bit: another batch, another worker, another device, the draft
worker. All integers are unsigned; ^ is exclusive or; every product is cut to its width.

    mix64(x)          x ^= x >> 30;  x *= BF58476D1CE4E5B9;  x ^= x >> 27;  x *= 94D049BB133111EB;  x ^= x >> 31
    choice_seed(s, c) s                                             for c = 0
                      mix64(mix64(s ^ CHOICE) + c·GOLDEN)           else
    key(s, i)         mix64(mix64(s) + (i + 1)·GOLDEN)              64 bit; low half k0, high half k1
    mix32(x)          x ^= x >> 16;  x *= 21F0AAAD;  x ^= x >> 15;  x *= 735A2D97;  x ^= x >> 15
    bits(s, i, v)     mix32(mix32(v ^ k0) + k1)                     32 bit
    u                 min((float32(bits) + 0.5) · 2^-32, 1 - 2^-24)
    E                 -log(1 - u)                                   engine.portable's, in float32
    g                 -log E

mix64 is splitmix64's finaliser, mix32 a find of C. Wellons' hash prospector; its multipliers are below 2^31, so that a
product fits a signed 64-bit lane. u runs from 2^-33 to 1 - 2^-24: neither logarithm can meet 0, and g stays
within [GUMBEL_MIN, GUMBEL_MAX]. Small u, where g is large and decides, keeps its full relative resolution.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine import portable

GOLDEN = 0x9E3779B97F4A7C15
CHOICE = 0xD1B54A32D192ED03
GUMBEL_MIN = -2.8116
"""no noise is less; -log(24·ln 2) = -2.81151…"""
GUMBEL_MAX = 22.8740
"""no noise is more; 33·ln 2 = 22.87385…"""

_MASK64 = (1 << 64) - 1
_MASK32 = (1 << 32) - 1
_BELOW_ONE = 1.0 - 2.0**-24


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one choice of a request, 64 bit."""
    seed &= _MASK64
    if choice == 0:
        return seed
    return _mix64(_mix64(seed ^ CHOICE) + choice * GOLDEN)


def signed(seed: int) -> int:
    """The same 64 bits as a signed number, as `DecodeRows` takes seeds."""
    return seed - (seed >> 63 << 64)


def row_key(seed: int, output_index: int) -> tuple[int, int]:
    """(k0, k1): what the noise of one position takes from the choice's seed and the output index."""
    key = _mix64(_mix64(seed & _MASK64) + (output_index + 1) * GOLDEN)
    return key & _MASK32, key >> 32


def row_keys(seeds: Sequence[int], output_indices: Sequence[int]) -> np.ndarray:
    """`row_key` of several at once, int64 [N, 2]."""
    key = np.array([seed & _MASK64 for seed in seeds], np.uint64)
    key = _mix64s(_mix64s(key) + (np.array(output_indices, np.uint64) + np.uint64(1)) * np.uint64(GOLDEN))
    return np.stack([key & np.uint64(_MASK32), key >> np.uint64(32)], -1).astype(np.int64)


def uniform_bits(k0: torch.Tensor, k1: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """32 random bits each, in int64; the int64 arguments broadcast."""
    x = token_ids ^ k0
    scratch = torch.empty_like(x)
    _mix32_(x, scratch)
    x.add_(k1).bitwise_and_(_MASK32)
    _mix32_(x, scratch)
    return x


def gumbel_from_bits(bits: torch.Tensor) -> torch.Tensor:
    """float32 noise from int64 holding 32 bits each."""
    u = bits.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=_BELOW_ONE)
    return -portable.log(portable.neg_log1p_neg(u))


def gumbel(
    seed: int, output_index: int, token_ids: torch.Tensor | Sequence[int] | int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Noise of these ids at one position, float32; an int stands for the whole vocabulary 0 … token_ids - 1."""
    if isinstance(token_ids, int):
        token_ids = torch.arange(token_ids, dtype=torch.int64, device=device)
    elif not isinstance(token_ids, torch.Tensor):
        token_ids = torch.tensor(token_ids, dtype=torch.int64, device=device)
    k0, k1 = (torch.tensor(half, dtype=torch.int64, device=token_ids.device) for half in row_key(seed, output_index))
    return gumbel_from_bits(uniform_bits(k0, k1, token_ids.to(torch.int64)))


def _mix64(x: int) -> int:
    x &= _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _mix64s(x: np.ndarray) -> np.ndarray:
    """The same of uint64, elementwise."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def _mix32_(x: torch.Tensor, scratch: torch.Tensor) -> None:
    """In place on int64 that holds 32 bits each; scratch has x's shape (fresh memory costs more than the shift)."""
    x.bitwise_xor_(torch.bitwise_right_shift(x, 16, out=scratch)).mul_(0x21F0AAAD).bitwise_and_(_MASK32)
    x.bitwise_xor_(torch.bitwise_right_shift(x, 15, out=scratch)).mul_(0x735A2D97).bitwise_and_(_MASK32)
    x.bitwise_xor_(torch.bitwise_right_shift(x, 15, out=scratch))
