"""Rotation and writing in C++ at every level: what queries and the cache's own memory hold, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels import build, cpp_attention
from engine.kernels.build import level_number
from engine.kernels.cpp_attention import CppCache
from engine.kernels.ops import HeadNorms, HeadShape, Rotary, StepPlan
from tests.engine.kernels.conftest import supported_levels
from tests.engine.kernels.oracle import assert_same_bits, rms_norm

LEVELS = [level_number(level) for level in supported_levels()]
F32, BF16 = torch.float32, torch.bfloat16
EMPTY = torch.tensor([])


@pytest.fixture(autouse=True, scope="module")
def operations() -> Iterator[None]:
    try:
        cpp_attention.load_operations()
    except build.NoKernels as error:
        pytest.skip(str(error))
    before = torch.ops.tandem.num_threads()
    yield
    torch.ops.tandem.set_threads(before, [])


def plan_of(positions: torch.Tensor, slots: torch.Tensor) -> StepPlan:
    return StepPlan(EMPTY, positions.to(torch.int32), slots, EMPTY, EMPTY, EMPTY, EMPTY, 0, 0)


def stored(cache: CppCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [slots, kv_heads, head_dim], by the drawing in csrc/attention_cache.h."""
    keys = cache.keys.permute(0, 2, 4, 1, 3, 5).flatten(4).flatten(0, 2)
    values = cache.values.permute(0, 2, 4, 1, 3).flatten(0, 2)
    return keys, values


def turned(x: torch.Tensor, rotary: Rotary, positions: torch.Tensor) -> torch.Tensor:
    """float64 [T, heads, D], pair by pair."""
    out, half = x.clone(), rotary.rotary_dim // 2
    for pair in range(half):
        a, b = (2 * pair, 2 * pair + 1) if rotary.interleaved else (pair, pair + half)
        cosine = rotary.table[positions, pair].double()[:, None]
        sine = rotary.table[positions, half + pair].double()[:, None]
        out[..., a] = x[..., a] * cosine - x[..., b] * sine
        out[..., b] = x[..., b] * cosine + x[..., a] * sine
    return out


def assert_near(found: torch.Tensor, exact: torch.Tensor) -> None:
    """A few roundings in float32, then one to the dtype."""
    unit = 1e-6 if found.dtype == F32 else 2.0**-8
    scale = exact.abs() + exact.abs().amax(-1, keepdim=True) * 2e-6
    assert ((found.double() - exact).abs() <= scale * unit + exact.abs().amax(-1, keepdim=True) * 1e-6).all()


