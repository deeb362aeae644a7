"""Ratios of paired measurements, and how sure they are."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

RESAMPLES = 4000
LEVEL = 0.90


@dataclass(frozen=True, slots=True)
class Ratio:
    """One side of a pair by the other, over several pairs."""

    median: float
    low: float
    high: float
    """bounds of the 90 % interval of the median"""
    pairs: int

    def __str__(self) -> str:
        return f"{self.median:.2f}× ({self.low:.2f} to {self.high:.2f})"

    def as_excess(self) -> str:
        """The same as per cent above 1."""
        median, low, high = (100 * (value - 1) for value in (self.median, self.low, self.high))
        return f"{median:+.1f} % ({low:+.1f} to {high:+.1f})"


def bootstrap(values: Sequence[float], seed: int = 0) -> Ratio:
    """Median, and its interval by resampling with replacement (percentile method); one value at least."""
    chance = random.Random(seed)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(RESAMPLES))
    edge = round((1 - LEVEL) / 2 * (RESAMPLES - 1))
    return Ratio(statistics.median(values), medians[edge], medians[-1 - edge], len(values))
