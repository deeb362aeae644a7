"""How many blocks a sequence has, and when a block gets its name."""

from __future__ import annotations

import pytest

from scheduler.core.block_pool import BlockPool
from scheduler.core.block_tables import blocks_for, find_prefix, grow_table, open_table, register_full_blocks
from tests.scheduler.core.builders import sequence_of


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 4) == blocks


@pytest.mark.parametrize(("prompt", "limit", "blocks"), [(7, 20, 2), (8, 20, 3), (8, 9, 3), (7, 8, 2), (1, 2, 1)])
def test_a_table_opens_with_room_for_one_token_more(prompt: int, limit: int, blocks: int) -> None:
    pool = BlockPool(8, 4)
    sequence = sequence_of(prompt=prompt, limit=limit)
    open_table(sequence, pool, ([], []))
    assert len(sequence.blocks) == blocks
    assert sequence.capacity == blocks * 4
    assert (sequence.computed, sequence.planned, sequence.prefill_end) == (0, 0, prompt)
    pool.check_integrity([sequence.blocks])


def test_a_table_grows_to_the_horizon_and_never_past_the_limit() -> None:
    pool = BlockPool(8, 4)
    sequence = sequence_of(prompt=3, limit=11)
    open_table(sequence, pool, ([], []))
    assert grow_table(sequence, pool, 4) == []
    assert len(grow_table(sequence, pool, 9) or []) == 2
    assert grow_table(sequence, pool, 40) == []
    assert (len(sequence.blocks), sequence.capacity) == (3, 12)


def test_a_table_that_cannot_grow_is_left_alone() -> None:
    pool = BlockPool(2, 4)
    sequence = sequence_of(prompt=3, limit=20)
    open_table(sequence, pool, ([], []))
    assert grow_table(sequence, pool, 12) is None
    assert (len(sequence.blocks), sequence.capacity, pool.num_free) == (1, 4, 1)


def computed(prompt: int | tuple[int, ...], tokens: int, pool: BlockPool, **fields: object) -> object:
    """A sequence with so many tokens computed and named."""
    sequence = sequence_of(prompt=prompt, limit=40, **fields)  # type: ignore[arg-type]
    open_table(sequence, pool, ([], []))
    sequence.computed = tokens
    register_full_blocks(sequence, pool)
    return sequence


@pytest.mark.parametrize(("tokens", "hit"), [(3, 0), (4, 1), (7, 1), (8, 2), (11, 2)])
def test_only_full_computed_blocks_are_named(tokens: int, hit: int) -> None:
    pool = BlockPool(16, 4)
    prompt = tuple(range(20, 32))
    computed(prompt, tokens, pool)
    follower = sequence_of(prompt=(*prompt, 1), limit=40)
    blocks, names = find_prefix(follower, pool)
    assert len(blocks) == len(names) == hit


@pytest.mark.parametrize(("length", "hit"), [(12, 2), (13, 3), (4, 0), (5, 1)])
def test_the_last_known_token_is_always_computed(length: int, hit: int) -> None:
    """A prompt of full blocks only leaves its last block out, since that token's logits are wanted."""
    pool = BlockPool(16, 4)
    prompt = tuple(range(20, 36))
    computed(prompt, 16, pool)
    assert len(find_prefix(sequence_of(prompt=prompt[:length], limit=40), pool)[0]) == hit


def test_a_hit_is_shared_and_the_rest_is_allocated() -> None:
    pool = BlockPool(16, 4)
    prompt = tuple(range(20, 29))
    first = computed(prompt, 8, pool)
    second = sequence_of(prompt=prompt, limit=40)
    open_table(second, pool, find_prefix(second, pool))
    assert second.blocks[:2] == first.blocks[:2]  # type: ignore[attr-defined]
    assert second.blocks[2] != first.blocks[2]  # type: ignore[attr-defined]
    assert (second.computed, second.planned) == (8, 8)
    assert not second.links, "what was hashed while it waited is not kept"
    pool.check_integrity([first.blocks, second.blocks])  # type: ignore[attr-defined]


def test_names_continue_the_hit() -> None:
    pool = BlockPool(16, 4)
    prompt = tuple(range(20, 33))
    computed(prompt, 8, pool)
    second = sequence_of(prompt=prompt, limit=40)
    open_table(second, pool, find_prefix(second, pool))
    assert second.register_at == 12
    second.computed = 12
    register_full_blocks(second, pool)
    third = sequence_of(prompt=prompt, limit=40)
    assert find_prefix(third, pool)[0] == second.blocks[:3]


def test_owed_prompt_logprobs_forbid_a_hit_until_they_are_done() -> None:
    """Case 33: what is cached has no logits."""
    pool = BlockPool(16, 4)
    prompt = tuple(range(20, 33))
    computed(prompt, 12, pool)
    sequence = sequence_of(prompt=prompt, limit=40, wants_prompt_logprobs=True)
    assert find_prefix(sequence, pool) == ([], [])
    sequence.request.prompt_logprobs_done = 13
    assert len(find_prefix(sequence, pool)[0]) == 3
