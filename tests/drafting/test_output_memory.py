"""Tenants stay apart, bounds hold, and what is within them is found."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from drafting.output_memory import MAX_TENANTS, SHARE, OutputMemory

A, B = b"a", b"b"
TEXT = [1, 2, 3, 4, 5, 6, 7, 8]


def memory(max_tokens: int = 1000, max_age_s: float = 100.0, for_nameless: bool = False) -> OutputMemory:
    return OutputMemory(max_tokens, max_age_s, for_nameless)


def following(of: OutputMemory, tenant: bytes, suffix: list[int], now_s: float = 0.0, count: int = 9) -> list[int]:
    found = of.find(tenant, suffix, now_s)
    return [] if found is None else found.following(count)


def test_a_tenants_output_is_found_by_itself_alone() -> None:
    made = memory()
    made.remember(A, 1, TEXT, 0.0)
    assert following(made, A, [2, 3]) == [4, 5, 6, 7, 8]
    assert following(made, A, [2, 3], count=2) == [4, 5]
    assert following(made, B, [2, 3]) == following(made, b"", [2, 3]) == []
    made.remember(B, 1, [9, 9, 2, 3, 0], 0.0)
    assert following(made, B, [2, 3]) == [0]
    assert following(made, A, [2, 3]) == [4, 5, 6, 7, 8]


def test_the_nameless_have_none_unless_asked_for() -> None:
    made = memory()
    made.remember(b"", 1, TEXT, 0.0)
    assert (made.serves(b""), made.num_tokens, following(made, b"", [2, 3])) == (False, 0, [])
    shared = memory(for_nameless=True)
    shared.remember(b"", 1, TEXT, 0.0)
    assert following(shared, b"", [2, 3]) == [4, 5, 6, 7, 8]
    assert following(shared, A, [2, 3]) == []
    assert not memory(0).serves(A)


def test_outputs_never_run_into_each_other() -> None:
    made = memory()
    made.remember(A, 1, [1, 2], 0.0)
    made.remember(A, 2, [3, 4], 0.0)
    assert following(made, A, [1, 2]) == following(made, A, [2, 3]) == []
    made.remember(A, 3, [1, 2, 3, 4], 0.0)
    assert following(made, A, [2, 3]) == [4]


def test_the_same_output_is_kept_once_and_goes_on() -> None:
    made = memory()
    made.remember(A, 1, TEXT[:4], 0.0)
    held = made.num_tokens
    made.remember(A, 1, TEXT[:4], 0.0)
    made.remember(A, 1, TEXT[:2], 0.0)
    assert made.num_tokens == held == 5
    made.remember(A, 1, TEXT, 0.0)
    assert following(made, A, [5, 6]) == [7, 8]
    assert made.num_tokens == held + 5
    made.remember(A, 2, TEXT[:4], 0.0)
    assert made.num_tokens == held + 10


def test_what_is_too_old_is_never_found_and_goes() -> None:
    made = memory(max_age_s=100.0)
    made.remember(A, 1, TEXT, 0.0)
    made.remember(A, 2, [20, 21, 22], 60.0)
    assert following(made, A, [2, 3], 100.0) == [4, 5, 6, 7, 8]
    assert following(made, A, [2, 3], 100.1) == []
    assert following(made, A, [20, 21], 159.0) == [22]
    assert following(made, A, [20, 21], 161.0) == []
    made.expire(161.0)
    assert (len(made), made.num_tokens) == (0, 0)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_bounds_hold_and_the_latest_output_is_there(seed: int) -> None:
    """Random tenants, lengths and pauses; tokens are unique, so that whatever is found names its tenant."""
    source = random.Random(seed)
    made = memory(max_tokens=200, max_age_s=50.0)
    now_s, fresh = 0.0, 0
    owner: dict[int, bytes] = {}
    for number in range(60):
        now_s += source.choice([0.0, 1.0, 20.0])
        tenant = source.choice([A, B, b"c", b"d", b"e", b"f"])
        output = list(range(fresh, fresh + source.randint(3, 40)))
        fresh += len(output)
        owner |= dict.fromkeys(output, tenant)
        made.remember(tenant, number, output, now_s)
        assert made.num_tokens <= 200
        assert made.num_tokens == sum(one.num_tokens for one in made._tenants.values())
        assert all(one.num_tokens <= 200 // SHARE for one in made._tenants.values())
        assert following(made, tenant, output[-3:-1], now_s) == output[-1:]
        for other in (A, B, b"c", b"d", b"e", b"f"):
            start = source.randrange(fresh - 1)
            found = following(made, other, [start, start + 1], now_s)
            assert all(owner[token] == other for token in found)


def test_tenants_are_bounded() -> None:
    made = memory(max_tokens=10**6)
    for number in range(MAX_TENANTS + 5):
        made.remember(str(number).encode(), 1, TEXT, 0.0)
    assert len(made) == MAX_TENANTS
    assert following(made, b"4", [2, 3]) == []
    assert following(made, b"5", [2, 3]) != []
