"""The prefix hash of draft.proto: h(0) = 0, h(i + 1) = (h(i) · 6364136223846793005 + token(i) + 1) mod 2^64."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

MULTIPLIER = 6364136223846793005
MASK = (1 << 64) - 1

_powers = np.ones(1, np.uint64)


def prefix_hash(token_ids: Seq[int]) -> int:
    """The hash of a whole prefix: Σ (token(i) + 1) · multiplier^(n − 1 − i), all at once."""
    n = len(token_ids)
    if n == 0:
        return 0
    terms = np.asarray(token_ids, np.uint64) + np.uint64(1)
    return int((terms * _first_powers(n)[::-1]).sum(dtype=np.uint64))


def extend(value: int, token_id: int) -> int:
    """The hash of a prefix that is longer by one token."""
    return (value * MULTIPLIER + token_id + 1) & MASK


def _first_powers(n: int) -> np.ndarray:
    """multiplier^0 … multiplier^(n − 1), modulo 2^64."""
    global _powers
    if len(_powers) < n:
        factors = np.full(max(n, 2 * len(_powers)), MULTIPLIER, np.uint64)
        factors[0] = 1
        _powers = np.multiply.accumulate(factors)
    return _powers[:n]
