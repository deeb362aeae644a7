"""Prompts are many, and what is held out shares neither families nor words with what is trained on."""

from __future__ import annotations

import re
from itertools import islice

import pytest

from distill import prompts
from distill.prompts import HELD_OUT, TRAIN, conversations, prompts_digest, split_digest

SPLITS = (TRAIN, HELD_OUT)


def some(split: str, count: int, seed: int = 1) -> list[prompts.Conversation]:
    return list(islice(conversations(split, seed), count))


def test_families_are_in_one_split_only() -> None:
    families = {split: {one.family for one in some(split, 4000)} for split in SPLITS}
    assert not families[TRAIN] & families[HELD_OUT]
    assert len(families[TRAIN]) > 150
    assert len(families[HELD_OUT]) > 30


def test_words_are_in_one_split_only() -> None:
    texts = {split: " ".join(turn for one in some(split, 3000) for turn in one.turns) for split in SPLITS}
    words = prompts._read("words.txt")
    others = [entry for lists in (words, prompts._read("tasks.txt")) for entries in lists.values() for entry in entries]
    for kind in ("thing", "place", "company"):
        for entry in words[kind]:
            found = {split for split in SPLITS if re.search(rf"(?<![\w-]){re.escape(entry)}(?![\w-])", texts[split])}
            own = {split for split in SPLITS if entry in prompts._of_split(words[kind], split)}
            # "cells" also stands within a longer entry, which may be of the other split.
            longer = any(entry != other and re.search(rf"\b{re.escape(entry)}\b", other) for other in others)
            assert longer or found <= own, entry


def test_a_seed_gives_the_prompts() -> None:
    assert some(TRAIN, 50) == some(TRAIN, 50)
    assert some(TRAIN, 50) != some(TRAIN, 50, seed=2)


def test_prompts_hardly_repeat() -> None:
    found = [one.turns for one in some(TRAIN, 2000)]
    assert len(set(found)) > 1800
    assert 0.15 < sum(len(turns) == 2 for turns in found) / len(found) < 0.35


@pytest.mark.parametrize("split", SPLITS)
def test_all_slots_are_filled(split: str) -> None:
    assert not [one for one in some(split, 3000) if any("{" in turn or "}" in turn for turn in one.turns)]


def test_a_second_value_differs_from_the_first() -> None:
    compared = [one.turns[0] for one in some(TRAIN, 5000) if one.family.startswith("Compare {country}")]
    compared += [one.turns[0] for one in some(HELD_OUT, 5000) if one.family.startswith("Compare {country}")]
    assert compared
    for text in compared:
        first, second = text.removeprefix("Compare ").removesuffix(".").split(" and ")
        assert first != second


def test_digests_tell_versions_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {split: split_digest(split) for split in SPLITS}
    assert before[TRAIN] != before[HELD_OUT]
    lists = {file: dict(prompts._read(file)) for file in ("tasks.txt", "more_tasks.txt", "words.txt")}
    lists["words.txt"]["place"] = [*lists["words.txt"]["place"], "Atlantis"]
    monkeypatch.setattr(prompts, "_read", lists.__getitem__)
    assert {split: split_digest(split) for split in SPLITS} != before
    assert prompts_digest(some(TRAIN, 3)) != prompts_digest(some(TRAIN, 4))


def test_more_families_say_nothing_that_is_held_out() -> None:
    """They are as good as unrelated to those held out, and share words with the train split only."""
    held_out = [family for families in prompts._families(HELD_OUT).values() for family in families]
    more = [family for families in prompts._families(TRAIN, more=True).values() for family in families]
    assert len(set(more)) > 250
    for family in more:
        for other in held_out:
            ours, theirs = bag(family), bag(other)
            assert len(ours & theirs) / len(ours | theirs) < 0.55, (family, other)
    found = list(islice(conversations(TRAIN, 1, more=True), 3000))
    assert {one.family for one in found} <= set(more)
    assert not [one for one in found if any("{" in turn or "}" in turn for turn in one.turns)]
    with pytest.raises(ValueError, match="for training"):
        next(conversations(HELD_OUT, 1, more=True))


def bag(family: str) -> set[str]:
    """Its words, slots by their kind."""
    return set(re.findall(r"[a-z]+", family.lower()))
