"""Time per operation: every method of an `Ops` object wrapped, before a decoder binds it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from engine.kernels.ops import Ops, PackedLinear

OPERATIONS = (
    "embed",
    "rms_norm",
    "rms_norm_add",
    "layer_norm",
    "linear",
    "linear_add",
    "linear_gated",
    "linear_activation",
    "rotate_write",
    "attend",
)
_EMPTY_CALLS = 20_000


class OpTimes:
    """Counts and seconds of each operation, products told apart by their shapes. For CPUs: a GPU's calls return before
    they have run.
    """

    def __init__(self, ops: Ops) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._calls: defaultdict[str, int] = defaultdict(int)
        self._added_s, self._counted_s = self._wrapping_costs()
        for name in OPERATIONS:
            setattr(ops, name, self._wrapped(name, getattr(ops, name)))

    def clear(self) -> None:
        self._seconds.clear()
        self._calls.clear()

    def per_step(self, num_steps: int, step_s: float) -> dict[str, Any]:
        """`step_s`: a whole step, wrappers included. Milliseconds per step without them, most first."""
        calls = {name: count / num_steps for name, count in self._calls.items()}
        spent = {
            name: max(0.0, seconds / num_steps - calls[name] * self._counted_s) * 1e3
            for name, seconds in self._seconds.items()
        }
        step_ms = (step_s - sum(calls.values()) * self._added_s) * 1e3
        ordered = dict(sorted(spent.items(), key=lambda pair: -pair[1]))
        return {
            "step_ms": step_ms,
            "operations_ms": ordered | {"around them": step_ms - sum(spent.values())},
            "calls": calls,
            "wrapper_us": self._added_s * 1e6,
        }

    def _wrapped(self, name: str, operation: Callable[..., None]) -> Callable[..., None]:
        seconds, calls, clock = self._seconds, self._calls, time.perf_counter

        def timed(*arguments: Any) -> None:
            began = clock()
            operation(*arguments)
            key = name
            if len(arguments) > 1 and isinstance(arguments[1], PackedLinear) and name != "embed":
                key = f"{name} {arguments[1].in_features}→{arguments[1].out_features}"
            seconds[key] += clock() - began
            calls[key] += 1

        return timed

    def _wrapping_costs(self) -> tuple[float, float]:
        """Seconds that a wrapper adds to a call, and how many of them it takes for the operation's own."""
        packed = PackedLinear(torch.empty(0), None, 1, 1)

        def nothing(*arguments: Any) -> None:
            pass

        times = []
        for run in (nothing, self._wrapped("linear", nothing)):
            began = time.perf_counter()
            for _ in range(_EMPTY_CALLS):
                run(packed, packed)
            times.append((time.perf_counter() - began) / _EMPTY_CALLS)
        counted = sum(self._seconds.values()) / _EMPTY_CALLS
        self.clear()
        return times[1] - times[0], counted - times[0]
