"""Mirrors for the tests of proposers."""

from __future__ import annotations

from typing import Any

from drafting.mirror import Mirror
from engine.prefix_hash import prefix_hash


def mirror(tokens: list[int], slot: int = 0, **changes: Any) -> Mirror:
    """A fresh mirror whose prompt is all of its tokens, unless `num_prompt` says otherwise."""
    values: dict[str, Any] = {
        "stream": 1,
        "slot": slot,
        "generation": 1,
        "tokens": list(tokens),
        "num_prompt": len(tokens),
        "seed": 40 + slot,
        "temperature": 0.0,
        "max_draft": 4,
        "base_hash": prefix_hash(tokens),
    }
    return Mirror(**{**values, **changes})


def feed(proposer: Any, mirrors: list[Mirror], rounds: int = 100) -> int:
    """Rounds until nothing is wanted; how many there were."""
    for count in range(rounds):
        hungry = [mirror for mirror in mirrors if mirror.wanted]
        if not hungry:
            return count
        proposer.extend(hungry)
    raise AssertionError("no end")
