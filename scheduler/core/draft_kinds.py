"""What is known of a worker's drafts, by kind of request: at T = 0 or not, and who was asked to guess.

A copy is right where a model is not, and there at once where a model needs its time: what one kind has shown says
nothing of another. A kind that is new begins with the prior, and so is tried.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.core.acceptance import AcceptanceCurve
from scheduler.core.availability import Availability
from scheduler.core.sequence import Sequence

Kind = tuple[bool, int]
"""whether the temperature is 0, and which proposer was asked for; ANY: none in particular"""
ANY = 0
_PROPOSERS = frozenset({3, 4, 5})
"""of the modes in tandem.v1.SpeculationMode, those that name one"""


@dataclass(frozen=True, slots=True)
class Known:
    """Of one kind."""

    acceptance: AcceptanceCurve = field(default_factory=AcceptanceCurve)
    availability: Availability = field(default_factory=Availability)


class DraftKinds:
    """One worker's."""

    def __init__(self) -> None:
        self._known: dict[Kind, Known] = {}

    def of(self, kind: Kind) -> Known:
        """What is known; the prior at first."""
        known = self._known.get(kind)
        if known is None:
            known = self._known[kind] = Known()
        return known


def kind_of(sequence: Sequence) -> Kind:
    """By its request."""
    spec = sequence.request.spec
    return spec.greedy, spec.speculation_mode if spec.speculation_mode in _PROPOSERS else ANY
