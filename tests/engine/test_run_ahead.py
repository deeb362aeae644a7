"""Tokens that stay on the device from one step to the next."""

from __future__ import annotations

import numpy as np
import torch

from engine.run_ahead import Fed, PendingTokens, TokenFeed

CPU = torch.device("cpu")


def test_the_host_gets_what_was_chosen_even_if_it_is_overwritten() -> None:
    chosen = torch.tensor([5, -1, 7])
    pending = PendingTokens(chosen)
    chosen.zero_()
    assert pending.is_there
    assert pending.token_ids() == [5, -1, 7]


def test_a_slot_feeds_what_it_was_given_last() -> None:
    feed = TokenFeed(4, CPU)
    feed.remember(np.array([3, 1]), torch.tensor([11, 22]))
    feed.remember(np.array([0, 3]), torch.tensor([33, 44]))
    token_ids = torch.tensor([1, 2, 3, 4, 5], dtype=torch.int32)
    feed.fill(token_ids, Fed(at=np.array([4, 0, 2]), slots=np.array([3, 1, 0])))
    assert token_ids.tolist() == [22, 2, 33, 4, 44]
    assert token_ids.dtype == torch.int32


def test_a_failed_choice_is_an_id_that_exists() -> None:
    feed = TokenFeed(2, CPU)
    pending = feed.remember(np.array([1, 0]), torch.tensor([-1, 9]))
    token_ids = torch.full((2,), 77, dtype=torch.int32)
    feed.fill(token_ids, Fed(at=np.array([0, 1]), slots=np.array([1, 0])))
    assert token_ids.tolist() == [0, 9]
    assert pending.token_ids() == [-1, 9]


def test_nothing_to_feed() -> None:
    token_ids = torch.tensor([3], dtype=torch.int32)
    TokenFeed(1, CPU).fill(token_ids, Fed(np.zeros(0), np.zeros(0)))
    assert token_ids.tolist() == [3]
