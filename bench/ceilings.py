"""What this machine can do at most, measured: bytes read from memory and multiplications, per second.

    bandwidth   every thread sums its share of half a gigabyte of float32, which no cache holds
    products    [1024, 2048] × [2048, 2048] in the model's dtype, by torch and by our own, whichever is faster

Both are the best of several tries: a ceiling is what is possible, not what is usual.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.kernels.ops import Ops

_BYTES = 1 << 29
_ROWS, _WIDTH = 1024, 2048
_TRIES = 5


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Per second."""

    gigabytes: float
    gigaflops: float
    """a multiplication with its addition counts as two"""

    def best(self, other: Ceilings) -> Ceilings:
        return Ceilings(max(self.gigabytes, other.gigabytes), max(self.gigaflops, other.gigaflops))

    def floor_s(self, num_bytes: float, flops: float) -> float:
        """No step that reads and multiplies so much takes less, however well the two overlap."""
        return max(num_bytes / (self.gigabytes * 1e9), flops / (self.gigaflops * 1e9))


def measure(ops: Ops | None, dtype: torch.dtype, device: torch.device) -> Ceilings:
    """About two seconds. `ops`: multiply with these as well."""
    numbers = torch.ones(_BYTES // 4, device=device)
    gigabytes = _BYTES / _best_s(numbers.sum, device) / 1e9
    x = torch.randn(_ROWS, _WIDTH, device=device).to(dtype)
    weight = torch.randn(_WIDTH, _WIDTH, device=device).to(dtype)
    best_s = _best_s(lambda: torch.mm(x, weight.t()), device)
    if ops is not None:
        packed, out = ops.pack(weight), torch.empty(_ROWS, _WIDTH, device=device)
        best_s = min(best_s, _best_s(lambda: ops.linear(x, packed, out), device))
    return Ceilings(gigabytes, 2 * _ROWS * _WIDTH**2 / best_s / 1e9)


def _best_s(run: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(_TRIES):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times)
