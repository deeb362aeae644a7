"""Which tokens a draft can guess: those that answers are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from distill.shards import Record

_PROMPT_SHARE = 0.1
"""what a token in a prompt counts beside one in an answer"""


def frequent_token_ids(
    records: Iterable[Record], vocab_size: int, size: int, among: torch.Tensor | None = None
) -> torch.Tensor:
    """int64 [at most size], ascending; all of them are `among` these ascending ids, where such are given.

    Tokens never seen come last, low ids first: a BPE's are its frequent ones. Where all are taken, no record is read.
    """
    if among is None:
        among = torch.arange(vocab_size)
    if size >= len(among):
        return among
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    for record in records:
        tokens = record.tokens.long()
        counts += _PROMPT_SHARE * torch.bincount(tokens, minlength=vocab_size)
        counts += torch.bincount(tokens[record.predicting() + 1], minlength=vocab_size)
    counts -= torch.arange(vocab_size) * (0.5 * _PROMPT_SHARE / vocab_size)
    return among[counts[among].topk(size).indices].sort().values


def coverage(records: Sequence[Record], token_ids: torch.Tensor) -> float:
    """The share of answers' tokens that are among these."""
    tokens = torch.cat([record.tokens.long()[record.predicting() + 1] for record in records])
    return float(torch.isin(tokens, token_ids).float().mean())
