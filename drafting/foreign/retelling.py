"""A sequence of the target's tokens, told in the draft's: piece by piece, each with bounded work.

    target tokens     The | Ġc | at | Ġsat | Ġon          known so far
    text              The cat sat on
    draft tokens      ▁The | ▁cat | ▁sat | ▁on
                      └─ settled ─┘└─ open ──┘            only the open text is encoded anew when more comes

How a text is cut may change at its end when more of it comes, so the last characters stay open; text further back is
settled at the start of a word. A character whose bytes have not all come is no text yet; bytes that can't be UTF-8 are
U+FFFD to the draft. A special token becomes the draft's token of the same spelling or role, or else its spelling.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from drafting.foreign.token_text import Token, TokenTexts

OPEN_CHARACTERS = 64
"""the text's last ones, at least, stay open"""
MOST_OPEN = 256


class SpecialTokens:
    """Which special token of one tokenizer is which of another's."""

    def __init__(self, source: TokenTexts, other: TokenTexts) -> None:
        self._source = source
        self._other = other

    def find(self, token_id: int) -> int | None:
        """The other's token of the same spelling, else of the same role."""
        same = self._other.specials.get(self._source.content(token_id))
        if same is not None:
            return same
        if token_id in self._source.eos_ids and self._other.eos_ids:
            return self._other.eos_ids[0]
        return self._other.bos_id if token_id == self._source.bos_id else None


class Retelling:
    """See the module's text."""

    def __init__(self, target: TokenTexts, draft: TokenTexts) -> None:
        self._target = target
        self._draft = draft
        self._specials = SpecialTokens(target, draft)
        self._open = ""
        self._at_start = True
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.settled: list[int] = [draft.bos_id] if draft.adds_bos and draft.bos_id is not None else []
        """draft ids that never change; only appended to"""
        self.num_characters_encoded = 0
        """in all, for those who want to know what it costs"""

    @property
    def is_whole(self) -> bool:
        """Whether the text ends with a whole character."""
        return not self._utf8.getstate()[0]

    def tell(self, token_ids: Iterable[int]) -> None:
        """The sequence goes on with these tokens of the target's."""
        for token_id in token_ids:
            if self._target.is_special(token_id):
                self._tell_special(token_id)
            else:
                self._open += self._utf8.decode(self._target.bytes_of[token_id] or b"")
        if len(self._open) > MOST_OPEN:
            self._settle()

    def open_ids(self, more: Sequence[int] = ()) -> list[int] | None:
        """The draft ids behind the settled ones, as if the sequence went on with `more`.

        None where that ends within a character, or with a special token.
        """
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        utf8.setstate(self._utf8.getstate())
        text = self._open
        for token_id in more:
            if self._target.is_special(token_id):
                return None
            text += utf8.decode(self._target.bytes_of[token_id] or b"")
        if utf8.getstate()[0]:
            return None
        return [token.token_id for token in self._encode(text)]

    def _tell_special(self, token_id: int) -> None:
        self._open += self._utf8.decode(b"", final=True)
        self._utf8.reset()
        self.settled += [token.token_id for token in self._encode(self._open)]
        self._open = ""
        same = self._specials.find(token_id)
        if same is not None:
            if not (same == self._draft.bos_id and self.settled == [same]):  # one begin of sequence is enough
                self.settled.append(same)
        else:
            self.settled += [token.token_id for token in self._draft.encode(self._target.content(token_id))]
        self._at_start = False

    def _settle(self) -> None:
        """All but the last of the open text, up to the start of a word, or of any token where there are no words."""
        tokens = self._encode(self._open)
        latest = len(self._open) - OPEN_CHARACTERS
        starts = [token.start for token in tokens if 0 < token.start <= latest]
        # A character of several tokens has one start; nothing is cut inside of it.
        words = [at for at in starts if self._open[at].isspace() and not self._open[at - 1].isspace()]
        if not (words or starts):
            return
        cut = (words or starts)[-1]
        self.settled += [token.token_id for token in tokens if token.start < cut]
        self._open = self._open[cut:]
        self._at_start = False

    def _encode(self, text: str) -> list[Token]:
        self.num_characters_encoded += len(text)
        return self._draft.encode(text, self._at_start) if text else []
