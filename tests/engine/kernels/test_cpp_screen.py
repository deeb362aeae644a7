"""The screened head at every level of this CPU: the tokens of all logits, whatever the weights are."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import noise
from engine.kernels import build
from engine.kernels.cpp_ops import CppOps
from engine.kernels.cpp_screen import choose_head, pack_screen
from tests.engine.kernels.conftest import CPU_FLAGS, supported_levels

SEED = 0xFEED_BEEF_0BAD_CAFE
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(scope="module", params=list(CPU_FLAGS))
def ops(request: pytest.FixtureRequest) -> CppOps:
    if request.param not in supported_levels():
        pytest.skip(f"the CPU has no {request.param}")
    try:
        return CppOps(request.param)
    except build.NoKernels as error:
        pytest.skip(str(error))


def keys_of(num_rows: int) -> torch.Tensor:
    return torch.tensor([noise.row_key(SEED + row, row) for row in range(num_rows)], dtype=torch.int64)


def logits_of(ops: CppOps, x: torch.Tensor, weight: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """What the whole product gives."""
    logits = torch.empty(len(x), len(weight))
    ops.linear(x, ops.pack(weight), logits, scale)
    return logits


def screened(
    ops: CppOps, x: torch.Tensor, weight: torch.Tensor, temperatures: torch.Tensor, scale: float = 1.0
) -> tuple[list[int], int]:
    """The tokens, and how many of the next calls will do without the screen."""
    token_ids = torch.full((len(x),), -7)
    num_skipped = torch.zeros(1, dtype=torch.int64)
    screen = pack_screen(weight)
    assert screen is not None
    logits = torch.full((len(x), len(weight)), math.nan)
    keys = keys_of(len(x))
    packed = ops.pack(weight)
    level = build.level_number(ops.level)
    choose_head(
        level, x, packed, screen, scale, 0.0, temperatures, keys, num_skipped, logits, token_ids, most_rows=len(x)
    )
    return token_ids.tolist(), int(num_skipped)


def expected(
    ops: CppOps, x: torch.Tensor, weight: torch.Tensor, temperatures: torch.Tensor, scale: float = 1.0
) -> list[int]:
    chosen: list[int] = ops.choose(logits_of(ops, x, weight, scale), temperatures, keys_of(len(x))).tolist()
    return chosen


def head(num_columns: int, depth: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A head like those of models: rows of unlike sizes, some dimensions larger than others."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_columns, depth, generator=generator) * torch.rand(num_columns, 1, generator=generator)
    weight[:, ::37] *= 4
    return weight.to(dtype)


def read(weight: torch.Tensor, num_rows: int, spread: float, seed: int = 1) -> torch.Tensor:
    """What a head reads: near to some of its rows, with outliers."""
    generator = torch.Generator().manual_seed(seed)
    near = torch.randint(len(weight), (num_rows,), generator=generator)
    x = weight[near].float() + torch.randn(num_rows, weight.shape[1], generator=generator) * spread
    x[:, 3 % weight.shape[1]] *= 16
    return x.to(weight.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_columns", "depth"), [(4096, 96), (2011, 577), (33, 8), (1, 1), (700, 1030)])
def test_tokens_are_those_of_all_logits(ops: CppOps, dtype: str, num_columns: int, depth: int) -> None:
    weight = head(num_columns, depth, DTYPES[dtype])
    seen = set()
    for num_rows in (1, 2, 3, 8, 13):
        x = read(weight, num_rows, 0.5, seed=num_rows)
        for temperature in (0.0, 0.3, 1.0, 3.0):
            temperatures = torch.full((num_rows,), temperature)
            temperatures[1::3] = 0.0
            tokens, _ = screened(ops, x, weight, temperatures)
            assert tokens == expected(ops, x, weight, temperatures)
            seen.update(tokens)
    assert len(seen) > min(8, num_columns - 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_most_of_the_head_is_left_alone(ops: CppOps, dtype: str) -> None:
    """Whether the screen, not the whole product, decides: tiles that can't win are destroyed and nobody notices."""
    weight = head(8192, 128, DTYPES[dtype])
    x = read(weight, 4, 0.3)
    temperatures = torch.tensor([0.0, 0.5, 0.0, 0.7])
    wanted = expected(ops, x, weight, temperatures)
    screen, packed = pack_screen(weight), ops.pack(weight)
    assert screen is not None
    logits = logits_of(ops, x, weight)
    needed = set(logits.topk(40).indices.flatten().div(32, rounding_mode="floor").tolist())
    for tile in set(range(len(packed.data))) - needed:
        packed.data[tile] = math.nan
    assert len(needed) < 160
    token_ids, num_skipped = torch.empty(4, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    level = build.level_number(ops.level)
    choose_head(level, x, packed, screen, 1.0, 0.0, temperatures, keys_of(4), num_skipped, logits, token_ids)
    assert token_ids.tolist() == wanted
    assert int(num_skipped) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_lowest_id(ops: CppOps, dtype: str) -> None:
    """Equal columns in one tile and far apart, all columns equal, all zeros."""
    weight = head(3000, 64, DTYPES[dtype])
    x = read(weight, 2, 0.1)
    best = logits_of(ops, x, weight).argmax(-1).tolist()
    weight[2999] = weight[best[0]]
    weight[7] = weight[best[0]]
    weight[2000] = weight[2001] = weight[best[1]]
    greedy = torch.zeros(2)
    tokens, _ = screened(ops, x, weight, greedy)
    assert tokens == [min(7, best[0]), min(2000, best[1])] == expected(ops, x, weight, greedy)
    for flat in (weight[:1].expand(3000, 64).contiguous(), torch.zeros_like(weight)):
        tokens, num_skipped = screened(ops, x, flat, greedy)
        assert tokens == [0, 0]
        assert num_skipped > 0, "where every tile is a candidate, all is multiplied"
        temperatures = torch.ones(2)
        assert screened(ops, x, flat, temperatures)[0] == expected(ops, x, flat, temperatures)
    assert screened(ops, torch.zeros_like(x), weight, greedy)[0] == [0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_told(ops: CppOps, dtype: str, bad: float) -> None:
    weight = head(500, 40, DTYPES[dtype])
    x = read(weight, 3, 0.3)
    temperatures = torch.tensor([0.0, 0.0, 1.0])
    wanted = expected(ops, x, weight, temperatures)
    x[1, 5] = bad
    tokens, _ = screened(ops, x, weight, temperatures)
    assert tokens == expected(ops, x, weight, temperatures)
    assert tokens[0] == wanted[0]
    assert tokens[2] == wanted[2]
    assert tokens[1] == -1
    weight[77, 3] = bad
    assert pack_screen(weight) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-40, 1e-30, 1e-18, 1e18, 1e30, 3e38])
