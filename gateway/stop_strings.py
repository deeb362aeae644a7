"""Stop strings over a stream of text, matched across token edges.

A stop string ends a choice at the first character at which any of them is complete; if several complete at the same
character, the longest one counts. That depends on the text alone, never on how it was cut into tokens or messages.

Until then, text that may still turn out to be the beginning of a stop string is held back:

    stops = ["QRSTU"]      feed "QR" → ""      feed "S" → ""      feed "x" → "QRSx"

Each string has its own Knuth-Morris-Pratt automaton, so a character costs O(1) per string, and the state is the length
of the string's longest prefix with which the text ends. The longest of these states is what must be held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Match:
    """A complete stop string."""

    string: str
    end: int
    """Characters of the fed piece up to and including the string's last one."""


class StopMatcher:
    """Watches the text of one choice."""

    __slots__ = ("_borders", "_held", "_include", "_states", "_strings")

    def __init__(self, strings: Sequence[str], include: bool = False) -> None:
        """`include`: leave the matched string in the text. Raises ValueError for an empty string."""
        if "" in strings:
            raise ValueError("an empty stop string would end every text")
        # Longest first: the first to complete at a character is the one that counts.
        self._strings = sorted(set(strings), key=lambda string: (-len(string), string))
        self._borders = [_borders(string) for string in self._strings]
        self._states = [0] * len(self._strings)
        self._include = include
        self._held = ""

    @property
    def held(self) -> str:
        """Text that was fed and not yet released."""
        return self._held

    def feed(self, piece: str, armed: bool = True) -> tuple[str, Match | None]:
        """Take more text; return what may be shown now, and the match that ends the choice, if there is one.

        While not `armed` nothing matches, and what would have matched is shown. Nothing may be fed after a match.
        """
        if not self._strings:
            return piece, None
        for position, character in enumerate(piece):
            string = self._step(character, armed)
            if string is not None:
                text = self._held + piece[: position + 1]
                self._held = ""
                shown = text if self._include else text[: len(text) - len(string)]
                return shown, Match(string, position + 1)
        text = self._held + piece
        shown_length = len(text) - max(self._states)
        self._held = text[shown_length:]
        return text[:shown_length], None

    def flush(self) -> str:
        """The choice ended otherwise: what was held back is text after all."""
        text, self._held = self._held, ""
        self._states = [0] * len(self._strings)
        return text

    def _step(self, character: str, armed: bool) -> str | None:
        """Advance every automaton; return the longest string that this character completes."""
        complete = None
        for index, string in enumerate(self._strings):
            borders, state = self._borders[index], self._states[index]
            while state and string[state] != character:
                state = borders[state - 1]
            if string[state] == character:
                state += 1
            if state == len(string):
                if armed and complete is None:
                    complete = string
                state = borders[state - 1]
            self._states[index] = state
        return complete


def _borders(string: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(string)
    length = 0
    for index in range(1, len(string)):
        while length and string[index] != string[length]:
            length = borders[length - 1]
        if string[index] == string[length]:
            length += 1
        borders[index] = length
    return borders
