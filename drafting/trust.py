"""Whom to believe where two could guess: the index or the model? By how often each was right lately.

The index is judged by the length of its match, whether or not its guess was used: what it would have said of a token is
compared with the token that came. The model is judged by the guesses that it made. Both apart for T = 0 and T > 0,
since copying suffers most from chance. Counts decay; a prior stands for what is not known yet, and says that a match of
four tokens or more is better than a small model.
"""

from __future__ import annotations

from dataclasses import dataclass

LENGTHS = (2, 3, 4, 6, 9, 16)
"""shortest match of each bucket"""
INDEX_PRIORS = (0.3, 0.45, 0.6, 0.75, 0.85, 0.9)
MODEL_PRIOR = 0.55
STRENGTH = 8.0
"""trials that a prior is worth"""
MEMORY = 256.0
"""trials that weigh about as much as all before them"""


@dataclass(slots=True)
class Rate:
    """How often guesses of one kind were right."""

    prior: float
    hits: float = 0.0
    tries: float = 0.0

    def observe(self, right: bool) -> None:
        """One guess and what came of it."""
        keep = 1.0 - 1.0 / MEMORY
        self.hits = self.hits * keep + right
        self.tries = self.tries * keep + 1.0

    @property
    def value(self) -> float:
        """As expected of the next guess."""
        return (self.hits + STRENGTH * self.prior) / (self.tries + STRENGTH)


class Trust:
    """See the module's text."""

    def __init__(self) -> None:
        self._index = {greedy: [Rate(prior) for prior in INDEX_PRIORS] for greedy in (True, False)}
        self._model = {greedy: Rate(MODEL_PRIOR) for greedy in (True, False)}

    def index(self, greedy: bool, match_length: int) -> Rate:
        """Of the index, after a match of so many tokens."""
        bucket = 0
        while bucket + 1 < len(LENGTHS) and LENGTHS[bucket + 1] <= match_length:
            bucket += 1
        return self._index[greedy][bucket]

    def model(self, greedy: bool) -> Rate:
        """Of the model."""
        return self._model[greedy]

    def prefers_index(self, greedy: bool, match_length: int) -> bool:
        """Whether the index's guess is at least as likely to be right as the model's."""
        return self.index(greedy, match_length).value >= self._model[greedy].value
