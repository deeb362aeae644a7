"""A draft that knows the text is right in another tokenizer too; one that doesn't, or is odd, is survived."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from cluster.draft_news import Source
from drafting.foreign.text_proposer import MAX_INNER_GUESS, MAX_UNTOLD, TextProposer
from drafting.foreign.token_text import TokenTexts
from drafting.mirror import Mirror
from tests.drafting.foreign.vocabularies import CORPUS, gpt, llama
from tests.drafting.mirroring import feed, mirror

BOOK = " ".join(CORPUS[:4]) + " " + "".join(CORPUS[4:6])


class Reader:
    """Goes on in its book as the draft's own tokenizer cuts it, one token a round; checks what it is told."""

    name = "reader"
    sources = frozenset({Source.ANY, Source.MODEL})

    def __init__(self, draft: TokenTexts, book: str = BOOK, end: int | None = None) -> None:
        self.draft = draft
        self.book = book
        self.end = end
        self.told_wrong = 0
        self.rounds = 0
        self.computed_kept = 0

    def extend(self, mirrors: Sequence[Mirror]) -> None:
        self.rounds += 1
        for each in mirrors:
            assert 0 <= each.computed < each.known, "the last token is never computed"
            self.computed_kept += each.computed
            each.computed = each.known
            text = b"".join(self.draft.bytes_of[token_id] or b"" for token_id in each.tokens).decode().removeprefix(" ")
            if not self.book.startswith(text):
                self.told_wrong += 1
                each.exhausted = True
                continue
            rest = self.draft.encode(self.book[len(text) :])[len(each.guess) :]
            if rest:
                each.guess.append(rest[0].token_id)
            elif self.end is not None:
                each.guess.append(self.end)
            else:
                each.exhausted = True

    def fork(self, branch: Mirror) -> bool:
        raise AssertionError("inner mirrors have no branches")

    def forget(self, mirror: Mirror) -> None:
        mirror.computed = 0


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[TokenTexts, TokenTexts]:
    folder: Path = tmp_path_factory.mktemp("vocabularies")
    return gpt(folder), llama(folder)


def verify(outer: Mirror, truth: list[int], k: int) -> int:
    """A step of the target: commits what agrees with the truth and one more; how many agreed."""
    at, accepted = len(outer.tokens), 0
    while accepted < min(k, len(outer.guess)) and outer.guess[accepted] == truth[at + accepted]:
        accepted += 1
    outer.commit(truth[at : at + accepted + 1])
    return accepted


@pytest.mark.parametrize("turned", [False, True])
def test_who_knows_the_text_is_nearly_always_right(both: tuple[TokenTexts, TokenTexts], turned: bool) -> None:
    target, draft = reversed(both) if turned else both
    truth = [token.token_id for token in target.encode(BOOK, at_start=True)]
    reader = Reader(draft)
    proposer = TextProposer(reader, target, draft)
    outer = mirror(truth[:5])
    steps = accepted = 0
    while len(outer.tokens) < len(truth) - 10:
        feed(proposer, [outer], rounds=1000)
        assert (
            b"".join(target.bytes_of[token_id] or b"" for token_id in [*outer.tokens, *outer.guess])
            .decode()
            .removeprefix(" ")
            in BOOK
        )
        accepted += verify(outer, truth, 4)
        steps += 1
    assert reader.told_wrong == 0
    assert accepted / steps > 2.5, "of 4"
    assert reader.computed_kept > len(truth), "KV outlives commits"


def test_a_run_ahead_that_agrees_is_not_told_again(both: tuple[TokenTexts, TokenTexts]) -> None:
    target, draft = both
    truth = [token.token_id for token in target.encode(BOOK, at_start=True)]
    reader = Reader(draft)
    proposer = TextProposer(reader, target, draft)
    outer = mirror(truth[:5])
    feed(proposer, [outer])
    told = proposer._inners[outer].told
    assert outer.guess == truth[5 : 5 + len(outer.guess)]
    outer.commit(outer.guess[:2])
    feed(proposer, [outer])
    assert proposer._inners[outer].told == told
    # But not for ever: what is compared is bounded.
    while len(outer.tokens) < told + MAX_UNTOLD + 10:
        feed(proposer, [outer])
        outer.commit(outer.guess[:3] if outer.guess else truth[len(outer.tokens) :][:1])
    assert proposer._inners[outer].told > told


def test_a_target_that_goes_its_own_way_is_followed(both: tuple[TokenTexts, TokenTexts]) -> None:
    """The target says something else than the book now and then; the reader is told exactly what was said."""
    target, draft = both
    source = random.Random(4)

    class Listener(Reader):
        heard: str = ""

        def extend(self, mirrors: Sequence[Mirror]) -> None:
            for each in mirrors:
                known = b"".join(self.draft.bytes_of[token_id] or b"" for token_id in each.tokens).decode()
                assert known.removeprefix(" ") == self.heard
                each.guess.append(self.draft.encode(" cat")[0].token_id)

    listener = Listener(draft)
    proposer = TextProposer(listener, target, draft)
    outer = mirror([token.token_id for token in target.encode("Once", at_start=True)], max_draft=2)
    words = [token_id for token_id, data in enumerate(target.bytes_of) if data and data.isascii()]
    for _ in range(60):
        listener.heard = b"".join(target.bytes_of[token_id] or b"" for token_id in outer.tokens).decode()
        proposer.extend([outer])
        outer.commit([source.choice(words) for _ in range(source.randint(1, 3))])
        outer.guess = []


