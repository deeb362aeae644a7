"""What speculation could bring at most, by what was measured: the formula beside the figure.

A run without drafts takes D seconds, of which S steps of n rows take S · T(n); the rest R (prompts, gaps) stays what it
is. With drafts the same tokens take S' steps of n' rows, k of them drafted for each, and guessing takes C seconds of
processor time for all of them together:

    speed-up  ≤  D / (R + S' · T(n' · (1 + k)))          where drafting costs the target nothing
              ≈  D / (R + S' · T(n' · (1 + k)) + C)      where each draft is made while nothing else runs

T is that of steps without drafts, measured while nobody guesses. With one row and no prompts, S / S' tokens come
of a step, and this is (1 + A) / (T(1 + k) / T(1) + c·k / T(1)), c the seconds of a drafted token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bench.speculation_runs import Run
from scheduler.core.step_time import Curve

NEAR = 0.25
"""of a size: T(n) counts as measured where it was so near"""


class Bound(NamedTuple):
    """Speed-ups that the formula gives."""

    free: float
    """where drafts cost the target no time"""
    in_turn: float
    """where guessing and the target take turns"""
    measured: bool
    """whether T(n) was measured at the sizes that it takes, or next to them"""


def bound_of(runs: Sequence[Run], plain: Sequence[tuple[float, float]]) -> Bound | None:
    """Of one case's runs; `plain`: T(n) as (tokens, seconds), sizes rising. None where something wasn't measured."""
    off = [run for run in runs if not run.drafts and not run.errors]
    on = [run for run in runs if run.drafts and not run.errors]
    steps_off, steps_on = sum(run.steps for run in off), sum(run.steps for run in on)
    if not (plain and steps_off and steps_on):
        return None
    curve = Curve(tuple(size for size, _ in plain), tuple(seconds for _, seconds in plain))
    # Both sides emit the same tokens in each round; rounds may be missing on one side.
    share = sum(run.output_tokens for run in on) / max(1, sum(run.output_tokens for run in off))
    duration_s = share * sum(run.duration_s for run in off)
    rows_off = sum(run.decode_rows for run in off) / steps_off
    rows_on = sum(run.decode_rows for run in on) / steps_on
    k = sum(run.draft_budget for run in on) / max(1, sum(run.decode_rows for run in on))
    size_off, size_on = max(1.0, rows_off), max(1.0, rows_on * (1 + k))
    rest_s = max(0.0, duration_s - share * steps_off * curve.at(size_off))
    verifying_s = rest_s + steps_on * curve.at(size_on)
    drafting_s = sum(run.guessing_s for run in on)
    measured = all(min(abs(size - known) for known, _ in plain) <= NEAR * size for size in (size_off, size_on))
    return Bound(duration_s / verifying_s, duration_s / (verifying_s + drafting_s), measured)
