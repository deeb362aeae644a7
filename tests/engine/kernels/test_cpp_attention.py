"""The C++ attention at every level: hypothesis draws shapes for a plain float64 oracle, and a token's bits are its own.

Caches begin as NaN here, not zeros: whatever is read without having been written shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels import build, cpp_attention
from engine.kernels.build import level_number
from engine.kernels.ops import AttentionRule, HeadShape, StepPlan
from tests.engine.kernels.conftest import supported_levels
from tests.engine.kernels.oracle import assert_same_bits

LEVELS = [level_number(level) for level in supported_levels()]
F32, BF16 = torch.float32, torch.bfloat16
INT32 = torch.int32

Row = tuple[int, int, int]
"""sequence, first position, end"""


@pytest.fixture(autouse=True, scope="module")
def operations() -> Iterator[None]:
    try:
        cpp_attention.load_operations()
    except build.NoKernels as error:
        pytest.skip(str(error))
    before = torch.ops.tandem.num_threads()
    yield
    torch.ops.tandem.set_threads(before, [])


@dataclass(frozen=True)
class Case:
    """Heads, a rule, a dtype, and rows of a step: (context before it, tokens in it)."""

    heads: HeadShape
    rows: list[tuple[int, int]]
    dtype: torch.dtype = BF16
    block_size: int = 16
    rule: AttentionRule = field(default_factory=lambda: AttentionRule(0.2))
    block_seed: int = 0
    """of where the blocks lie"""

    def all_rows(self) -> list[Row]:
        return [(index, before, before + new) for index, (before, new) in enumerate(self.rows)]


class Sequences:
    """A case's queries, keys and values, the latter two written to a cache of NaN."""

    def __init__(self, case: Case, level: int) -> None:
        self.case, self.level = case, level
        heads, random = case.heads, torch.Generator().manual_seed(5)

        def draw(length: int, num_heads: int) -> torch.Tensor:
            return torch.randn((length, num_heads, heads.head_dim), generator=random).to(case.dtype)

        lengths = [before + new for before, new in case.rows]
        self.queries = [draw(length, heads.num_heads) for length in lengths]
        self.keys = [draw(length, heads.kv_heads) for length in lengths]
        self.values = [draw(length, heads.kv_heads) for length in lengths]
        counts = [-(-length // case.block_size) for length in lengths]
        num_blocks = sum(counts) + 2
        ids = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(case.block_seed)).tolist()
        self.tables = [[ids.pop() for _ in range(count)] for count in counts]
        self.spare = ids[0]
        self.cache = cpp_attention.make_cache(num_blocks, case.block_size, heads, case.dtype)
        self.cache.keys.fill_(torch.nan)
        self.cache.values.fill_(torch.nan)
        slots = [self.slot(index, position) for index, length in enumerate(lengths) for position in range(length)]
        keys, values = torch.cat(self.keys), torch.cat(self.values)
        cpp_attention.write(level, keys, values, torch.tensor(slots), self.cache)

    def slot(self, index: int, position: int) -> int:
        size = self.case.block_size
        return self.tables[index][position // size] * size + position % size

    def plan(self, rows: list[Row]) -> StepPlan:
        positions = [position for _, first, end in rows for position in range(first, end)]
        starts = [0]
        for _, first, end in rows:
            starts.append(starts[-1] + end - first)
        width = max(map(len, self.tables)) + 1
        tables = [self.tables[index] + [self.spare] * (width - len(self.tables[index])) for index, _, _ in rows]
        empty = torch.tensor([])
        return StepPlan(
            token_ids=empty,
            positions=torch.tensor(positions, dtype=INT32),
            slots=empty,
            query_starts=torch.tensor(starts, dtype=INT32),
            context_lens=empty,
            block_tables=torch.tensor(tables, dtype=INT32),
            logit_indices=empty,
            max_query_len=0,
            max_context_len=0,
        )

    def attend(self, rows: list[Row]) -> torch.Tensor:
        """[T, num_heads, head_dim]"""
        queries = torch.cat([self.queries[index][first:end] for index, first, end in rows])
        out = torch.full((len(queries), queries[0].numel()), torch.nan, dtype=self.case.dtype)
        cpp_attention.attend(self.level, queries, self.case.rule, self.plan(rows), self.cache, out)
        return out.view(queries.shape)


def oracle(sequences: Sequences, index: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One token in float64, head by head: [num_heads, head_dim] and Σ weight · |value| of the same shape."""
    heads, rule = sequences.case.heads, sequences.case.rule
    first = 0 if rule.window is None else max(0, position + 1 - rule.window)
    results, sizes = [], []
    for head in range(heads.num_heads):
        kv_head = head // (heads.num_heads // heads.kv_heads)
        keys = sequences.keys[index][first : position + 1, kv_head].double()
        values = sequences.values[index][first : position + 1, kv_head].double()
        scores = keys @ sequences.queries[index][position, head].double() * rule.scale
        if rule.softcap is not None:
            scores = torch.tanh(scores / rule.softcap) * rule.softcap
        if rule.sinks is not None:
            scores = torch.cat((scores, rule.sinks[head : head + 1].double()))
        weights = scores.softmax(0)[: len(values)]
        results.append(weights @ values)
        sizes.append(weights @ values.abs())
    return torch.stack(results), torch.stack(sizes)


def assert_near(out: torch.Tensor, sequences: Sequences, index: int, position: int) -> None:
    """float32 sums; bfloat16 rounds weights (half above the fraction's line, half below) and the result."""
    exact, size = oracle(sequences, index, position)
    allowed = size * 2e-5 if out.dtype == F32 else size * 2.0**-8 + exact.abs() * 2.0**-8 + 1e-6
    assert ((out.double() - exact).abs() <= allowed).all()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 9) | st.sampled_from((16, 25, 30)))
    head_dim = draw(st.sampled_from((2, 6, 16, 24, 64, 72, 80, 96, 128, 256)))
    before = st.integers(0, 40) | st.sampled_from((62, 63, 64, 127, 511, 512, 513, 1023, 1024, 1030))
    rows = draw(st.lists(st.tuples(before, st.integers(1, 12) | st.just(70)), min_size=1, max_size=4))
    num_heads = kv_heads * group
    rule = AttentionRule(
        scale=draw(st.sampled_from((0.05, 1.0, 2.0))) * head_dim**-0.5,
        window=draw(st.none() | st.sampled_from((1, 2, 16, 63, 64, 65, 500, 512, 600))),
        softcap=draw(st.none() | st.sampled_from((0.5, 30.0))),
        sinks=draw(st.none() | st.just(torch.linspace(-1, 3, num_heads))),
    )
    heads = HeadShape(num_heads, kv_heads, head_dim)
    block_size = draw(st.sampled_from((2, 6, 8, 16, 24, 32, 48, 64, 128)))
    return Case(heads, rows, draw(st.sampled_from((F32, BF16))), block_size, rule)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(case=cases(), level=st.sampled_from(LEVELS or [0]), threads=st.sampled_from((1, 3)))
def test_a_plain_oracle_in_float64(case: Case, level: int, threads: int) -> None:
    torch.ops.tandem.set_threads(threads, [])
    sequences = Sequences(case, level)
    out = sequences.attend(case.all_rows())
    start = 0
    for index, first, end in case.all_rows():
        for position in {first, (first + end) // 2, end - 1}:
            assert_near(out[start + position - first], sequences, index, position)
        start += end - first


@pytest.mark.parametrize("window", [498, 499, 500, 501, 512, 513])
def test_windows_that_begin_at_a_partitions_edge(window: int) -> None:
    """Position 1010 sees from 511 on with a window of 500: one key of the first partition."""
    case = Case(HeadShape(2, 1, 16), [(1010, 3)], F32, rule=AttentionRule(0.2, window=window))
    for level in LEVELS:
        sequences = Sequences(case, level)
        for position in (1010, 1011, 1012):
            assert_near(sequences.attend([(0, position, position + 1)])[0], sequences, 0, position)


ROWS = [(0, 40), (511, 3), (700, 20), (1030, 8), (5, 1), (0, 1), (512, 5)]
SINKS = torch.linspace(-1, 2, 12)
EXACT_CASES = [
    Case(HeadShape(9, 3, 64), ROWS),
    Case(HeadShape(12, 1, 128), ROWS, rule=AttentionRule(0.1, window=100, sinks=SINKS)),
    Case(HeadShape(2, 2, 80), ROWS, F32, rule=AttentionRule(0.2, softcap=4.0)),
    Case(HeadShape(4, 1, 24), ROWS, F32, rule=AttentionRule(0.3, window=513)),
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", EXACT_CASES, ids=lambda case: "x".join(map(str, (*vars_of(case.heads), case.dtype))))
def test_a_tokens_bits_are_its_own(case: Case, level: int) -> None:
    torch.ops.tandem.set_threads(1, [])
    sequences, rows = Sequences(case, level), case.all_rows()
    whole = sequences.attend(rows)
    parts = dict(zip(rows, whole.split([end - first for _, first, end in rows]), strict=True))
    for row, part in parts.items():
        index, first, end = row
        assert_same_bits(sequences.attend([row]), part)
        for size in (1, 5, 7):
            chunks = [(index, start, min(start + size, end)) for start in range(first, end, size)]
            assert_same_bits(torch.cat([sequences.attend([chunk]) for chunk in chunks]), part)
    assert_same_bits(sequences.attend(rows[::-1]), torch.cat([parts[row] for row in rows[::-1]]))
    for threads in (2, 5):
        torch.ops.tandem.set_threads(threads, [])
        assert_same_bits(sequences.attend(rows), whole)
        assert_same_bits(sequences.attend([rows[3]]), parts[rows[3]])
    for changed in (replace(case, block_seed=9), replace(case, block_size=64), replace(case, block_size=6)):
        other = Sequences(changed, level)
        assert other.tables != sequences.tables
        assert_same_bits(other.attend(rows), whole)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("level", LEVELS)
def test_denormal_numbers_count_as_zero(level: int, dtype: torch.dtype) -> None:
    """Some instructions flush them whatever they are told, so that all have to: as operands and as results."""
    torch.ops.tandem.set_threads(1, [])
    case = Case(HeadShape(2, 1, 32), [(70, 3)], dtype)
    sequences = Sequences(case, level)
    slots = torch.tensor([sequences.slot(0, position) for position in range(73)])
    sequences.queries[0].zero_()  # all visible keys weigh the same
    normal = torch.finfo(F32).tiny
    for first, others in ((normal / 4, normal / 4), (normal, 0.0)):  # denormal values; a denormal mean of normal ones
        values = torch.full((73, 1, 32), others, dtype=dtype)
        values[0] = first
        assert values[0].any()
        cpp_attention.write(level, sequences.keys[0], values, slots, sequences.cache)
        assert_same_bits(sequences.attend([(0, 70, 73)]), torch.zeros((3, 2, 32), dtype=dtype))
    assert torch.tensor(normal / 4) / 2 != 0, "the caller's own arithmetic keeps them"


def vars_of(heads: HeadShape) -> tuple[int, int, int]:
    return heads.num_heads, heads.kv_heads, heads.head_dim


@pytest.mark.parametrize("level", LEVELS)
def test_queries_may_lie_anywhere(level: int) -> None:
    """transformers' own order: heads first, tokens within."""
    sequences = Sequences(EXACT_CASES[0], level)
    rows = EXACT_CASES[0].all_rows()
    queries = torch.cat([sequences.queries[index][first:end] for index, first, end in rows])
    heads_first = queries.transpose(0, 1).contiguous().transpose(0, 1)
    assert not heads_first.is_contiguous()
    out = torch.empty(len(queries), queries[0].numel(), dtype=BF16)
    cpp_attention.attend(level, heads_first, sequences.case.rule, sequences.plan(rows), sequences.cache, out)
    assert_same_bits(out.view(queries.shape), sequences.attend(rows))


def test_levels_agree() -> None:
    """They share no bits, but what they say."""
    if len(LEVELS) < 2:
        pytest.skip("one level")
    first, *others = (Sequences(EXACT_CASES[0], level).attend(EXACT_CASES[0].all_rows()) for level in LEVELS)
    for other in others:
        torch.testing.assert_close(other, first, atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "heads", "dtype", "named"),
    [
        (0, 16, HeadShape(2, 1, 64), BF16, "num_blocks 0"),
        (4, 1, HeadShape(2, 1, 64), BF16, "block_size 1"),
        (4, 7, HeadShape(2, 1, 64), BF16, "block_size 7"),
        (4, 16, HeadShape(2, 1, 63), BF16, "head_dim 63"),
        (4, 16, HeadShape(2, 1, 512), F32, "head_dim 512"),
        (4, 16, HeadShape(3, 2, 64), F32, "3 query heads"),
        (4, 16, HeadShape(2, 1, 64), torch.float16, "float16"),
    ],
)
def test_shapes_that_cannot_be_served(num_blocks, block_size, heads, dtype, named) -> None:
    with pytest.raises(ValueError, match=named):
        cpp_attention.make_cache(num_blocks, block_size, heads, dtype)


def test_a_cache_is_zeros_at_a_cache_lines_start() -> None:
    cache = cpp_attention.make_cache(5, 16, HeadShape(2, 2, 24), BF16)
    for memory in (cache.keys, cache.values):
        assert memory.data_ptr() % 64 == 0
        assert memory.numel() == 5 * 16 * 2 * 24
        assert not memory.any()


def test_what_would_read_foreign_memory_is_refused() -> None:
    sequences = Sequences(Case(HeadShape(2, 1, 16), [(20, 2)]), LEVELS[0])
    plan = sequences.plan([(0, 20, 22)])
    queries, out = torch.zeros(2, 2, 16, dtype=BF16), torch.zeros(2, 32, dtype=BF16)

    def attend(**changes: Any) -> None:
        changed = replace(plan, **changes)
        cpp_attention.attend(LEVELS[0], queries, sequences.case.rule, changed, sequences.cache, out)

    attend()
    # the second block's entry counts; what lies beyond it doesn't
    attend(block_tables=torch.tensor([[0, 1, 10**6]], dtype=INT32))
    for table in ([[0, 10**6, 0]], [[-1, 0, 0]]):
        with pytest.raises(RuntimeError, match="block table of row 0"):
            attend(block_tables=torch.tensor(table, dtype=INT32))
    with pytest.raises(RuntimeError, match="too short for position 21"):
        attend(block_tables=torch.tensor([[0]], dtype=INT32))
    with pytest.raises(RuntimeError, match="rise by one"):
        attend(positions=torch.tensor([20, 25], dtype=INT32))
    with pytest.raises(RuntimeError, match="query_starts"):
        attend(query_starts=torch.tensor([0, 3], dtype=INT32))
