"""What a cell showed, and what of that should not have been."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.chaos.cells import Cell
from tests.chaos.client import Answer, Record
from tests.chaos.faults import Struck
from tests.chaos.lag import Lag
from tests.chaos.loads import Ask

LONGEST_PAUSE_S = 10.0
LONGEST_CALMING_S = 20.0
"""until nothing is left of any request; a lost gateway's are kept for five seconds, a dead link for four"""
QUICK_RESTART_S = 3.0


@dataclass
class Result:
    """What a cell showed."""

    cell: Cell
    struck: list[Struck]
    records: list[Record]
    tokens_compared: int = 0
    tables_compared: int = 0
    losses: list[str] = field(default_factory=list)
    """what should not have been; empty: the cell holds"""
    missed: list[str] = field(default_factory=list)
    """faults that met no stream: where every cell is to prove something, losses too"""
    seconds: float = 0.0

    def pauses_s(self, struck: Struck) -> list[float]:
        """For each stream that lived when a fault struck: its longest wait until everything was settled."""
        until = struck.at + struck.settled_s
        live = [record for record in self.records if record.began < struck.at < record.ended]
        return sorted(record.longest_pause_s(struck.at, until) for record in live)


def judge(result: Result, expected: dict[Ask, Answer], lag: Lag, restarts: Iterable[tuple[float, float]]) -> None:
    """Compare every answer, and every failure with what was struck. `restarts`: (from, to) of each."""
    for record in result.records:
        answer, wanted = record.answer, expected[record.ask]
        result.tokens_compared += answer.num_tokens
        if not answer.same_as(wanted):
            result.losses.append(f"another answer: {answer.tokens} instead of {wanted.tokens}")
        usage = (answer.usage.prompt_tokens, answer.usage.completion_tokens)
        if usage != (len(record.ask.prompt), answer.num_tokens):
            result.losses.append(f"usage {usage} with {len(record.ask.prompt)} and {answer.num_tokens} tokens")
        result.losses += hangs(record, len(result.struck) if result.cell.together else 1, lag, restarts)
        result.losses += unexcused(record, result.struck)
    for struck in result.struck:
        if not has_hit(struck, result.records):
            result.missed.append(f"{struck.strike} ({struck.name}) hit nobody")


def hangs(record: Record, at_once: int, lag: Lag, restarts: Iterable[tuple[float, float]]) -> list[str]:
    """Pauses that are too long, whatever the machine's own part in them."""
    found = []
    for start, end in record.pauses():
        if end - start <= LONGEST_PAUSE_S * at_once:
            continue
        slow_restarts = sum(
            max(0.0, min(end, until) - max(start, since) - QUICK_RESTART_S)
            for since, until in restarts
            if until > start and since < end
        )
        if end - start > LONGEST_PAUSE_S * at_once + lag.between(start, end) + slow_restarts:
            found.append(f"nothing came for {end - start:.1f} s")
    return found


def slow_to_rest(start: float, end: float, lag: Lag) -> list[str]:
    """What goes in the end, but only because a collector or a distant timeout comes by, is a leak, too."""
    bound = LONGEST_CALMING_S + lag.between(start, end)
    return [f"it took {end - start:.1f} s until nothing was left"] if end - start > bound else []


def blamed(crashes: int, cell: Cell) -> list[str]:
    """Requests are only to blame for workers that die, never for one that is cut off, stands still or leaves."""
    killed = sum(strike.target == "worker" and strike.fault == "kill" for strike in cell.strikes)
    return [f"{crashes} ends of workers were taken for crashes, {killed} were"] if crashes > killed else []


def unexcused(record: Record, struck: list[Struck]) -> list[str]:
    """Errors that a client saw although its gateway survived."""
    found = []
    for failure in record.failures:
        killed = any(one.name == failure.gateway and one.strike.fault == "kill" for one in struck)
        refused = failure.held == 0 and failure.code in ("UNAVAILABLE", "ALREADY_EXISTS")
        if not (killed or refused):
            found.append(f"{failure.gateway} failed a stream: {failure.code} {failure.details} after {failure.held}")
    return found


def has_hit(struck: Struck, records: list[Record]) -> bool:
    """Whether the fault struck a live stream, by what its client was told; for what no client sees, it was noticed."""
    fault, target = struck.strike.fault, struck.strike.target
    live = [record for record in records if record.began < struck.at < record.ended]
    if not live:
        return False
    if fault == "slow" or target in ("redis", "draft") or (target == "gateway" and fault == "term"):
        return True
    if target == "leader redis" or (fault, target) == ("term", "leader"):
        # It serves on until its lease is over, or the standby has taken it: streams that have begun by then are moved.
        return any(record.resumptions for record in records if record.ended > struck.at)
    if any(record.resumptions for record in live):
        return True
    # All of an answer may have been under way when its gateway was cut off; it comes when the link is whole again.
    cut_s = struck.lifted_at - struck.at
    return (fault, target) == ("cut", "gateway") and any(
        record.longest_pause_s(struck.at, struck.lifted_at) > 0.9 * cut_s for record in live
    )
