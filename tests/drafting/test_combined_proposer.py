"""Who guesses when: copies first and at once, the model elsewhere, each alone where a request says so."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.draft_news import Source
from drafting.combined_proposer import CombinedProposer
from drafting.mirror import Mirror
from drafting.ngram_proposer import NgramProposer
from drafting.output_memory import OutputMemory
from tests.drafting.mirroring import feed, mirror

TEXT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


class Scripted:
    """Guesses what its script has for a position, or 100 + position; one token a round."""

    name = "scripted"
    sources = frozenset({Source.ANY, Source.MODEL})

    def __init__(self) -> None:
        self.script: dict[int, int] = {}
        self.rounds: list[list[int]] = []
        self.forked: list[Mirror] = []
        self.forgotten: list[Mirror] = []

    def extend(self, mirrors: Sequence[Mirror]) -> None:
        self.rounds.append([each.slot for each in mirrors])
        for each in mirrors:
            each.guess.append(self.script.get(each.known, 100 + each.known))

    def fork(self, branch: Mirror) -> bool:
        self.forked.append(branch)
        return True

    def forget(self, mirror: Mirror) -> None:
        self.forgotten.append(mirror)


def combined(memory: OutputMemory | None = None) -> tuple[CombinedProposer, Scripted]:
    model = Scripted()
    return CombinedProposer(NgramProposer(memory, lambda: 0.0), model), model


def test_a_long_match_is_copied_without_the_model_and_a_short_one_is_not() -> None:
    proposer, model = combined()
    long, short = mirror([*TEXT, *TEXT[:4]], 0, max_draft=2), mirror([*TEXT, 0, 1, 2], 1, max_draft=2)
    proposer.extend([long, short])
    assert long.guess == TEXT[4:][: len(long.guess)] != []
    assert (long.wanted, short.guess, model.rounds) == (0, [], []), "copies don't wait for a forward pass"
    feed(proposer, [long, short])
    assert model.rounds == [[1]] * len(short.guess)
    assert short.guess[:2] == [112, 113]
    assert proposer.name == "ngram+scripted"


def test_the_model_goes_on_where_a_copy_ends() -> None:
    """A memory's output ends; nothing matches behind it."""
    memory = OutputMemory(1000, 60.0)
    memory.remember(b"a", 1, TEXT, 0.0)
    proposer, model = combined(memory)
    followed = mirror([50, 51, *TEXT[2:7]], tenant=b"a")
    feed(proposer, [followed])
    assert followed.guess[:4] == [8, 9, 109, 110]
    assert len(model.rounds) == len(followed.guess) - 2


def test_a_request_gets_the_one_it_asks_for() -> None:
    proposer, model = combined()
    text = [*TEXT, *TEXT[:4]]
    by_model = mirror(text, 0, source=Source.MODEL, max_draft=2)
    by_index = mirror([*TEXT, 0, 2, 3], 1, source=Source.NGRAM, max_draft=2)
    nothing = mirror([1, 2, 3], 2, source=Source.NGRAM)
    both = mirror(text, 3, source=Source.COMBINED, max_draft=2)
    feed(proposer, [by_model, by_index, nothing, both])
    assert by_model.guess[:2] == [113, 114]
    assert by_index.guess[:3] == [4, 5, 6], "a short match too, since there is nobody else"
    assert (nothing.guess, nothing.exhausted) == ([], True)
    assert both.guess[:2] == [5, 6]
    assert {slot for of_round in model.rounds for slot in of_round} == {0}


def test_a_match_that_misleads_is_no_longer_believed() -> None:
    """After 1 2 3 4 comes another number each time, which only the model knows; in the end the index says 3 and 4, and
    the model the number, though the matches of two and three tokens that a copy begins with are right.
    """
    proposer, model = combined()
    model.script = {5 * turn + 4: 900 + turn for turn in range(40)} | {5 * turn: 1 for turn in range(40)}
    followed = mirror([1, 2, 3, 4, 900])
    assert proposer.trust.prefers_index(True, 4)
    right = []
    for turn in range(30):
        for token_id in (1, 2, 3, 4):
            followed.commit([token_id])
            followed.guess.clear()
            while followed.wanted:
                proposer.extend([followed])
            expected = [*range(token_id + 1, 5), 901 + turn]
            right.append(token_id == 1 or followed.guess[: len(expected)] == expected)
        followed.commit([901 + turn])
        proposer.extend([followed])
    assert not all(right[:4])
    assert all(right[-20:])
    assert proposer.trust.index(True, 4).value < proposer.trust.model(True).value < proposer.trust.index(True, 3).value


def test_the_model_is_judged_by_its_own_guesses_only() -> None:
    proposer, _ = combined()
    followed = mirror([1, 2, 3])
    proposer.extend([followed])
    assert followed.guess == [103]
    before = proposer.trust.model(True).value
    followed.commit([103])
    proposer.extend([followed])
    risen = proposer.trust.model(True).value
    assert risen > before
    proposer.extend([followed])
    assert followed.guess == [104, 105]
    followed.commit([7, 105])
    proposer.extend([followed])
    once = proposer.trust.model(True)
    assert once.tries < 2 < once.tries + 0.1, "what was guessed behind a wrong token is no trial"
    assert once.value < risen


def test_both_forget() -> None:
    proposer, model = combined(OutputMemory(1000, 60.0))
    followed = mirror([50, *TEXT], num_prompt=1, tenant=b"a")
    proposer.extend([followed])
    proposer.forget(followed)
    assert model.forgotten == [followed]
    assert (proposer._said, proposer.index._indexes) == ({}, {})
    assert proposer.index.memory.num_tokens == len(TEXT) + 1


def test_branches_are_the_models() -> None:
    proposer, model = combined(OutputMemory(1000, 60.0))
    followed = mirror([50, *TEXT, *TEXT[:4]], num_prompt=1, tenant=b"a", max_draft=2)
    feed(proposer, [followed])
    branch = followed.fork(0, 77)
    assert proposer.fork(branch)
    proposer.extend([branch])
    assert branch.guess == [77, 115]
    proposer.forget(branch)
    assert (model.forked, model.forgotten, proposer.index.memory.num_tokens) == ([branch], [branch], 0)
    assert not proposer.fork(mirror(TEXT, source=Source.NGRAM).fork(0, 1))