@st.composite
def cases(draw: st.DrawFn) -> tuple[HeadShape, HeadNorms | None, Rotary | None, torch.dtype, int, int]:
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    head_dim = draw(st.sampled_from((2, 6, 16, 24, 64, 80, 96, 128, 256)))
    random = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    norms = rotary = None
    if draw(st.booleans()):
        weights = torch.randn(2, head_dim, generator=random)
        norms = HeadNorms(weights[0], weights[1], draw(st.sampled_from((1e-6, 1e-2))))
    if draw(st.booleans()):
        # Whole heads, which whole vectors turn, as often as some part of one.
        rotary_dim = head_dim if draw(st.booleans()) else draw(st.integers(1, head_dim // 2)) * 2
        rotary = Rotary(torch.randn(50, rotary_dim, generator=random), rotary_dim, draw(st.booleans()))
    heads = HeadShape(kv_heads * group, kv_heads, head_dim)
    block_size = draw(st.sampled_from((2, 8, 16, 24, 32)))
    return heads, norms, rotary, draw(st.sampled_from((F32, BF16))), block_size, draw(st.integers(1, 40))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(case=cases(), level=st.sampled_from(LEVELS or [0]), threads=st.sampled_from((1, 3)))
def test_a_plain_oracle_in_float64(
    case: tuple[HeadShape, HeadNorms | None, Rotary | None, torch.dtype, int, int], level: int, threads: int
) -> None:
    heads, norms, rotary, dtype, block_size, num_tokens = case
    torch.ops.tandem.set_threads(threads, [])
    random = torch.Generator().manual_seed(num_tokens)
    width = (heads.num_heads + 2 * heads.kv_heads) * heads.head_dim
    wide = torch.randn(num_tokens, width + 3, generator=random)
    qkv = wide[:, 1:-2]
    positions = torch.randint(50, (num_tokens,), generator=random)
    slots = torch.randperm(192, generator=random)[:num_tokens]
    cache = cpp_attention.make_cache(192 // block_size, block_size, heads, dtype)
    queries = torch.full((num_tokens, heads.num_heads, heads.head_dim), torch.nan, dtype=dtype)
    cpp_attention.rotate_write(level, qkv, heads, norms, rotary, plan_of(positions, slots), cache, queries)

    split = (heads.num_heads, heads.kv_heads, heads.kv_heads)
    query, key, value = qkv.double().unflatten(1, (-1, heads.head_dim)).split(split, dim=1)
    if norms is not None:
        query, key = rms_norm(query, norms.query, norms.eps), rms_norm(key, norms.key, norms.eps)
    if rotary is not None:
        query, key = turned(query, rotary, positions), turned(key, rotary, positions)
    keys, values = stored(cache)
    assert_near(queries, query)
    assert_near(keys[slots], key)
    assert_same_bits(values[slots], value.to(dtype))
    others = torch.ones(len(keys), dtype=torch.bool)
    others[slots] = False
    assert not keys[others].any()
    assert not values[others].any()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_tokens_bits_are_its_own(level: int, interleaved: bool) -> None:
    heads = HeadShape(9, 3, 72)
    random = torch.Generator().manual_seed(1)
    qkv = torch.randn(90, 15 * 72, generator=random)
    norms = HeadNorms(torch.randn(72, generator=random), torch.randn(72, generator=random), 1e-6)
    rotary = Rotary(torch.randn(90, 40, generator=random), 40, interleaved)
    positions = slots = torch.arange(90)

    def run(runs: list[slice], threads: int) -> tuple[torch.Tensor, ...]:
        torch.ops.tandem.set_threads(threads, [])
        cache = cpp_attention.make_cache(6, 16, heads, BF16)
        queries = torch.zeros(90, 9, 72, dtype=BF16)
        for part in runs:
            plan = plan_of(positions[part], slots[part])
            cpp_attention.rotate_write(level, qkv[part], heads, norms, rotary, plan, cache, queries[part])
        return queries, cache.keys, cache.values

    whole = run([slice(0, 90)], 1)
    chunks = [[slice(start, min(start + size, 90)) for start in range(0, 90, size)] for size in (1, 5, 7)]
    for runs, threads in ([slice(0, 90)], 4), *((runs, 2) for runs in chunks):
        for found, expected in zip(run(runs, threads), whole, strict=True):
            assert_same_bits(found, expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_what_is_no_number_is_kept_as_zero(level: int, dtype: torch.dtype) -> None:
    heads = HeadShape(1, 1, 24)
    qkv = torch.randn(4, 72)
    faults = torch.tensor([torch.nan, torch.inf, -torch.inf, 3.4e38])
    qkv[:, 25] = qkv[:, 50] = faults  # the last is beyond bfloat16 once rounded
    queries = torch.empty(4, 1, 24, dtype=dtype)
    cache = cpp_attention.make_cache(1, 16, heads, dtype)
    slots = torch.tensor([3, 9, 2, 15])
    cpp_attention.rotate_write(level, qkv, heads, None, None, plan_of(slots, slots), cache, queries)
    keys, values = stored(cache)
    kept = 3.4e38 if dtype == F32 else 0.0
    assert keys[slots, 0, 1].tolist() == pytest.approx([0.0, 0.0, 0.0, kept])
    assert values[slots, 0, 2].tolist() == pytest.approx([0.0, 0.0, 0.0, kept])
    assert_same_bits(keys[slots, 0, 2:], qkv[:, 26:48].to(dtype))
    again = cpp_attention.make_cache(1, 16, heads, dtype)
    rounded = qkv.to(dtype).view(4, 3, 24)
    cpp_attention.write(level, rounded[:, 1:2], rounded[:, 2:], slots, again)
    assert_same_bits(again.keys, cache.keys)
    assert_same_bits(again.values, cache.values)


def test_what_would_write_to_foreign_memory_is_refused() -> None:
    heads = HeadShape(2, 1, 16)
    cache = cpp_attention.make_cache(2, 16, heads, F32)
    rotary = Rotary(torch.randn(10, 16), 16)
    qkv, queries = torch.randn(1, 64), torch.empty(1, 2, 16)

    def run(position: int, slot: int, rotary: Rotary = rotary, qkv: torch.Tensor = qkv) -> None:
        plan = plan_of(torch.tensor([position]), torch.tensor([slot]))
        cpp_attention.rotate_write(LEVELS[0], qkv, heads, None, rotary, plan, cache, queries)

    run(9, 31)
    for slot in (32, -1):
        with pytest.raises(RuntimeError, match=f"slot {slot}"):
            run(9, slot)
    with pytest.raises(RuntimeError, match="position 10"):
        run(10, 0)
    with pytest.raises(RuntimeError, match="rotary_dim 18"):
        run(0, 0, Rotary(torch.randn(10, 18), 18))
    with pytest.raises(RuntimeError, match="doesn't hold"):
        run(0, 0, qkv=torch.randn(1, 65))
