"""A cell of the matrix: one load, and the faults that strike it; and which of them are run."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from tests.chaos.faults import FAULTS, TARGETS, Strike
from tests.chaos.loads import LOADS

INDICES = (1, 7, 17, 12, 29)


@dataclass(frozen=True, slots=True)
class Cell:
    """One load and its faults."""

    load: str
    strikes: tuple[Strike, ...]
    together: bool = False
    """the later strikes don't wait for the first to be over"""

    def __str__(self) -> str:
        return f"{self.load}: {' + '.join(str(strike) for strike in self.strikes)}"


def pairwise_cells() -> list[Cell]:
    """Fifteen cells with every pair of fault and target, fault and load, target and load.

    The load of a pair is (fault + target) mod 5, a Latin square: each load has five pairs, no two of which share their
    fault or their target. They go into three cells, of two strikes, two and one.
    """
    cells = []
    for number, load in enumerate(LOADS):
        pairs = [(fault, TARGETS[(number - place) % len(TARGETS)]) for place, fault in enumerate(FAULTS)]
        strikes = [
            Strike(fault, target, INDICES[(place + number) % len(INDICES)])
            for place, (fault, target) in enumerate(pairs)
        ]
        cells += [Cell(load, tuple(strikes[first : first + 2])) for first in (0, 2, 4)]
    return cells


def every_cell() -> list[Cell]:
    """The full matrix, and a leader that is cut off from Redis alone; one strike each."""
    full = itertools.product(LOADS, TARGETS, FAULTS)
    cells = [
        Cell(load, (Strike(fault, target, INDICES[number % len(INDICES)]),))
        for number, (load, target, fault) in enumerate(full)
    ]
    return cells + [cut_off_from_redis(load) for load in LOADS]


def cut_off_from_redis(load: str) -> Cell:
    """Everybody else still reaches the leader."""
    return Cell(load, (Strike("cut", "leader redis", 17),))
