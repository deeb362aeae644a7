"""What sequences put out recently, so that the next ones of the same tenant can copy from it.

A tenant is known by an opaque name; nobody's memory is ever searched for another's. It can show only in how fast tokens
come, never in which: drafts change no token. Still, without a name there is no memory unless one is asked for.

Bounds: so many tokens of all tenants together, a quarter of them for each, and an age. Each tenant has two generations:

    older  |=====================|   dropped when the younger one takes its place, or when too old
    younger|=========            |   appended to; full, or half the age old: it becomes the older one

so that forgetting is O(1), and a token stays for half its bounds at least. When all tenants together are too many
tokens, whoever was active least recently loses all. The clock is an argument.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from drafting.suffix_index import Match, SuffixIndex

END = -1
"""after each output; it matches nothing"""
SHARE = 4
"""one tenant may hold 1/SHARE of all tokens"""
MAX_TENANTS = 1024
SWEEPS = 16
"""times per age that what is too old is looked for; it is not found by anybody meanwhile"""


@dataclass(slots=True)
class Found:
    """A match in a memory."""

    tokens: Sequence[int]
    match: Match

    def following(self, count: int) -> list[int]:
        """At most so many tokens from the match on, within its output."""
        run: list[int] = []
        for token_id in self.tokens[self.match.position : self.match.position + count]:
            if token_id == END:
                break
            run.append(token_id)
        return run


class _Generation:
    __slots__ = ("index", "since_s", "stored", "tokens")

    def __init__(self, now_s: float) -> None:
        self.since_s = now_s
        self.tokens = array("q")
        self.index = SuffixIndex(self.tokens)
        self.stored: dict[int, int] = {}
        """tokens of each output that are here or in an older generation"""


@dataclass(slots=True)
class _Tenant:
    younger: _Generation
    older: _Generation | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.younger.tokens) + (len(self.older.tokens) if self.older else 0)


@dataclass(slots=True)
class OutputMemory:
    """See the module's text."""

    max_tokens: int
    """of all tenants together; 0: nothing is remembered"""
    max_age_s: float
    for_nameless: bool = False
    """whether sequences without a tenant share a memory among themselves; otherwise they have none"""
    _tenants: OrderedDict[bytes, _Tenant] = field(default_factory=OrderedDict, init=False)
    """whoever was active last comes last"""
    num_tokens: int = field(default=0, init=False)
    _sweep_at_s: float = field(default=float("-inf"), init=False)

    def __len__(self) -> int:
        """Tenants."""
        return len(self._tenants)

    def serves(self, tenant: bytes) -> bool:
        """Whether this tenant has, or may have, a memory."""
        return self.max_tokens > 0 and (self.for_nameless or bool(tenant))

    def remember(self, tenant: bytes, key: int, output: Sequence[int], now_s: float) -> None:
        """Take in an output. Outputs with the same key are the same as far as both go: the common part is kept once."""
        if not self.serves(tenant):
            return
        self.expire(now_s)
        of_tenant = self._tenants.get(tenant)
        if of_tenant is None:
            of_tenant = self._tenants[tenant] = _Tenant(_Generation(now_s))
        self._tenants.move_to_end(tenant)
        younger, older = of_tenant.younger, of_tenant.older
        known = younger.stored.get(key, older.stored.get(key, 0) if older else 0)
        half = max(1, self.max_tokens // SHARE // 2)
        output = output[known:]
        new = output[max(0, len(output) - half + 1) :]
        if not new:
            return
        if len(younger.tokens) + len(new) + 1 > half:
            self._turn_over(of_tenant, now_s)
            younger = of_tenant.younger
        younger.stored[key] = known + len(output)
        younger.tokens.extend(new)
        younger.tokens.append(END)
        younger.index.learn()
        self.num_tokens += len(new) + 1
        while self.num_tokens > self.max_tokens or len(self._tenants) > MAX_TENANTS:
            self._drop(next(iter(self._tenants)))

    def find(self, tenant: bytes, suffix: Sequence[int], now_s: float) -> Found | None:
        """The longest match within the tenant's own memory, the younger of equally long ones."""
        of_tenant = self._tenants.get(tenant)
        if of_tenant is None:
            return None
        best: Found | None = None
        for generation in (of_tenant.younger, of_tenant.older):
            if generation is None or now_s - generation.since_s > self.max_age_s:
                continue
            match = generation.index.find(suffix)
            if match is not None and (best is None or match.length > best.match.length):
                best = Found(generation.tokens, match)
        return best

    def expire(self, now_s: float) -> None:
        """Forget what is too old, of all tenants; cheap, unless it is time for it."""
        if now_s < self._sweep_at_s:
            return
        self._sweep_at_s = now_s + self.max_age_s / SWEEPS
        for name in list(self._tenants):
            of_tenant = self._tenants[name]
            older = of_tenant.older
            if older is not None and now_s - older.since_s > self.max_age_s:
                self.num_tokens -= len(older.tokens)
                of_tenant.older = None
            if now_s - of_tenant.younger.since_s > self.max_age_s:
                self._drop(name)
            elif now_s - of_tenant.younger.since_s > self.max_age_s / 2:
                self._turn_over(of_tenant, now_s)

    def _turn_over(self, of_tenant: _Tenant, now_s: float) -> None:
        if of_tenant.older is not None:
            self.num_tokens -= len(of_tenant.older.tokens)
        of_tenant.older, of_tenant.younger = of_tenant.younger, _Generation(now_s)

    def _drop(self, name: bytes) -> None:
        self.num_tokens -= self._tenants.pop(name).num_tokens
