"""T(n): how long a worker's step takes, by the tokens n that go through the model.

Measured while serving, from the results of steps that only decode. A size has a bucket: sizes up to 16 one each, larger
ones eight to an octave. A bucket keeps its last SAMPLES_KEPT durations and stands for their median, so that neither a
first step that compiles nor one that lost the processor counts, and what was true long ago is forgotten. More tokens
never take less time: medians that say so are averaged, each by the samples behind it, stale ones little (isotonic
regression by pooling adjacent violators; Ayer et al. 1955).

    T │                        ·
      │                      ·     beyond the last: on with the mean slope, or with the prior one where that is steeper
      │               o─────o
      │         o────╱             between: linear
      │       o╱
      │   ·  ·                     below the first: down by the mean slope, or the prior one before two are known
      └───────┴─┴────┴──────┴───── n

Before the first step a worker measures sizes that double (`begin_with`), with short contexts and nothing beside it:
that gives the curve its shape wherever no step has been seen, scaled to those that have.

A step with drafts is measured apart from a plain one: the draft worker may share the processor with the target, and
then n tokens take longer while it works. Where one of the two curves has not been measured, the other stands in
(`completed`): above, scaled by their ratio at the last size known; below, as it is, unless that is too much. So a small
step with drafts is thought as fast as one without until it is measured, and therefore is tried, and measured.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isfinite

SAMPLES_KEPT = 15
SAMPLES_FOR_MEDIAN = 5
"""with fewer, the least stands"""
SAMPLES_NEEDED = 3
"""with fewer, a bucket says nothing as long as others do: one slow step must not pass for the truth"""
STALE_AFTER = 1024
"""observations after which a bucket that got none of them weighs half"""
FORGOTTEN_AFTER = 4096
"""and after which it says nothing as long as others do: a size that was slow once is tried again"""
AGAIN_STEPS = 8
"""plain steps that are measured now and then between drafting ones: every SOONEST_AGAIN to LATEST_AGAIN steps, so that
at the gain that is expected they cost PLAIN_SHARE. The less drafts gain, the sooner it has to be known whether they
still do, and the less it costs"""
PLAIN_SHARE = 0.005
SOONEST_AGAIN = 128
LATEST_AGAIN = 1024
LEVEL_STEPS = 9
"""whose median is the machine's level"""
FREE_TOKENS = 64
"""prior: a step of so many tokens more than known ones takes about twice as long"""


@dataclass(frozen=True, slots=True)
class Curve:
    """T(n) at the sizes that are known; both tuples rise, `seconds` weakly. Where it is empty only ratios mean much."""

    sizes: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.sizes)

    def times(self, factor: float) -> Curve:
        """The same shape, higher or lower."""
        return Curve(self.sizes, tuple(seconds * factor for seconds in self.seconds))

    def at(self, num_tokens: float) -> float:
        """Seconds of a step of so many tokens; rises weakly, never zero."""
        sizes, seconds = self.sizes, self.seconds
        if not sizes:
            return 1.0 + num_tokens / FREE_TOKENS
        index = bisect_right(sizes, num_tokens)
        if 0 < index < len(sizes):
            left, low = sizes[index - 1], seconds[index - 1]
            return low + (seconds[index] - low) * (num_tokens - left) / (sizes[index] - left)
        edge = max(0, index - 1)
        known, low = sizes[edge], seconds[edge]
        prior = low / (known + FREE_TOKENS)
        slope = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0]) if len(sizes) > 1 else prior
        if index:
            return low + max(slope, prior) * (num_tokens - known)
        return max(low - slope * (known - num_tokens), low * num_tokens / known)