def test_sizes_near_the_ends_of_float32(ops: CppOps, dtype: str, size: float) -> None:
    """Logits may be infinite, or all be 0; a column may be enormous beside the others."""
    weight, greedy = head(600, 33, DTYPES[dtype]), torch.zeros(3)
    x = read(weight, 3, 0.3)
    for columns, rows in ((size, 1.0), (1.0, size), (size, size), (size, 1 / size)):
        w, r = (weight.float() * columns).to(weight.dtype), (x.float() * rows).to(weight.dtype)
        if w.isfinite().all() and pack_screen(w) is not None:
            assert screened(ops, r, w, greedy)[0] == expected(ops, r, w, greedy)
    weight[300] = (weight[300].float() * size).to(weight.dtype)
    if weight.isfinite().all() and pack_screen(weight) is not None:
        assert screened(ops, x, weight, greedy)[0] == expected(ops, x, weight, greedy)


def test_a_scale_is_part_of_the_logits(ops: CppOps) -> None:
    """It rounds: logits that differ without it may be equal with it."""
    weight = head(2000, 64, torch.float32)
    x = read(weight, 6, 0.2)
    temperatures = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.4, 0.0])
    for scale in (1 / 7, 0.0625, 13.0, 1e-9):
        assert screened(ops, x, weight, temperatures, scale)[0] == expected(ops, x, weight, temperatures, scale)


