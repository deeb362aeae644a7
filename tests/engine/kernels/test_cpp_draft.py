"""A draft's operations at every level of this CPU: products against integers in numpy, the two best against plain
Python.
"""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import noise
from engine.kernels import build, cpp_draft
from engine.kernels.cpp_draft import MARGIN_UNITS, DraftOps, pack, pack_gated
from engine.kernels.ops import ACTIVATIONS, PackedLinear
from tests.engine.kernels.oracle import activation, assert_close, assert_same_bits
from tests.engine.noise_oracle import f32, oracle_bits, oracle_gumbel

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = {"float32": F32, "bfloat16": BF16}
EXAMPLES = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(scope="module")
def ops(cpp_level: str) -> DraftOps:
    return DraftOps(torch.arange(10), cpp_level)


def normal(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_integers(x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """int64 [N, K], float32 [N]: each row in steps of 1 / 127 of its peak; a row of zeros stays one."""
    rows = x.float().numpy()
    peak = np.abs(rows).max(1).astype(np.float32)
    steps = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak > 0)
    return np.rint(rows * steps[:, None]).astype(np.int64), peak / np.float32(127)


def oracle(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float32 [T, N], each of its products rounded by itself."""
    p, unit = in_integers(x)
    q, scale = stored(weight)
    sums = (p @ q.T).astype(np.float32)
    return torch.from_numpy(unit[:, None] * (scale[None] * sums))


def stored(weight: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """int64 [N, K] and float32 scales [N] of a weight by division, as it is rounded once and for all."""
    rows = weight.float().numpy()
    scale = np.maximum(np.abs(rows).max(1), np.float32(1e-30)) / np.float32(127)
    return np.rint(rows / scale[:, None]).astype(np.int64), scale


# ------------------------------------------------------------------------------------------------------ products


@pytest.mark.parametrize(("n", "k"), [(1, 1), (32, 4), (33, 7), (70, 130)])
def test_packed_elements_lie_where_the_drawing_says(ops: DraftOps, n: int, k: int) -> None:
    weight = normal(n, k)
    q, scale = stored(weight)
    tiles = ops.pack(weight).data.numpy()
    step = -(-k // 4) * 128
    assert tiles.shape == (-(-n // 32), step + 128)
    found = np.zeros_like(q)
    for row in range(n):
        for column in range(k):
            found[row, column] = int(tiles[row // 32, column // 4 * 128 + row % 32 * 4 + column % 4]) - 128
    assert np.array_equal(found, q)
    scales = np.ascontiguousarray(tiles[:, step:]).view(np.float32).reshape(-1)
    assert np.array_equal(scales[:n], scale)
    assert not scales[n:].any()
    assert int((tiles[:, :step] != 128).sum()) == int((q != 0).sum()), "what lies beyond is 0"


def test_what_was_int8_becomes_that_again() -> None:
    q = torch.randint(-127, 128, (40, 33), generator=torch.Generator().manual_seed(1))
    q[:, 5] = 127
    scale = torch.rand(40, generator=torch.Generator().manual_seed(2)) * 1e-3 + 1e-5
    found, found_scale = stored(q.float() * scale[:, None])
    assert np.array_equal(found, q.numpy())
    assert np.allclose(found_scale, scale.numpy(), rtol=2e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 1, 1), (3, 33, 7), (9, 95, 64), (17, 64, 577), (2, 200, 1537)])
def test_a_product_is_that_of_the_integers(ops: DraftOps, rows: int, n: int, k: int, dtype: str) -> None:
    x, weight = normal(rows, k, dtype=DTYPES[dtype], seed=1), normal(n, k)
    out = torch.full((rows, n), 7.0)
    ops.linear(x, ops.pack(weight), out)
    assert_same_bits(out, oracle(x, weight))
    # And the integers say what the numbers do: each factor is off by half a step, an error like a random walk's.
    exact = x.double() @ weight.double().T
    steps = x.double().abs().amax(1, keepdim=True) / 127 + weight.double().abs().amax(1)[None] / 127
    assert bool(((out - exact).abs() <= 3 * math.sqrt(k) * steps + 1e-6).all())


@EXAMPLES
@given(st.data())
def test_any_shape(ops: DraftOps, data: st.DataObject) -> None:
    rows, n, k = (data.draw(st.integers(1, most)) for most in (20, 70, 70))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    size = data.draw(st.sampled_from([1e-20, 1e-3, 1.0, 1e4]))
    wide = torch.randn(rows, k + 3, generator=generator) * size
    x = wide.to(data.draw(st.sampled_from([F32, BF16])))[:, :k]  # rows that are strided
    weight = torch.randn(n, k, generator=generator)
    x[data.draw(st.integers(0, rows - 1))] = 0
    weight[data.draw(st.integers(0, n - 1))] = 0
    out = torch.full((rows, n + 2), 5.0)
    ops.linear(x, ops.pack(weight), out[:, :n])
    assert_same_bits(out[:, :n], oracle(x, weight))
    assert bool((out[:, n:] == 5.0).all())
    alone, row = torch.empty(1, n), data.draw(st.integers(0, rows - 1))
    ops.linear(x[row : row + 1], ops.pack(weight), alone)
    assert_same_bits(alone, out[row : row + 1, :n].contiguous())


@pytest.mark.parametrize("size", [127.0, 126.4999, 1.0])
def test_extremes_of_int8(ops: DraftOps, size: float) -> None:
    """All factors at their ends, of either sign: no sum of two or four of them is cut off."""
    k = 1 << 16
    x = torch.full((4, k), size)
    x[1] = -size
    x[2, ::2] = -size
    x[3, 0] = 127
    weight = torch.full((3, k), 127.0)
    weight[1] = -127
    weight[2, 1::2] = -127
    out = torch.empty(4, 3)
    ops.linear(x, ops.pack(weight), out)
    assert_same_bits(out, oracle(x, weight))
    with pytest.raises(RuntimeError, match="65537 columns"):
        ops.linear(torch.ones(1, k + 1), ops.pack(weight), out[:1])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_told(ops: DraftOps, bad: float) -> None:
    x, weight = normal(3, 40, seed=3), ops.pack(normal(50, 40))
    expected, out = torch.empty(3, 50), torch.empty(3, 50)
    ops.linear(x, weight, expected)
    x[1, 39] = bad
    ops.linear(x, weight, out)
    assert bool(out[1].isnan().all())
    assert torch.equal(out[::2], expected[::2])


def test_what_becomes_of_a_sum(ops: DraftOps) -> None:
    """Bias, scale, cap and addition, against float64."""
    x, weight, bias = normal(5, 60, seed=1), normal(70, 60), normal(70, seed=2)
    packed, sums = ops.pack(weight, bias.to(BF16)), oracle(x, weight).double() + bias.to(BF16).double()
    out = torch.empty(5, 70)
    ops.linear(x, packed, out, 0.25, 3.0)
    assert_close(out, 3 * torch.tanh(0.25 * sums / 3), 2e-6)
    rounded = torch.empty(5, 70, dtype=BF16)
    ops.linear(x, packed, rounded)
    assert_close(rounded, sums, 1e-5)
    before = normal(5, 70, seed=4)
    out.copy_(before)
    ops.linear_add(x, packed, 0.5, out)
    assert_close(out, before.double() + 0.5 * sums, 1e-5)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(ops: DraftOps, name: str) -> None:
    x, gate, up = normal(11, 34, seed=1), normal(45, 34) / 5, normal(45, 34, seed=2) / 5
    gate_bias = normal(45, seed=3)
    gates, ups = oracle(x, gate).double() + gate_bias.double(), oracle(x, up).double()
    out = torch.empty(11, 45)
    ops.linear_gated(x, ops.pack_gated(gate, up, gate_bias, None), name, out)
    assert_close(out, activation(name, gates) * ups, 2e-5)
    ops.linear_activation(x, ops.pack(gate, gate_bias), name, out)
    assert_close(out, activation(name, gates), 1e-5)


@pytest.mark.usefixtures("four_threads")
def test_threads_change_nothing(ops: DraftOps) -> None:
    x, weight = normal(12, 576, dtype=BF16), normal(3000, 576, seed=1)
    out = torch.empty(12, 3000)
    ops.linear(x, ops.pack(weight), out)
    assert_same_bits(out, oracle(x, weight))


def test_levels_agree(ops: DraftOps) -> None:
    """Integers are the same everywhere, and so are the two roundings behind them."""
    x, weight = normal(4, 300), ops.pack(normal(100, 300, seed=1))
    out, of_best = torch.empty(4, 100), torch.empty(4, 100)
    ops.linear(x, weight, out)
    DraftOps(torch.arange(1)).linear(x, weight, of_best)
    assert_same_bits(out, of_best)


def test_wrong_shapes_are_refused(ops: DraftOps) -> None:
    weight, x = ops.pack(normal(33, 8)), normal(2, 8)
    for bad_x, out in ((normal(2, 12), torch.empty(2, 33)), (x, torch.empty(2, 65)), (x, torch.empty(3, 33))):
        with pytest.raises(RuntimeError):
            ops.linear(bad_x, weight, out)
    with pytest.raises(RuntimeError, match="float32"):
        ops.linear_add(x, weight, 1.0, torch.empty(2, 33, dtype=BF16))
    with pytest.raises(TypeError, match="embedding"):
        ops.embed(torch.zeros(1, dtype=torch.int32), weight, 1.0, torch.empty(1, 8))


def test_a_gated_tile_holds_both() -> None:
    gate, up = normal(21, 6), normal(21, 6, seed=1)
    both = pack_gated(gate, up)
    assert both.gated
    assert both.out_features == 21
    rows = torch.cat([gate[:16], up[:16], gate[16:], torch.zeros(11, 6), up[16:], torch.zeros(11, 6)])
    assert torch.equal(both.data[:, :256], pack(rows).data[:, :256])


# ------------------------------------------------------------------------------------------------------ the two best

Numbers = tuple[int, int, float]


def two_in_python(logits: list[float], ids: list[int], temperature: float, seed: int, index: int) -> Numbers:
    if any(math.isnan(x) for x in logits) or not math.isfinite(max(logits)):
        return -1, -1, 0.0
    totals = logits
    if temperature > 0:
        with np.errstate(over="ignore"):  # a score may be beyond float32, and is -inf then
            scores = (np.array(logits, np.float32) - np.float32(max(logits))) / np.float32(temperature)
        noises = [np.float32(oracle_gumbel(oracle_bits(seed, index, v))) for v in ids]
        totals = (scores + np.array(noises)).tolist()
    order = sorted(range(len(ids)), key=lambda column: (-totals[column], column))
    if len(order) == 1 or totals[order[1]] == -math.inf:
        return ids[order[0]], -1, 0.0
    return ids[order[0]], ids[order[1]], totals[order[0]] - totals[order[1]]


def two_by(ops: DraftOps, logits: torch.Tensor, ids: list[int] | None, temperatures: list[float]) -> list[Numbers]:
    """Seed 9 + row and output index 3 · row."""
    rows = range(len(logits))
    keys = torch.tensor([noise.row_key(9 + row, 3 * row) for row in rows], dtype=torch.int64)
    numbers = torch.full((len(logits), 3), 77)
    columns = None if ids is None else torch.tensor(ids, dtype=torch.int32)
    level = build.level_number(ops.level)
    cpp_draft.best_two(level, logits, columns, torch.tensor(temperatures), keys, numbers)
    return [(first, second, margin / MARGIN_UNITS) for first, second, margin in numbers.tolist()]


def assert_equal_two(found: list[Numbers], expected: list[Numbers]) -> None:
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    for (_, _, margin), (_, _, wanted) in zip(found, expected, strict=True):
        assert abs(margin - min(wanted, 1e6)) <= 1 / MARGIN_UNITS


@pytest.mark.parametrize("with_ids", [False, True])
def test_the_two_best_are_those_of_plain_python(ops: DraftOps, with_ids: bool) -> None:
    rng = random.Random(7)
    seen: set[bool] = set()
    for _ in range(12):
        num = rng.choice([1, 2, 15, 17, 33, 300])
        ids = sorted(rng.sample(range(49152), num)) if with_ids else list(range(num))
        temperatures = [f32(rng.choice([0.0, 1e-5, 0.3, 0.7, 1.0, 2.5, 40.0])) for _ in range(5)]
        rows = [[f32(rng.gauss(0, 3)) for _ in ids] for _ in temperatures]
        rows[1] = [float(round(x)) for x in rows[1]]
        found = two_by(ops, torch.tensor(rows), ids if with_ids else None, temperatures)
        expected = [
            two_in_python(row, ids, temperature, 9 + at, 3 * at)
            for at, (row, temperature) in enumerate(zip(rows, temperatures, strict=True))
        ]
        assert_equal_two(found, expected)
        seen.update((first == ids[row.index(max(row))]) for (first, _, _), row in zip(found, rows, strict=True))
    assert seen == {True, False}, "noise decides, and doesn't always"


VALUES = st.sampled_from([-math.inf, -8.0, -1.0, -0.0, 0.0, 0.5, 3.0, 7.0, 3e38, -3e38, math.nan, math.inf])


@EXAMPLES
@given(
    st.lists(VALUES | st.floats(-30, 30, width=32), min_size=1, max_size=40), st.sampled_from([0.0, 1e-5, 0.7, 50.0])
)
def test_the_two_best_of_any_row(ops: DraftOps, values: list[float], temperature: float) -> None:
    found = two_by(ops, torch.tensor([values]), None, [temperature])
    assert_equal_two(found, [two_in_python(values, list(range(len(values))), f32(temperature), 9, 0)])


@pytest.mark.usefixtures("four_threads")
def test_the_two_best_of_large_rows(ops: DraftOps) -> None:
    """Flat and peaked, in rows that are strided, among them banned ids; noise for every token is the oracle."""
    generator = torch.Generator().manual_seed(3)
    num = 12_289
    logits = (torch.randn(24, num + 5, generator=generator) * torch.linspace(0.01, 8, 24)[:, None])[:, :num]
    logits[::3, ::4] = -torch.inf
    temperatures = [0.0, 0.7, 1.3] * 8
    ids = torch.randperm(49152, generator=generator)[:num].sort().values
    found = two_by(ops, logits, ids.tolist(), temperatures)
    for row, (first, second, margin) in enumerate(found):
        totals = logits[row].clone()
        if temperatures[row]:
            temperature = torch.tensor(temperatures[row])
            totals = (totals - totals.max()) / temperature + noise.gumbel(9 + row, 3 * row, ids)
        best = totals.topk(2)
        assert [first, second] == ids[best.indices].tolist()
        assert abs(margin - float(best.values[0] - best.values[1])) < 1e-5
    assert len({first for first, _, _ in found}) > 15


def test_a_heads_two_best_go_by_the_targets_ids(ops: DraftOps) -> None:
    ids = torch.tensor([3, 4, 9, 200, 4000])
    own = DraftOps(ids, ops.level)
    x, weight = normal(2, 16), normal(5, 16, seed=1)
    packed: PackedLinear = own.pack(weight)
    keys = torch.tensor([noise.row_key(1, 2), noise.row_key(3, 4)], dtype=torch.int64)
    numbers, logits = own.new_choices(2), torch.empty(2, 5)
    own.linear(x, packed, logits, 2.0)
    own.best_two(logits, torch.tensor([0.0, 0.9]), keys, numbers)
    for row, (temperature, seed, index) in enumerate(((0.0, 1, 2), (0.9, 3, 4))):
        values = (2 * oracle(x, weight))[row].tolist()
        wanted = two_in_python(values, ids.tolist(), f32(temperature), seed, index)
        first, second, margin = numbers[row].tolist()
        assert_equal_two([(first, second, margin / MARGIN_UNITS)], [wanted])
