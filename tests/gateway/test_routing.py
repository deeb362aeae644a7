"""Where requests go: prefixes meet, load is bounded, few move when cells come and go."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing import MIN_BOUND, PREFIX_TOKENS, SLACK, CellLoad, place, prefix_key

KEYS = [prefix_key("m", "", [index, 7]) for index in range(3000)]


def cells(*workers: int, live: int = 0) -> list[CellLoad]:
    return [CellLoad(f"cell-{index}", count, live) for index, count in enumerate(workers)]


def test_requests_with_one_beginning_meet() -> None:
    shared = list(range(PREFIX_TOKENS))
    assert prefix_key("m", "", [*shared, 1]) == prefix_key("m", "", [*shared, 2])
    others = [("m", "", shared[:-1]), ("m", "", [*shared[:-1], 0]), ("n", "", shared), ("m", "tenant", shared)]
    assert len({prefix_key(*one) for one in [*others, ("m", "", shared)]}) == 5
    assert prefix_key("m", "", [1, 2]) != prefix_key("m", "", [12])


def test_keys_spread_by_workers() -> None:
    counts = Counter(place(key, cells(1, 2, 3)) for key in KEYS)
    # Shares of 1/6, 1/3 and 1/2; five standard deviations of a binomial are below 0.05.
    for name, share in (("cell-0", 1 / 6), ("cell-1", 1 / 3), ("cell-2", 1 / 2)):
        assert abs(counts[name] / len(KEYS) - share) < 0.05


def test_only_the_keys_of_a_lost_cell_move() -> None:
    before = {key: place(key, cells(1, 1, 1, 1)) for key in KEYS}
    after = {key: place(key, cells(1, 1, 1)) for key in KEYS}
    assert all(before[key] == after[key] for key in KEYS if before[key] != "cell-3")
    assert len({after[key] for key in KEYS if before[key] == "cell-3"}) == 3


def test_one_popular_prefix_spills_over_and_always_to_the_same_cell() -> None:
    live: Counter[str] = Counter()
    order = []
    for _ in range(400):
        name = place(KEYS[0], [CellLoad(f"cell-{index}", 1, live[f"cell-{index}"]) for index in range(4)])
        live[name] += 1
        order.append(name)
    assert len(set(order[:MIN_BOUND])) == 1
    assert max(live.values()) <= SLACK * 400 / 4 + 1
    first, second = order[0], order[MIN_BOUND]
    assert live[first] >= live[second] >= max(count for name, count in live.items() if name not in (first, second))


@given(st.binary(min_size=1, max_size=16), st.lists(st.tuples(st.integers(1, 9), st.integers(0, 500)), min_size=1))
def test_somebody_takes_it_and_nobody_beyond_the_bound(key: bytes, given_cells: list[tuple[int, int]]) -> None:
    choices = [CellLoad(f"c{index}", workers, live) for index, (workers, live) in enumerate(given_cells)]
    name = place(key, choices)
    (chosen,) = (cell for cell in choices if cell.name == name)
    share = (sum(cell.live for cell in choices) + 1) * chosen.workers / sum(cell.workers for cell in choices)
    assert chosen.live < max(MIN_BOUND, SLACK * share + 1)
    assert place(key, list(reversed(choices))) == name


def test_without_cells_there_is_nothing_to_choose() -> None:
    with pytest.raises(ValueError, match="no cell"):
        place(b"k", [])
