"""A sequence's blocks: how many it needs, growing its table, and naming what became full."""

from __future__ import annotations

from scheduler.core.block_pool import BlockPool
from scheduler.core.prefix_cache import chain_seed
from scheduler.core.sequence import Sequence


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // block_size)


def find_prefix(sequence: Sequence, pool: BlockPool) -> tuple[list[int], list[bytes]]:
    """The cached blocks that a sequence could start from: (blocks, names).

    Never the block of the last known token: that one is always computed, since its logits are wanted. Nothing at all
    while prompt log-probabilities are owed, which only computing the prompt can give.
    """
    if sequence.owes_prompt_logprobs:
        return [], []
    spec = sequence.request.spec
    max_blocks = (len(sequence.token_ids) - 1) // pool.block_size
    links = sequence.links.setdefault(pool.block_size, [])
    return pool.cache.match(chain_seed(spec.model, spec.cache_salt), sequence.token_ids, max_blocks, links)


def open_table(sequence: Sequence, pool: BlockPool, prefix: tuple[list[int], list[bytes]]) -> None:
    """Give a sequence its first blocks: the prefix hit, and room for all known tokens and the next one."""
    assert sequence.limit is not None
    hit, names = prefix
    size = pool.block_size
    pool.share(hit)
    total = blocks_for(min(sequence.limit, len(sequence.token_ids) + 1), size)
    sequence.blocks = hit + pool.allocate(total - len(hit))
    sequence.block_hashes = list(names)
    sequence.block_size = size
    sequence.capacity = total * size
    sequence.computed = sequence.planned = len(hit) * size
    sequence.prefill_end = len(sequence.token_ids)
    sequence.register_at = (len(hit) + 1) * size
    sequence.links = {}


def grow_table(sequence: Sequence, pool: BlockPool, horizon: int) -> list[int] | None:
    """Reserve blocks for `horizon` tokens (or the limit); the new blocks, or None if the pool can't give them."""
    assert sequence.limit is not None
    missing = blocks_for(min(sequence.limit, horizon), pool.block_size) - len(sequence.blocks)
    if missing <= 0:
        return []
    if not pool.can_allocate(missing):
        return None
    blocks = pool.allocate(missing)
    sequence.blocks += blocks
    sequence.capacity += missing * pool.block_size
    return blocks


def register_full_blocks(sequence: Sequence, pool: BlockPool) -> None:
    """Name every block that results have filled since last time."""
    size, names = pool.block_size, sequence.block_hashes
    spec = sequence.request.spec
    parent = names[-1] if names else chain_seed(spec.model, spec.cache_salt)
    for index in range(len(names), sequence.computed // size):
        tokens = sequence.token_ids[index * size : (index + 1) * size]
        parent = pool.cache.register(sequence.blocks[index], parent, tokens)
        names.append(parent)
    sequence.register_at = (len(names) + 1) * size
