"""When to try again, and where: pure; time and randomness are arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MAX_EXPONENT = 64


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how fast to try again. Progress (a new token) starts the count anew."""

    max_attempts: int = 12
    """attempts in a row without progress, the first included"""
    max_first_attempts: int | None = None
    """the same, before anything has come of a call (None: no other limit): smaller, where a user should soon hear that
    nobody is there"""
    initial_backoff_s: float = 0.1
    max_backoff_s: float = 5.0
    multiplier: float = 2.0

    def limit(self, *, has_progress: bool) -> int:
        """Most attempts in a row."""
        return self.max_attempts if has_progress or self.max_first_attempts is None else self.max_first_attempts

    def backoff_s(self, num_failures: int, jitter: float) -> float:
        """Pause after so many failures in a row; `jitter` in [0, 1) spreads it over 50 % to 100 % of the full pause."""
        # A target's failures are counted over all calls: without a bound the power outgrows a float.
        exponent = min(num_failures - 1, _MAX_EXPONENT)
        full = min(self.initial_backoff_s * self.multiplier**exponent, self.max_backoff_s)
        return full * (0.5 + 0.5 * jitter)


NO_RETRY = RetryPolicy(max_attempts=1)


@dataclass(slots=True)
class _Target:
    address: str
    num_failures: int = 0
    not_before: float = 0.0


class Targets:
    """Several gateways of one cluster: stays with one while it answers, leaves it for the one that is free soonest."""

    def __init__(self, addresses: Sequence[str]) -> None:
        if not addresses:
            raise ValueError("at least one target is needed")
        if len(set(addresses)) != len(addresses):
            raise ValueError(f"a target is given twice: {', '.join(addresses)}")
        self._targets = [_Target(address) for address in addresses]
        self._current = 0

    def choose(self, now: float) -> tuple[str, float]:
        """The target to try next, and the seconds to wait before that."""
        num = len(self._targets)
        order = [(self._current + offset) % num for offset in range(num)]
        self._current = min(order, key=lambda index: max(self._targets[index].not_before, now))
        target = self._targets[self._current]
        return target.address, max(target.not_before - now, 0.0)

    def succeeded(self, address: str) -> None:
        """The target answered."""
        target = self._find(address)
        target.num_failures = 0
        target.not_before = 0.0

    def failed(self, address: str, now: float, policy: RetryPolicy, jitter: float, retry_after_s: float) -> None:
        """The target failed; `retry_after_s` is what it asked for, 0 if nothing."""
        target = self._find(address)
        target.num_failures += 1
        target.not_before = now + max(policy.backoff_s(target.num_failures, jitter), retry_after_s)

    def _find(self, address: str) -> _Target:
        return next(target for target in self._targets if target.address == address)
