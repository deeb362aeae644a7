"""Drafts by text: a model guesses in its own tokens, and its words are spelt in the target's.

    outer mirror (target ids)    committed ── guess ──▶ …              what the worker gets
                                     │          ▲
                               Retelling        │  spelt anew, as far as the cut is certain
                                     ▼          │
    inner mirror (draft ids)     tokens    ── guess ──▶ …              what the draft model sees

The last word of a guess is not handed over before the next one begins, since how it is cut may still change. While
commits agree with what was handed over, the inner guess simply goes on; otherwise the inner tokens are told anew from
their open end, and the model's KV stays valid as far as they are the same.

The model guesses greedily at any temperature: the target's noise belongs to ids that it doesn't have. A guess that
turns out wrong, for whichever of these reasons, costs speed only.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.draft_news import Source
from drafting.foreign.retelling import Retelling, SpecialTokens
from drafting.foreign.token_text import Token, TokenTexts
from drafting.mirror import Mirror
from drafting.proposer import Proposer

MAX_INNER_GUESS = 96
"""draft tokens of a guess, after which it waits for a commit"""
MAX_UNTOLD = 64
"""committed tokens that the inner mirror may have only as its guess"""
LONGEST_WORD = 16
"""characters; in a longer run without a space all but the last UNCERTAIN tokens are taken"""
UNCERTAIN = 2


@dataclass(slots=True)
class _Inner:
    """The draft's view of one mirror."""

    mirror: Mirror
    retelling: Retelling
    num_stable: int = 0
    """inner tokens that were settled when all was last told"""
    told: int = 0
    """committed tokens of the outer mirror that were told"""
    beyond: list[int] = field(default_factory=list)
    """guessed tokens of the outer mirror, by others, that the inner tokens hold as well"""
    handed: list[int] = field(default_factory=list)
    """target ids spelt from the inner guess"""


class TextProposer:
    """See the module's text; the inner proposer is met with inner mirrors only."""

    sources = frozenset({Source.ANY, Source.MODEL})

    def __init__(self, inner: Proposer, target: TokenTexts, draft: TokenTexts) -> None:
        self.name = f"{inner.name} by text"
        self._proposer = inner
        self._target = target
        self._draft = draft
        self._specials = SpecialTokens(draft, target)
        self._inners: dict[Mirror, _Inner] = {}

    def extend(self, mirrors: Sequence[Mirror]) -> None:
        """See Proposer."""
        ready: list[tuple[Mirror, _Inner]] = []
        for mirror in mirrors:
            inner = self._inners.get(mirror) or self._open(mirror)
            in_step = self._agrees(inner, mirror) or self._tell(inner, mirror)
            if in_step and not inner.mirror.exhausted and len(inner.mirror.guess) < MAX_INNER_GUESS:
                ready.append((mirror, inner))
            else:
                mirror.exhausted = True
        if not ready:
            return
        self._proposer.extend([inner.mirror for _, inner in ready])
        for mirror, inner in ready:
            self._hand_over(inner, mirror)

    def fork(self, branch: Mirror) -> bool:
        """See Proposer. Never: a branch would have to be told anew."""
        return False

    def forget(self, mirror: Mirror) -> None:
        """See Proposer."""
        inner = self._inners.pop(mirror, None)
        if inner is not None:
            self._proposer.forget(inner.mirror)

    def _open(self, mirror: Mirror) -> _Inner:
        made = Mirror(
            stream=mirror.stream,
            slot=mirror.slot,
            generation=mirror.generation,
            tokens=[],
            num_prompt=0,
            seed=mirror.seed,
            temperature=0.0,
            max_draft=mirror.max_draft,
            base_hash=0,
        )
        inner = self._inners[mirror] = _Inner(made, Retelling(self._target, self._draft))
        return inner

    def _agrees(self, inner: _Inner, mirror: Mirror) -> bool:
        """Whether all that is known of the outer mirror is what the inner one goes on from."""
        untold = mirror.tokens[inner.told :]
        if not inner.mirror.tokens or len(untold) > MAX_UNTOLD:
            return False
        return untold + mirror.guess == inner.beyond + inner.handed

    def _tell(self, inner: _Inner, mirror: Mirror) -> bool:
        """Tell the inner mirror all that is known; whether it can go on from there."""
        made, retelling = inner.mirror, inner.retelling
        retelling.tell(mirror.tokens[inner.told :])
        inner.told, inner.beyond, inner.handed = len(mirror.tokens), list(mirror.guess), []
        open_ids = retelling.open_ids(mirror.guess)
        if open_ids is None or not (retelling.settled or open_ids):
            inner.beyond = [-1]  # within a character: it agrees with nothing, and all is told again next time
            return False
        old, new = made.tokens + made.guess, retelling.settled + open_ids
        common = inner.num_stable
        while common < min(len(old), len(new)) and old[common] == new[common]:
            common += 1
        made.computed = min(made.computed, common, len(new) - 1)
        made.tokens, made.guess, made.exhausted = new, [], False
        inner.num_stable = len(retelling.settled)
        return True

    def _hand_over(self, inner: _Inner, mirror: Mirror) -> None:
        """Spell the inner guess in the target's tokens and lengthen the outer one by what is certain and new."""
        text, end = self._text(inner.mirror.guess)
        tokens = self._target.encode(text) if text else []
        certain = [token.token_id for token in (tokens if end is not None else _certain(text, tokens))]
        if end is not None:
            same = self._specials.find(end)
            certain += [] if same is None else [same]
        if certain[: len(inner.handed)] != inner.handed:
            mirror.exhausted = True
            return
        mirror.guess.extend(certain[len(inner.handed) :])
        inner.handed = certain
        if end is not None or inner.mirror.exhausted:
            mirror.exhausted = True

    def _text(self, guess: Sequence[int]) -> tuple[str, int | None]:
        """The text of draft tokens, whole characters only, up to a special token, which is returned too."""
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        text = ""
        for token_id in guess:
            if self._draft.is_special(token_id):
                return text, token_id
            text += utf8.decode(self._draft.bytes_of[token_id] or b"")
        return text, None


def _certain(text: str, tokens: Sequence[Token]) -> Sequence[Token]:
    """The tokens before the last word, which may go on; in a run without spaces, all but the last."""
    at = len(text) - 1
    while at > 0 and not (text[at].isspace() and not text[at - 1].isspace()):
        at -= 1
    if len(text) - at > LONGEST_WORD:
        return tokens[: max(0, len(tokens) - UNCERTAIN)]
    return [token for token in tokens if token.end <= at]