NUMBERS = st.sampled_from([0.0, 1.0, -1.0, 0.5, 127.0, -126.5, 1e-3, 3e-39, 1e4, -0.0]) | st.floats(-4, 4, width=16)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_weights_give_the_tokens_of_all_logits(ops: CppOps, data: st.DataObject) -> None:
    """Columns that differ in their last bits from each other, so that only exact logits can tell."""
    depth = data.draw(st.integers(1, 12))
    rows = data.draw(st.lists(st.lists(NUMBERS, min_size=depth, max_size=depth), min_size=1, max_size=4))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    repeats = data.draw(st.integers(1, 60))
    weight = torch.tensor(rows).repeat(repeats, 1)
    nudged = data.draw(st.lists(st.tuples(st.integers(0, len(weight) - 1), st.integers(0, depth - 1)), max_size=8))
    for row, place in nudged:
        weight[row, place] = torch.nextafter(weight[row, place], torch.tensor(data.draw(st.sampled_from([-9e9, 9e9]))))
    x = torch.tensor(data.draw(st.lists(st.lists(NUMBERS, min_size=depth, max_size=depth), min_size=1, max_size=3)))
    weight, x = weight.to(dtype), x.to(dtype)
    if pack_screen(weight) is None:
        return
    temperatures = torch.tensor([data.draw(st.sampled_from([0.0, 0.7, 20.0])) for _ in x])
    assert screened(ops, x, weight, temperatures)[0] == expected(ops, x, weight, temperatures)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bounds_hold(ops: CppOps, dtype: str) -> None:
    """Against float64: no column's error is above what its facts say, and the facts aren't idle."""
    weight = head(320, 200, DTYPES[dtype])
    screen = pack_screen(weight)
    assert screen is not None
    facts = screen[:, -3 * 32 * 4 :].contiguous().view(torch.float32).view(-1, 3, 32).double()
    scale, error, norm = (facts[:, i].reshape(-1) for i in range(3))
    q = screen[:, : 50 * 128].int().view(-1, 50, 32, 4).permute(0, 2, 1, 3).reshape(320, 200) - 128
    exact = weight.double()
    errors = (exact - q.double() * scale[:, None]).norm(dim=1)
    assert (errors <= error).all()
    assert (error <= errors * 1.00001).all()
    assert (exact.norm(dim=1) + errors <= norm).all()
    assert (norm <= (exact.norm(dim=1) + errors) * 1.00001).all()
    assert (errors < 0.03 * exact.norm(dim=1)).all()


@pytest.mark.usefixtures("four_threads")
def test_threads_change_nothing(ops: CppOps) -> None:
    weight = head(20_000, 96, torch.bfloat16)
    x = read(weight, 8, 0.5)
    temperatures = torch.tensor([0.0, 1.0] * 4)
    many, _ = screened(ops, x, weight, temperatures)
    assert many == expected(ops, x, weight, temperatures)
    assert [screened(ops, x[:1], weight, temperatures[:1])[0][0]] == many[:1]


def test_after_many_candidates_the_screen_is_left_alone_for_a_while(ops: CppOps) -> None:
    weight = torch.ones(4096, 16)
    x, screen, packed = torch.ones(1, 16), pack_screen(weight), ops.pack(weight)
    num_skipped, token_ids = torch.zeros(1, dtype=torch.int64), torch.empty(1, dtype=torch.int64)
    level, seen = build.level_number(ops.level), []
    for _ in range(3):
        choose_head(
            level, x, packed, screen, 1.0, 0.0, torch.zeros(1), keys_of(1), num_skipped, torch.empty(1, 4096), token_ids
        )
        seen.append(int(num_skipped))
        assert token_ids.tolist() == [0]
    assert seen == [seen[0], seen[0] - 1, seen[0] - 2]
    assert seen[0] > 2
