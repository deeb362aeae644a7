"""One worker's KV blocks: who holds which, and what the unheld ones still remember.

A block is in exactly one of three places:

    free        holds nothing of use                 LIFO list
    cached      unreferenced, but its content is     least recently used first; taken (evicted) when free is empty
                known to the prefix cache
    referenced  in at least one block table          reference count > 0; may be known to the prefix cache as well

      allocate                 release (content unknown)
    free ───────▶ referenced ─────────────────────────▶ free
    cached ──evict─▲  ▲ │ release (content known)
       ▲              │ └──────────▶ cached
       └── hit: share ┘

Invariant: free + cached + referenced = total. Every operation is O(1) per block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from scheduler.core.prefix_cache import PrefixCache


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than can be had; callers look with `can_allocate` first."""


class BlockPool:
    """Reference counts, the free list and LRU eviction over a prefix cache."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks and tokens: num_blocks={num_blocks}, block_size={block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.cache = PrefixCache(block_size)
        self.evictions = 0
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out."""
        return len(self._free) + len(self._cached)

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - self.num_available

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free) + len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one reference; forgets the least recently used cached ones if need be.

        Raises OutOfBlocks, having taken nothing.
        """
        if not self.can_allocate(count):
            raise OutOfBlocks(f"{count} blocks asked, {self.num_available} available of {self.num_blocks}")
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self.cache.forget(block)
                self.evictions += 1
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def count_cached(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are unreferenced; sharing them makes that many fewer available."""
        return sum(1 for block in blocks if self._references[block] == 0)

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block of a prefix hit."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each. Give a table's blocks last first, so that a prefix outlives its continuations."""
        for block in blocks:
            count = self._references[block] - 1
            if count < 0:
                raise RuntimeError(f"block {block} released more often than taken")
            self._references[block] = count
            if count == 0:
                if self.cache.knows(block):
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def adopt(self, blocks: list[int]) -> None:
        """Move free blocks, whose content the prefix cache has just learnt, to the cached ones.

        Give them last first, as to `release`. Takes time for the whole pool: once for all that a worker offers.
        """
        self._cached.update(dict.fromkeys(blocks))
        self._free = [block for block in self._free if block not in self._cached]

    def is_free(self, block: int) -> bool:
        """Whether nothing holds or remembers the block."""
        return 0 <= block < self.num_blocks and self._references[block] == 0 and block not in self._cached

    def check_integrity(self, tables: Iterable[list[int]]) -> None:
        """Raise AssertionError unless every block is in one place and counts equal the tables' references."""
        counted = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), "a table holds a block twice"
            for block in table:
                counted[block] += 1
        assert counted == self._references, "reference counts differ from the block tables"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, "a block is free and cached"
        for block, count in enumerate(counted):
            places = (count > 0) + (block in free) + (block in cached)
            assert places == 1, f"block {block} is in {places} places"
        assert all(self.cache.knows(block) for block in cached), "a cached block is unknown to the prefix cache"
        assert not any(self.cache.knows(block) for block in free), "a free block is known to the prefix cache"
        self.cache.check_integrity()
