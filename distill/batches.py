"""Conversations as batches of about equally long rows."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from distill.shards import Record


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Rows padded on the right."""

    token_ids: torch.Tensor
    """int64 [rows, longest]"""
    predicting: torch.Tensor
    """int64 [P]: flat positions whose next token is an answer's"""
    features: torch.Tensor
    """[P, hidden]: what the target's head saw there"""


def epoch(records: Sequence[Record], tokens_per_batch: int, seed: int, number: int) -> list[list[int]]:
    """Indices of the records of each batch, each record once; an epoch's number gives its order.

    Rows of a batch are of about the same length, so that little is spent on padding.
    """
    source = random.Random(f"{seed} {number}")
    order = sorted(range(len(records)), key=lambda index: len(records[index].tokens) + 24 * source.random())
    batches: list[list[int]] = []
    rows: list[int] = []
    for index in order:
        # Sorted: this one is about the longest so far.
        if rows and len(records[index].tokens) * (len(rows) + 1) > tokens_per_batch:
            batches.append(rows)
            rows = []
        rows.append(index)
    if rows:
        batches.append(rows)
    source.shuffle(batches)
    return batches


def collate(records: Sequence[Record], device: torch.device | str = "cpu") -> TrainBatch:
    """One batch."""
    longest = max(len(record.tokens) for record in records)
    token_ids = torch.zeros(len(records), longest, dtype=torch.int64)
    predicting = []
    for row, record in enumerate(records):
        token_ids[row, : len(record.tokens)] = record.tokens
        predicting.append(record.predicting() + row * longest)
    return TrainBatch(
        token_ids.to(device),
        torch.cat(predicting).to(device),
        torch.cat([record.features for record in records]).to(device),
    )


def collated(
    records: Sequence[Record], batches: Sequence[Sequence[int]], device: torch.device | str = "cpu"
) -> Iterator[TrainBatch]:
    """Batches one after the other."""
    for rows in batches:
        yield collate([records[index] for index in rows], device)
