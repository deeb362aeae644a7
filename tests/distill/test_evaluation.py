"""Acceptance as it is simulated: against guesses that are known beforehand, and block by block by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distill.batches import TrainBatch
from distill.evaluation import _accepted_per_step, _lookups, _Played, evaluate
from distill.loss import Head
from distill.network import Network
from distill.prompts import HELD_OUT
from distill.shards import Answer, Record, read_shards, shard_paths
from distill.target import Opened


@pytest.fixture(scope="module")
def held_out(data: Path) -> list[Record]:
    return read_shards(shard_paths(data / HELD_OUT))


@pytest.fixture(scope="module")
def full_head(opened: Opened) -> torch.Tensor:
    return Network(opened, 1).full_head


def perfect(batch: TrainBatch) -> torch.Tensor:
    return batch.features


def test_the_targets_own_features_are_always_right(held_out: list[Record], full_head: torch.Tensor) -> None:
    """Only with the answers' seeds and output indices is it so at T = 0.7."""
    for one in evaluate(perfect, Head(full_head), torch.arange(len(full_head)), held_out):
        assert one.top_1 > 0.99  # features are bfloat16, so that a few ties go the other way
        assert one.alone[4] > 3.0
        assert min(one.by_position) > 0.98


def test_ids_out_of_the_head_are_mapped(held_out: list[Record], full_head: torch.Tensor) -> None:
    """Half of the vocabulary: right wherever the token belongs to it."""
    ids = torch.arange(1, len(full_head), 2)
    for one in evaluate(perfect, Head(full_head[ids]), ids, held_out):
        own = [record for record in held_out if record.answers[0].temperature == one.temperature]
        tokens = torch.cat([record.tokens[record.predicting() + 1].long() for record in own])
        assert one.top_1 == pytest.approx(float((tokens % 2 == 1).float().mean()), abs=0.01)


def test_another_seed_spoils_it(held_out: list[Record], full_head: torch.Tensor) -> None:
    spoilt = [
        Record(
            record.tokens,
            tuple(Answer(one.first, one.end, one.seed + 1000, one.temperature) for one in record.answers),
            record.features,
        )
        for record in held_out
    ]
    greedy, sampled = evaluate(perfect, Head(full_head), torch.arange(len(full_head)), spoilt)
    assert greedy.top_1 > 0.99
    assert sampled.top_1 < 0.9


def test_blocks_are_played_one_by_one() -> None:
    played = [_Played([True, True, False, True, True, True, False], [-1, -1, -1, 0, -1, -1, -1])]
    # Blocks of 2: tt|f is the bonus, ttt: two and the bonus, f alone.
    assert _accepted_per_step(played, 2, lookup=False) == pytest.approx(4 / 3)
    assert _accepted_per_step(played, 8, lookup=False) == pytest.approx(5 / 2)
    assert _accepted_per_step(played, 0, lookup=False) == 0.0
    # The lookup at position 3 is wrong at once; the model is asked again one token later.
    assert _accepted_per_step(played, 2, lookup=True) == pytest.approx(4 / 3)


def test_lookups_see_only_what_came_before() -> None:
    tokens = [1, 2, 3, 4, 9, 1, 2, 3, 4, 9, 1, 7]
    found = _lookups(tokens, Answer(7, 12, 0, 0.0), 4)
    # From 7 on "1 2" stood before, and what followed it: 3 4 9 1, then 2 is wrong.
    assert found == [4, 3, 2, 1, 0]


def test_a_copy_runs_on_into_itself() -> None:
    assert _lookups([5, 6, 5, 6, 5, 6, 5, 6, 5, 6], Answer(4, 10, 0, 0.0), 4) == [4, 4, 4, 3, 2, 1]
