"""What the speculation benchmark asks: chat prompts that no draft was trained on, and tasks that copy from a text."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path

from distill.prompts import HELD_OUT, conversations

SEED = 4
"""of the held-out prompts; other than any training draws, which are of another split anyway"""

TASKS = (
    "Correct the spelling of this text and repeat it in full:",
    "Repeat this text word for word, with every number written in bold:",
    "Extract the sentences that contain a number, word for word:",
    "Summarise this text in quotes: copy its three most important sentences exactly.",
    "Rewrite this text with a line break after each sentence. Change nothing else.",
)


def chat(count: int) -> list[str]:
    """Held-out single-turn prompts, each once."""
    seen: dict[str, None] = {}
    for conversation in conversations(HELD_OUT, SEED):
        seen.setdefault(conversation.turns[0])
        if len(seen) == count:
            break
    return list(seen)


def copying(count: int) -> list[str]:
    """Tasks over texts; a task comes again with another text before a pair comes twice."""
    texts = (Path(__file__).parent / "copying_texts.txt").read_text("utf-8").strip().split("\n\n---\n\n")
    pairs = [
        f"{TASKS[(index + turn) % len(TASKS)]}\n\n{text}"
        for turn in range(len(TASKS))
        for index, text in enumerate(texts)
    ]
    return list(itertools.islice(itertools.cycle(pairs), count))


def digest(prompts: Sequence[str]) -> str:
    """sha256 of prompts in their order, for the record."""
    return hashlib.sha256("\x00".join(prompts).encode()).hexdigest()
