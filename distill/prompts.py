"""Prompts for a target to answer: many kinds, many words, and a part of them held out before anything is generated.

A *family* is one line of tasks.txt ("Explain {topic} in simple terms."); its slots are filled from the lists of
words.txt. Every family and every word belongs to one of two splits by a hash of its own text:

    train       families and words for training
    held-out    the others: a held-out prompt has a family that training never saw, filled with words that training
                never saw in a slot

so what is measured on held-out prompts is not how well a template was learnt by heart. The families of more_tasks.txt
are all for training; none of them says what a held-out one says. Pure: a seed gives the prompts.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TRAIN, HELD_OUT = "train", "held-out"
_HELD_OUT_SHARE = 6
"""one family of each kind, and one word of each list, of so many is held out"""
_SHORT = 7
"""entries: both splits share a shorter list"""
_FOLLOWUP_SHARE = 0.25
"""conversations of two turns"""
_WEIGHTS = {
    "explain": 17, "list": 13, "write": 15, "mail": 6, "edit": 10, "extract": 6,
    "code": 9, "translate": 3, "ask": 6, "math": 5, "advice": 7, "chat": 5,
}  # fmt: skip
"""how often each kind of task occurs"""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a user says, turn by turn; the target's answers come in between."""

    family: str
    turns: tuple[str, ...]


def conversations(split: str, seed: int, *, more: bool = False) -> Iterator[Conversation]:
    """Endless; hardly any prompt comes twice. `more`: of the families of more_tasks.txt, which only training has."""
    source = random.Random(f"{split} {seed}")
    families = _families(split, more)
    kinds = {kind: families[kind] for kind in _WEIGHTS}
    followups = families["followup"]
    while True:
        kind = source.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        family = source.choice(kinds[kind])
        turns = [_filled(family, split, source)]
        if source.random() < _FOLLOWUP_SHARE:
            turns.append(_filled(source.choice(followups), split, source))
        yield Conversation(family, tuple(turns))


def split_digest(split: str) -> str:
    """sha256 over the families and words of a split: what tells two versions of the lists apart."""
    words = {name: _of_split(entries, split) for name, entries in _read("words.txt").items()}
    lists = {**_families(split), **words}
    lines = [f"{name}: {entry}" for name in sorted(lists) for entry in sorted(lists[name])]
    if split == TRAIN:
        more = _families(split, more=True)
        lines += [f"more {name}: {entry}" for name in sorted(more) for entry in sorted(more[name])]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def prompts_digest(prompts: Sequence[Conversation]) -> str:
    """sha256 over prompts in their order."""
    return hashlib.sha256("\n".join("\t".join(one.turns) for one in prompts).encode()).hexdigest()


def _families(split: str, more: bool = False) -> dict[str, list[str]]:
    """By kind."""
    if more:
        if split != TRAIN:
            raise ValueError("more_tasks.txt is for training")
        return _read("more_tasks.txt")
    return {kind: _of_split(families, split) for kind, families in _read("tasks.txt").items()}


def _filled(family: str, split: str, source: random.Random) -> str:
    """Names of slots may carry a 2, for a second value that differs from the first."""
    values: dict[str, str] = {}
    text = family
    while "{" in text:
        slot = text[text.index("{") + 1 : text.index("}")]
        text = text.replace("{" + slot + "}", _value(slot, split, source, values), 1)
    return text


def _value(slot: str, split: str, source: random.Random, values: dict[str, str]) -> str:
    words = _read("words.txt")
    if slot == "text":
        # Names and numbers differ from sentence to sentence.
        sentences = source.sample(_of_split(words["sentence"], split), source.randint(2, 4))
        return " ".join(_filled(sentence, split, source) for sentence in sentences)
    if slot == "topic":
        return source.choice(words["aspect"]).replace("{x}", source.choice(_of_split(words["thing"], split)))
    numbers = {"num": (11, 99), "small": (2, 12), "year": (1985, 2024), "day": (2, 28)}
    kind = slot.removesuffix("2")
    while True:
        if kind in numbers:
            value = str(source.randint(*numbers[kind]))
        else:
            value = source.choice(_of_split(words[kind], split))
        if slot == kind:
            return values.setdefault(slot, value)
        if value != values.get(kind):
            return value


def _of_split(entries: Sequence[str], split: str) -> list[str]:
    """Both splits have all of a list that is too short to be divided."""
    return _splits(tuple(entries))[split == HELD_OUT]


@cache
def _splits(entries: tuple[str, ...]) -> tuple[list[str], list[str]]:
    distinct = sorted(set(entries), key=lambda entry: hashlib.sha256(entry.encode()).digest())
    if len(distinct) < _SHORT:
        return list(entries), list(entries)
    held_out = set(distinct[: -(-len(distinct) // _HELD_OUT_SHARE)])
    return [entry for entry in entries if entry not in held_out], [entry for entry in entries if entry in held_out]


@cache
def _read(file: str) -> dict[str, list[str]]:
    lists: dict[str, list[str]] = {}
    for line in (Path(__file__).parent / file).read_text("utf-8").split("\n"):
        if line.startswith("["):
            entries = lists.setdefault(line.strip("[]"), [])
        elif line.strip():
            entries += [entry.strip().replace("\\n", "\n") for entry in line.split(" | ")]
    return lists