@pytest.mark.parametrize("turned", [False, True])
def test_the_same_text_in_other_tokens_is_the_same_to_the_draft(
    both: tuple[TokenTexts, TokenTexts], turned: bool
) -> None:
    """The target spells in single bytes what the draft guessed in words, so that all computed tokens are right."""
    target, draft = reversed(both) if turned else both
    start, rest = "The cat", BOOK.removeprefix("The cat")
    kept = 0
    for length in range(1, 16):
        reader = Reader(draft)
        proposer = TextProposer(reader, target, draft)
        outer = mirror([token.token_id for token in target.encode(start, at_start=True)])
        feed(proposer, [outer])
        outer.commit([target.bytes_of.index(bytes([byte])) for byte in rest[:length].encode()])
        made = proposer._inners[outer].mirror
        known = len(made.tokens)
        feed(proposer, [outer])
        assert reader.told_wrong == 0
        kept += len(made.tokens) > known
    assert kept > 5


def test_the_last_word_waits_for_its_end(both: tuple[TokenTexts, TokenTexts]) -> None:
    target, draft = both
    outer = mirror([token.token_id for token in target.encode("The cat", at_start=True)])
    proposer = TextProposer(Reader(draft, "The cat sat on the mat."), target, draft)
    feed(proposer, [outer])
    spelt = b"".join(target.bytes_of[token_id] or b"" for token_id in outer.guess)
    assert spelt == b" sat on the"[: len(spelt)]
    assert outer.exhausted


def test_an_end_of_sequence_makes_all_certain_and_is_the_targets(both: tuple[TokenTexts, TokenTexts]) -> None:
    target, draft = both
    outer = mirror([token.token_id for token in target.encode("The cat", at_start=True)], max_draft=9)
    proposer = TextProposer(Reader(draft, "The cat sat on the mat.", draft.eos_ids[0]), target, draft)
    feed(proposer, [outer])
    *words, end = outer.guess
    assert words == [token.token_id for token in target.encode(" sat on the mat.")]
    assert end == target.eos_ids[0]
    assert outer.wanted == 0


def test_within_a_character_nothing_is_guessed(both: tuple[TokenTexts, TokenTexts]) -> None:
    target, draft = both
    single = [target.bytes_of.index(bytes([byte])) for byte in "価".encode()]
    outer = mirror([*(token.token_id for token in target.encode("Ein ", at_start=True)), single[0]])
    reader = Reader(draft, "Ein 価 und noch ein Wort.")
    proposer = TextProposer(reader, target, draft)
    feed(proposer, [outer])
    assert (outer.guess, outer.exhausted, reader.rounds) == ([], True, 0)
    outer.commit(single[1:2])
    feed(proposer, [outer])
    assert reader.rounds == 0
    outer.commit(single[2:])
    feed(proposer, [outer])
    assert outer.guess
    assert reader.told_wrong == 0


def test_a_model_that_never_ends_a_word_is_given_up(both: tuple[TokenTexts, TokenTexts]) -> None:
    target, draft = both

    class Broken(Reader):
        def extend(self, mirrors: Sequence[Mirror]) -> None:
            for each in mirrors:
                each.guess.append(self.draft.bytes_of.index(b"\xff"))

    outer = mirror([token.token_id for token in target.encode("The cat", at_start=True)])
    rounds = feed(TextProposer(Broken(draft), target, draft), [outer], rounds=1000)
    assert rounds <= MAX_INNER_GUESS + 1


def test_others_guesses_are_gone_on_from(both: tuple[TokenTexts, TokenTexts]) -> None:
    """A copy of the index stands in the guess already; the model goes on behind it."""
    target, draft = both
    truth = [token.token_id for token in target.encode("The cat sat on the mat and the old dog.", at_start=True)]
    outer = mirror(truth[:2])
    outer.guess = truth[2:4]
    reader = Reader(draft, "The cat sat on the mat and the old dog.")
    feed(TextProposer(reader, target, draft), [outer])
    assert outer.guess == truth[2 : 2 + len(outer.guess)]
    assert len(outer.guess) > 4
    assert reader.told_wrong == 0


def test_what_is_held_is_given_back(both: tuple[TokenTexts, TokenTexts]) -> None:
    target, draft = both
    proposer = TextProposer(Reader(draft), target, draft)
    outer = mirror([token.token_id for token in target.encode("The cat", at_start=True)])
    feed(proposer, [outer])
    assert not proposer.fork(outer.fork(0, 1))
    proposer.forget(outer)
    proposer.forget(outer)
    assert proposer._inners == {}
    assert proposer.name == "reader by text"
