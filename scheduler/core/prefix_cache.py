"""Which block holds which prefix.

A full block is named by a chain of hashes: h(0) = H(seed), h(i + 1) = H(h(i) ‖ tokens of block i), so that equal names
mean equal prefixes, not only equal blocks. H is BLAKE2b cut to 128 bits; the seed covers model and salt. On a hit the
tokens themselves are compared, so that not even a collision could serve a foreign prefix.

Names are registered from results only: a block is known once its KV is, and never for draft tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Tokens
from hashlib import blake2b

DIGEST_BYTES = 16


def chain_seed(model: str, salt: str) -> bytes:
    """h(0) of a model and a salt. Lengths keep ("ab", "c") and ("a", "bc") apart."""
    return blake2b(f"{len(model)}:{model}{salt}".encode(), digest_size=DIGEST_BYTES).digest()


def chain_hash(parent: bytes, content: bytes) -> bytes:
    """h(i + 1) from h(i) and a block's tokens."""
    return blake2b(parent + content, digest_size=DIGEST_BYTES).digest()


def block_content(tokens: Tokens[int]) -> bytes:
    """A block's tokens as bytes, 4 per token."""
    return array("I", tokens).tobytes()


class PrefixCache:
    """Names of blocks, both ways. Knows nothing of references; the pool does."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, tuple[bytes, bytes]] = {}

    def __len__(self) -> int:
        return len(self._name_of)

    def knows(self, block: int) -> bool:
        return block in self._name_of

    def match(
        self, seed: bytes, tokens: Tokens[int], max_blocks: int, links: list[tuple[bytes, bytes]] | None = None
    ) -> tuple[list[int], list[bytes]]:
        """The longest known run of full blocks at the start of `tokens`: (blocks, their names).

        `links` remembers (name, content) of the blocks looked at, for whoever asks again with the same tokens or more.
        """
        blocks: list[int] = []
        names: list[bytes] = []
        parent, size = seed, self.block_size
        links = [] if links is None else links
        for index in range(max_blocks):
            if index < len(links):
                name, content = links[index]
            else:
                content = block_content(tokens[index * size : (index + 1) * size])
                name = chain_hash(parent, content)
                links.append((name, content))
            block = self._block_of.get(name)
            if block is None or self._name_of[block][1] != content:
                break
            blocks.append(block)
            names.append(name)
            parent = name
        return blocks, names

    def register(self, block: int, parent: bytes, tokens: Tokens[int]) -> bytes:
        """Name a full block and return the name. If another block has that name already, that one keeps it."""
        content = block_content(tokens)
        name = chain_hash(parent, content)
        if name not in self._block_of and block not in self._name_of:
            self._block_of[name] = block
            self._name_of[block] = (name, content)
        return name

    def forget(self, block: int) -> None:
        """The block is about to hold something else."""
        name, _ = self._name_of.pop(block)
        del self._block_of[name]

    def check_integrity(self) -> None:
        """Raise AssertionError unless the two maps mirror each other."""
        assert len(self._block_of) == len(self._name_of), "names and blocks differ in number"
        for name, block in self._block_of.items():
            assert self._name_of[block][0] == name, f"block {block} does not carry the name that leads to it"
