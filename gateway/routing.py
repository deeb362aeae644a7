"""Which cell a request goes to. Pure.

Rendezvous hashing: every cell draws a score from (key, cell), and the highest wins. Requests with the same prefix have
the same key, so they meet where that prefix is cached; a cell that comes or goes moves only the keys that it wins or
had. A cell of w workers draws as w would: score = −w / ln u, u uniform in (0, 1) [Schindelhauer and Schomaker, 2005].

With bounded loads [Mirrokni, Thorup and Zadimoghaddam, 2018]: a cell takes no more than SLACK times its fair share of
what is live, so that one popular prefix can't bury its cell; what is over goes to the next best one, always the same.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SLACK = 1.25
# Below this a fair share is noise: a few requests stay together even where that leaves another cell idle.
MIN_BOUND = 4
# The beginning that decides; longer common prefixes than this still meet.
PREFIX_TOKENS = 64


@dataclass(frozen=True, slots=True)
class CellLoad:
    """What matters of one cell that could take a request."""

    name: str
    workers: int
    """that run the request's model; at least 1"""
    live: int
    """requests of this gateway that are there"""


def prefix_key(model: str, cache_salt: str, prompt_token_ids: Sequence[int]) -> bytes:
    """The same for requests that can share cached blocks at the beginning of their prompts."""
    text = f"{model}\0{cache_salt}\0" + ",".join(map(str, prompt_token_ids[:PREFIX_TOKENS]))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def place(key: bytes, cells: Iterable[CellLoad]) -> str:
    """The cell for a request; `cells` are those that can take it. Raises ValueError if there are none."""
    ranked = sorted(cells, key=lambda cell: (-_score(key, cell), cell.name))
    if not ranked:
        raise ValueError("no cell to choose from")
    total = sum(cell.live for cell in ranked) + 1
    workers = sum(cell.workers for cell in ranked)
    for cell in ranked:
        if cell.live < max(MIN_BOUND, math.ceil(SLACK * total * cell.workers / workers)):
            return cell.name
    return ranked[0].name


def _score(key: bytes, cell: CellLoad) -> float:
    drawn = int.from_bytes(hashlib.blake2b(key + cell.name.encode(), digest_size=8).digest(), "big")
    uniform = (drawn + 0.5) / 2.0**64
    # The largest draws round to 1, whose logarithm is 0.
    return cell.workers / -math.log(min(uniform, 1.0 - 2.0**-53))
