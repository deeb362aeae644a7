"""What the speculation benchmark runs: its loads, how much of each, and how long."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench import speculation_prompts
from bench.speculation_runs import Case, Run, pairs_of

QUICK_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run."""

    cases: tuple[Case, ...]
    rounds: int
    requests: int
    """of a run at least"""
    max_tokens: int
    """of an answer"""
    run_tokens: int = 4096
    """of all answers of a run"""
    waves: int = 2
    """requests of a stream, where that is more, and leaves an answer half of max_tokens"""
    minutes: float = math.inf
    """after which no other pair begins"""

    def size_of(self, case: Case) -> tuple[int, int]:
        """(requests of a run, tokens of an answer at most)."""
        waves = max(1, min(self.waves, 2 * self.run_tokens // (case.streams * self.max_tokens)))
        count = max(self.requests, waves * case.streams)
        return count, max(1, min(self.max_tokens, self.run_tokens // count))


def missing(plan: Plan, runs: Sequence[Run], case: Case, number: int = 0) -> bool:
    """Whether a round of a case is still to be run; round 0, the warm-up: whether any is."""
    rounds = {off.round for off, _ in pairs_of(runs, case)}
    return number not in rounds if number else len(rounds) < plan.rounds


def prompts_of(case: Case, number: int, count: int) -> list[str]:
    """Other chat prompts in each round; both halves of a pair have the same."""
    if case.workload == "copy":
        return speculation_prompts.copying(count)
    return speculation_prompts.chat((number + 1) * count)[-count:]


def plan_of(args: argparse.Namespace) -> Plan:
    """The loads asked for."""
    streams = [int(one) for one in args.streams.split(",")]
    temperatures = [float(one) for one in args.temperatures.split(",")]
    if args.quick:
        streams, temperatures = [1, 4], [0.0]
    cases = [Case("chat", count, temperature, args.mode) for temperature in temperatures for count in streams]
    cases += [Case("copy", count, 0.0, "ngram") for count in streams if count <= args.copy_streams]
    if args.quick:
        return Plan(tuple(cases), 1, 4, QUICK_TOKENS)
    return Plan(tuple(cases), args.rounds, args.requests, args.max_tokens, args.run_tokens, minutes=args.minutes)