class Level:
    """How fast a machine is at present: the latest plain steps by what was measured before the first one.

    Its speed drifts, by a tenth and more within seconds where it is shared, and steps with drafts and without are not
    measured in the same seconds. So those with drafts are kept by the level of their time, and read by today's.
    """

    def __init__(self) -> None:
        self._latest: dict[int, deque[float]] = {}
        """by bucket of rows: what was measured at the start needn't have the shape that steps have now"""

    def observe(self, num_rows: int, duration_s: float, expected_s: float) -> None:
        """A plain step; what can't be a duration is ignored."""
        if num_rows > 0 and isfinite(duration_s) and duration_s > 0:
            latest = self._latest.setdefault(bucket_of(num_rows), deque(maxlen=LEVEL_STEPS))
            latest.append(duration_s / expected_s)

    def at(self, num_rows: int) -> float:
        """Of steps of so many rows, or the nearest number that was seen; 1 before the first step."""
        if not self._latest:
            return 1.0
        index = bucket_of(max(1, num_rows))
        latest = sorted(self._latest[min(self._latest, key=lambda other: abs(other - index))])
        return latest[len(latest) // 2]


def bucket_of(num_tokens: int) -> int:
    """Which bucket a size falls into; rises weakly with the size."""
    if num_tokens <= 16:
        return num_tokens
    octave = num_tokens.bit_length() - 1
    return 8 * octave + (num_tokens >> (octave - 3)) - 8


def fit(points: Iterable[tuple[float, float, float]]) -> Curve:
    """The rising curve nearest to points (size, seconds, weight) in the mean square; sizes rise strictly."""
    pools: list[tuple[float, float, list[float]]] = []
    for size, seconds, weight in points:
        pool = (seconds, weight, [size])
        while pools and pools[-1][0] > pool[0]:
            before = pools.pop()
            total = before[1] + pool[1]
            pool = ((before[0] * before[1] + pool[0] * pool[1]) / total, total, before[2] + pool[2])
        pools.append(pool)
    sizes = tuple(size for _, _, members in pools for size in members)
    return Curve(sizes, tuple(seconds for seconds, _, members in pools for _ in members))


def completed(own: Curve, other: Curve) -> Curve:
    """`own`, with the other's shape below its first size and beyond its last."""
    if not own:
        return other
    if not other:
        return own
    first, last = own.sizes[0], own.sizes[-1]
    below = min(1.0, own.seconds[0] / other.at(first))
    beyond = own.seconds[-1] / other.at(last)
    pairs = list(zip(other.sizes, other.seconds, strict=True))
    before = [(size, seconds * below) for size, seconds in pairs if size < first]
    after = [(size, seconds * beyond) for size, seconds in pairs if size > last]
    if not (before or after):
        return own
    return Curve(
        (*(size for size, _ in before), *own.sizes, *(size for size, _ in after)),
        (*(seconds for _, seconds in before), *own.seconds, *(seconds for _, seconds in after)),
    )


@dataclass(slots=True)
class _Bucket:
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))
    sizes: deque[int] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))
    last: int = 0
    """number of the observation that came last"""

    def point(self, now: int) -> tuple[float, float, float]:
        ordered = sorted(self.durations)
        count = len(ordered)
        seconds = ordered[count // 2] if count >= SAMPLES_FOR_MEDIAN else ordered[0]
        return sum(self.sizes) / count, seconds, count / (1 + (now - self.last) / STALE_AFTER)


class StepTimes:
    """What was observed, and the curve through it."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._observed = 0
        self._start = Curve()
        self._curve: Curve | None = Curve()

    def observe(self, num_tokens: int, duration_s: float) -> None:
        """A step is measured; what can't be a duration is ignored."""
        if num_tokens < 1 or not (isfinite(duration_s) and duration_s > 0):
            return
        index = bucket_of(num_tokens)
        bucket = self._buckets.get(index)
        if bucket is None:
            bucket = self._buckets[index] = _Bucket()
        self._observed += 1
        bucket.durations.append(duration_s)
        bucket.sizes.append(num_tokens)
        bucket.last = self._observed
        self._curve = None

    def age(self, samples_kept: int) -> None:
        """Time has passed unmeasured: of each size only the latest durations are kept, to be outvoted by new ones."""
        for bucket in self._buckets.values():
            while len(bucket.durations) > samples_kept:
                bucket.durations.popleft()
                bucket.sizes.popleft()
        self._curve = None

    def begin_with(self, times: Iterable[tuple[int, float]]) -> None:
        """What was measured before the first step, (tokens, seconds): the shape where no step has been seen yet."""
        sound = {size: seconds for size, seconds in times if size >= 1 and isfinite(seconds) and seconds > 0}
        self._start = fit((float(size), sound[size], 1.0) for size in sorted(sound))
        self._curve = None

    @property
    def start(self) -> Curve:
        """What was measured before the first step."""
        return self._start

    @property
    def observed(self) -> int:
        """How many steps were measured."""
        return self._observed

    @property
    def curve(self) -> Curve:
        """T(n) as known now."""
        if self._curve is None:
            points = [bucket for _, bucket in sorted(self._buckets.items())]
            sure = [
                bucket
                for bucket in points
                if len(bucket.durations) >= SAMPLES_NEEDED and self._observed - bucket.last < FORGOTTEN_AFTER
            ]
            self._curve = completed(fit(bucket.point(self._observed) for bucket in sure or points), self._start)
        return self._curve


def measured_again_after(gain: float) -> int:
    """Steps with drafts before plain ones are measured again."""
    return int(min(LATEST_AGAIN, max(SOONEST_AGAIN, AGAIN_STEPS * (1.0 - 1.0 / gain) / PLAIN_SHARE)))
