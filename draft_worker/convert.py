"""Where protobuf meets the draft worker's own types."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tandem.v1 import draft_pb2, scheduler_pb2

from cluster.draft_news import Close, Commit, News, Open, Source, Tail


def news_from_proto(message: draft_pb2.DraftRequest) -> News:
    """What a worker sent."""
    return News(
        closes=[Close(close.slot, close.generation) for close in message.closes],
        opens=[
            Open(
                slot=opening.slot,
                generation=opening.generation,
                token_ids=list(opening.token_ids),
                num_prompt_tokens=opening.num_prompt_tokens,
                seed=opening.seed,
                temperature=_temperature(opening.temperature),
                max_draft_tokens=opening.max_draft_tokens,
                source=Source(opening.mode),
                tenant=opening.tenant,
            )
            for opening in message.opens
        ],
        commits=[
            Commit(commit.slot, commit.generation, commit.base, list(commit.token_ids), commit.prefix_hash)
            for commit in message.commits
        ],
    )


def tails_to_proto(tails: Iterable[Tail], vocab_size: int) -> draft_pb2.DraftResponse:
    """Guesses for a worker; each is cut before the first id that the target does not have."""
    return draft_pb2.DraftResponse(
        tails=[
            draft_pb2.Tail(
                slot=tail.slot,
                generation=tail.generation,
                base=tail.base,
                prefix_hash=tail.prefix_hash,
                token_ids=_within(tail.token_ids, vocab_size),
            )
            for tail in tails
        ]
    )


def hello_to_proto(
    *, worker_id: str, model: str, address: str, proposer: str, highest_term: int, cell: str
) -> scheduler_pb2.AnnounceRequest:
    """The first message to the scheduler. `cell`: the one that is meant, empty for any."""
    return scheduler_pb2.AnnounceRequest(
        hello=scheduler_pb2.DraftWorkerHello(
            worker_id=worker_id, model=model, address=address, proposer=proposer, highest_term=highest_term, cell=cell
        )
    )


def sign_of_life_to_proto() -> scheduler_pb2.AnnounceRequest:
    """Every later message to the scheduler."""
    return scheduler_pb2.AnnounceRequest()


def _temperature(value: float) -> float:
    """A temperature that can't be makes poor guesses, not an error."""
    return value if math.isfinite(value) and value > 0 else 0.0


def _within(token_ids: list[int], vocab_size: int) -> list[int]:
    for index, token_id in enumerate(token_ids):
        if token_id >= vocab_size:
            return token_ids[:index]
    return token_ids
