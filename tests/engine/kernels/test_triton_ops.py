"""The Triton kernels in Triton's interpreter, on small shapes: against float64, and a row's bits its own.

The interpreter runs a kernel's Python line by line over numpy, so this proves what the kernels compute, their masks,
indices and order. What a GPU's compiler makes of them: `test_triton_compiles` here, `make gpu-check` on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from engine import noise
from engine.kernels.ops import ACTIVATIONS, AttentionRule, HeadNorms, HeadShape, Rotary, StepPlan
from tests.engine.kernels import oracle
from tests.engine.kernels.oracle import FUNCTION_BOUND, UNIT, assert_close, assert_same_bits

pytest.importorskip("triton", reason="Triton isn't installed (pip install triton==3.7.1)")

from engine.kernels import triton_attention, triton_choose
from engine.kernels.triton_math import INTERPRETED
from engine.kernels.triton_ops import TritonCache, TritonOps

CPU = torch.device("cpu")
F32, BF16 = torch.float32, torch.bfloat16
BLOCK_SIZE = 16

if not INTERPRETED:
    pytest.skip("TRITON_INTERPRET=0: the kernels would need a GPU", allow_module_level=True)


@pytest.fixture(scope="module", params=["exact", "fast"])
def any_ops(request: pytest.FixtureRequest) -> TritonOps:
    return TritonOps(CPU, request.param)


@pytest.fixture(scope="module")
def ops() -> TritonOps:
    return TritonOps(CPU)


def normal(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


# ---------------------------------------------------------------------------------------------------------- products


@pytest.mark.parametrize(("dtype", "out_dtype"), [(BF16, F32), (BF16, BF16), (F32, F32)])
def test_linear(any_ops: TritonOps, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    x, weight, bias = normal(5, 70, dtype=dtype), normal(45, 70, dtype=dtype), normal(45, seed=1)
    out = torch.full((5, 45), torch.nan, dtype=out_dtype)
    any_ops.linear(x, any_ops.pack(weight, bias), out, scale=0.4, softcap=3.0)
    exact, bound = oracle.product(x, weight, bias)
    capped = torch.tanh(0.4 * exact / 3) * 3
    assert_close(out, capped, 0.4 * bound + UNIT * exact.abs() + 3 * FUNCTION_BOUND)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_linear_add(any_ops: TritonOps, dtype: torch.dtype) -> None:
    x, weight, before = normal(3, 256, dtype=dtype), normal(64, 256, dtype=dtype), normal(3, 64)
    out = before.clone()
    any_ops.linear_add(x, any_ops.pack(weight), 0.3, out)
    exact, bound = oracle.product(x, weight, None)
    assert_close(out, before.double() + 0.3 * exact, 0.3 * bound + 2 * UNIT * exact.abs())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(any_ops: TritonOps, activation: str) -> None:
    x = normal(3, 40)
    gate, up, gate_bias = normal(19, 40), normal(19, 40, seed=1), normal(19, seed=2)
    (left, left_bound), (right, right_bound) = oracle.product(x, gate, gate_bias), oracle.product(x, up, None)
    active = oracle.activation(activation, left)
    active_bound = oracle.ACTIVATION_SLOPE * left_bound + FUNCTION_BOUND * left.abs().clamp(min=1)
    out = torch.empty(3, 19)
    any_ops.linear_gated(x, any_ops.pack_gated(gate, up, gate_bias), activation, out)
    assert_close(out, active * right, active.abs() * right_bound + active_bound * (right.abs() + right_bound))
    any_ops.linear_activation(x, any_ops.pack(gate, gate_bias), activation, out)
    assert_close(out, active, active_bound)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_rows_product_is_its_own(ops: TritonOps, dtype: torch.dtype) -> None:
    """Rows of two row tiles, alone and with others, at other places of a tile; strided and beside NaN."""
    packed, x = ops.pack(normal(40, 130, dtype=dtype)), normal(70, 130, dtype=dtype)
    whole = torch.empty(70, 40)
    ops.linear(x, packed, whole)
    for first, end in ((0, 1), (3, 4), (69, 70), (60, 67), (1, 66)):
        part = torch.empty(end - first, 40)
        ops.linear(x[first:end], packed, part)
        assert_same_bits(part, whole[first:end])
    wide = torch.full((9, 146), torch.nan, dtype=dtype)
    wide[:, 8:138] = x[:9]
    wide[4] = torch.nan
    out = torch.full((11, 40), 7.0)
    ops.linear(wide[:, 8:138], packed, out[1:10])
    others = [row for row in range(9) if row != 4]
    assert_same_bits(out[1:10][others], whole[others])
    assert (out[[0, 10]] == 7).all()


def test_sums_of_many_row_tiles(ops: TritonOps) -> None:
    """More tiles than are run together, of two columns of tiles: every element once."""
    x, weight = torch.eye(580, 3, dtype=BF16) + 1, normal(33, 3, dtype=BF16)
    out = torch.full((580, 33), torch.nan)
    ops.linear(x, ops.pack(weight), out)
    assert_close(out, *oracle.product(x, weight, None))


# -------------------------------------------------------------------------------------------------------------- rows


def test_norms(ops: TritonOps) -> None:
    x, weight, bias = normal(4, 131) * 3 + 0.5, 1 + normal(131) / 4, normal(131, seed=1)
    exact = oracle.rms_norm(x, weight, 1e-5)
    bound = oracle.sum_bound(exact.abs() + 1, 16)
    for dtype in (F32, BF16):
        wide = torch.full((4, 139), 7.0, dtype=dtype)
        ops.rms_norm(x, weight, 1e-5, wide[:, 4:135])
        assert_close(wide[:, 4:135], exact, bound)
        assert (wide[:, :4] == 7).all()
        assert (wide[:, 135:] == 7).all()
    out = x.clone()
    ops.rms_norm_add(x, weight, 1e-5, 0.3, out)
    assert_close(out, x.double() + 0.3 * exact, bound)
    exact = oracle.layer_norm(x, weight, bias, 1e-5)
    ops.layer_norm(x, weight, bias, 1e-5, out)
    assert_close(out, exact, oracle.sum_bound(exact.abs() + 1, 16))
    alone = torch.empty(1, 131)
    ops.layer_norm(x[2:3], weight, bias, 1e-5, alone)
    assert_same_bits(alone, out[2:3])
    ops.layer_norm(x, weight, None, 1e-5, out)
    assert_close(out, exact - bias.double(), oracle.sum_bound(exact.abs() + 1, 16))


def test_embedding(ops: TritonOps) -> None:
    table, ids = normal(50, 37, dtype=BF16), torch.tensor([49, 0, 7], dtype=torch.int32)
    hidden = torch.empty(3, 37)
    for source in (table, ops.pack(table)):
        ops.embed(ids, source, 6.25, hidden)
        assert_close(hidden, table[ids.long()].double() * 6.25, 0.0)


# ------------------------------------------------------------------------------------------ rotation and attention


def plan_of(rows: list[tuple[int, int, int]], tables: list[list[int]]) -> StepPlan:
    """rows: (sequence, first position, end)."""
    positions = [at for _, first, end in rows for at in range(first, end)]
    ends = [0]
    for _, first, end in rows:
        ends.append(ends[-1] + end - first)
    slots = [
        tables[index][at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
        for index, first, end in rows
        for at in range(first, end)
    ]
    int32, int64 = torch.int32, torch.int64
    width = max(len(tables[index]) for index, _, _ in rows)
    return StepPlan(
        token_ids=torch.zeros(len(positions), dtype=int32),
        positions=torch.tensor(positions, dtype=int32),
        slots=torch.tensor(slots, dtype=int64),
        query_starts=torch.tensor(ends, dtype=int32),
        context_lens=torch.tensor([end for _, _, end in rows], dtype=int32),
        # What lies beyond a row's blocks is no block at all: reading it would be seen.
        block_tables=torch.tensor([(tables[i] + [1 << 28] * width)[:width] for i, _, _ in rows], dtype=int32),
        logit_indices=torch.zeros(0, dtype=int64),
        max_query_len=max(end - first for _, first, end in rows),
        max_context_len=max(end for _, _, end in rows),
    )


ROTATIONS = {
    "halves": (F32, 16, False, False),
    "partial-norms": (F32, 8, False, True),
    "interleaved-norms-bf16": (BF16, 16, True, True),
    "interleaved-partial": (F32, 4, True, False),
    "norms-alone": (F32, 0, False, True),
}


# An infinite value passes through the norm of keys, where it is computed in vain.
@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply")
@pytest.mark.parametrize(("dtype", "rotary_dim", "interleaved", "normed"), ROTATIONS.values(), ids=ROTATIONS)
def test_rotation_and_the_write(
    ops: TritonOps, dtype: torch.dtype, rotary_dim: int, interleaved: bool, normed: bool
) -> None:
    heads = HeadShape(4, 2, 16)
    cache = ops.make_cache(4, BLOCK_SIZE, heads, dtype)
    rows = [(0, 14, 18), (1, 3, 4)]
    plan = plan_of(rows, [[2, 0], [3]])
    rotary = None
    if rotary_dim:
        angles = torch.arange(20)[:, None] / 3.0 ** torch.arange(rotary_dim // 2)
        rotary = Rotary(torch.cat((angles.cos(), angles.sin()), dim=1).contiguous(), rotary_dim, interleaved)
    norms = HeadNorms(1 + normal(16) / 4, 1 + normal(16, seed=1) / 4, 1e-6) if normed else None
    wide = normal(5, 8 * 16 + 3)
    qkv = wide[:, : 8 * 16]
    qkv[4, 6 * 16] = torch.inf
    queries = torch.empty(5, 4, 16, dtype=dtype)
    ops.rotate_write(qkv, heads, norms, rotary, plan, cache, queries)

    query, key, value = qkv.double().unflatten(1, (8, 16)).split((4, 2, 2), dim=1)
    if norms:
        query, key = oracle.rms_norm(query, norms.query, 1e-6), oracle.rms_norm(key, norms.key, 1e-6)
    if rotary:
        table = rotary.table[plan.positions.long()]
        half = rotary_dim // 2
        query, key = (oracle.rotate(x, table[:, :half], table[:, half:], interleaved) for x in (query, key))
    assert_close(queries, query, 16 * UNIT * (query.abs() + 1))
    value = torch.where(value.isfinite(), value, 0.0)
    blocks, offsets = plan.slots // BLOCK_SIZE, plan.slots % BLOCK_SIZE
    assert_close(cache.keys[blocks, :, offsets], key, 16 * UNIT * (key.abs() + 1))
    assert_close(cache.values[blocks, :, offsets], value, 0.0)
    untouched = torch.ones(4 * BLOCK_SIZE, dtype=torch.bool)
    untouched[plan.slots] = False
    for memory in (cache.keys, cache.values):
        assert not memory.transpose(1, 2).flatten(0, 1)[untouched].any()


CONTEXTS = [5, 64, 512, 513, 600, 1100, 70]
"""what the cache holds of each sequence"""


@dataclass(frozen=True, slots=True)
class Attention:
    """Sequences of random keys and values in a cache, and queries for every position."""

    ops: TritonOps
    heads: HeadShape
    rule: AttentionRule
    dtype: torch.dtype
    cache: TritonCache
    tables: list[list[int]]
    queries: list[torch.Tensor]

    def run(self, rows: list[tuple[int, int, int]]) -> torch.Tensor:
        queries = torch.cat([self.queries[index][first:end] for index, first, end in rows])
        guarded = torch.full((len(queries) + 2, self.heads.num_heads * self.heads.head_dim), 7.0, dtype=self.dtype)
        plan = plan_of(rows, self.tables)
        self.ops.attend(queries, self.heads, self.rule, plan, self.cache, guarded[1:-1])
        assert (guarded[[0, -1]] == 7).all()
        return guarded[1:-1].view(queries.shape)

    def check(self, out: torch.Tensor, index: int, first: int, end: int) -> None:
        at = torch.arange(end)
        blocks = torch.tensor(self.tables[index])[at // BLOCK_SIZE]
        keys, values = (m[blocks, :, at % BLOCK_SIZE].double() for m in (self.cache.keys, self.cache.values))
        queries, rule = self.queries[index][first:end].double(), self.rule
        exact = oracle.attention(
            queries, keys, values, torch.arange(first, end), rule.scale, rule.window, rule.softcap, rule.sinks
        )
        # Weights are rounded to bfloat16 before they weigh values; of one sum, half above the line.
        bound = 3e-5 if self.dtype == F32 else 2.0**-7
        assert_close(out, exact, bound)


def attention_of(
    ops: TritonOps,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> Attention:
    shape = HeadShape(*heads)
    rule = AttentionRule(2 * heads[2] ** -0.5, window, softcap, normal(heads[0]) if sinks else None)
    order = iter(torch.randperm(190, generator=torch.Generator().manual_seed(2)).tolist())
    tables = [[next(order) for _ in range(-(-length // BLOCK_SIZE))] for length in CONTEXTS]
    cache = ops.make_cache(190, BLOCK_SIZE, shape, dtype)
    cache.keys.copy_(normal(*cache.keys.shape))
    cache.values.copy_(normal(*cache.values.shape, seed=1))
    queries = [normal(length, heads[0], heads[2], dtype=dtype) for length in CONTEXTS]
    return Attention(ops, shape, rule, dtype, cache, tables, queries)


ATTENTIONS = {
    "bf16-group-4": ((4, 1, 16), BF16, None, None, False),
    "f32-group-3-everything": ((3, 1, 24), F32, 520, 3.0, True),
    "bf16-no-groups-window": ((2, 2, 32), BF16, 30, None, False),
    "f32-group-17": ((17, 1, 16), F32, None, None, True),
}
STEP = [(0, 4, 5), (1, 60, 64), (5, 1099, 1100), (3, 509, 513), (6, 52, 70)]
"""a fresh decode row, verification to a tile's edge, two splits of it, verification across partitions, a chunk"""


@pytest.mark.parametrize(("heads", "dtype", "window", "softcap", "sinks"), ATTENTIONS.values(), ids=ATTENTIONS)
def test_attention(
    ops: TritonOps,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    sinks: bool,
) -> None:
    attention = attention_of(ops, heads, dtype, window, softcap, sinks)
    rows = STEP if heads[0] < 5 else STEP[:2]
    parts = attention.run(rows).split([end - first for _, first, end in rows])
    for row, part in zip(rows, parts, strict=True):
        attention.check(part, *row)


def test_a_tokens_attention_is_its_own(ops: TritonOps) -> None:
    """Alone, in a verification, in a chunk; beside rows that make the launch split into more parts."""
    attention = attention_of(ops, (2, 1, 16), BF16)
    chunk = attention.run([(4, 505, 522)])
    for first, end in ((505, 506), (509, 514), (521, 522)):
        assert_same_bits(attention.run([(4, first, end)]), chunk[first - 505 : end - 505])
    rows = [(0, 4, 5), (4, 511, 513), (5, 1099, 1100)]
    whole = attention.run(rows)
    assert_same_bits(attention.run(rows[:1]), whole[:1])
    assert_same_bits(whole[1:3], chunk[6:8])


@pytest.mark.parametrize("window", [None, 700])
def test_who_merges_decides_nothing(ops: TritonOps, monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    attention = attention_of(ops, (2, 1, 16), F32, window, sinks=True)
    rows = [(5, 1097, 1100), (4, 590, 600), (0, 4, 5)]
    split = attention.run(rows)
    with monkeypatch.context() as patch:
        patch.setattr(triton_attention, "_MAX_STATE_BYTES", 0)
        assert_same_bits(attention.run(rows), split)
    plan = plan_of(rows, attention.tables)
    assert triton_attention.num_splits_of(14, attention.heads, plan, window) == 3


# ------------------------------------------------------------------------------------------------------------ choice


def test_noise_has_the_bits_of_the_definition() -> None:
    for seed, index in ((0, 0), (2**64 - 1, 41), (123456789, 2**20)):
        on_device = triton_choose.noise_of(noise.row_key(seed, index), 1500, CPU)
        assert_same_bits(on_device, noise.gumbel(seed, index, 1500))


def test_choice(ops: TritonOps) -> None:
    logits = normal(7, 1500) * 3
    temperatures = torch.tensor([0.0, 1.0, 0.7, 5.0, 1.0, 0.0, 1.0])
    logits[0, [3, 1400, 1200]] = 50.0
    logits[4, 1499] = torch.nan
    logits[5] = -torch.inf
    logits[6, 1100:] = -torch.inf
    keys = torch.tensor([noise.row_key(row, row) for row in range(7)])
    expected = []
    for row, temperature in enumerate(temperatures.tolist()):
        scores = logits[row] - logits[row].max()
        if temperature:
            scores = scores / temperature + noise.gumbel(row, row, 1500)
        expected.append(int((scores == scores.max()).nonzero()[0]) if scores.max().isfinite() else -1)
    assert expected[0] == 3
    assert expected[4:6] == [-1, -1]
    assert expected[1:4] != logits[1:4].argmax(-1).tolist()
    assert ops.choose(logits, temperatures, keys).tolist() == expected
    assert ops.choose(logits[2:3], temperatures[2:3], keys[2:3]).tolist() == expected[2:3]


def test_nothing_is_launched_for_nothing(ops: TritonOps) -> None:
    packed = ops.pack(normal(8, 8))
    ops.linear(torch.empty(0, 8), packed, torch.empty(0, 8))
    ops.rms_norm(torch.empty(0, 8), torch.ones(8), 1e-5, torch.empty(0, 8))
    ops.layer_norm(torch.empty(0, 8), torch.ones(8), None, 1e-5, torch.empty(0, 8))
    ops.embed(torch.empty(0, dtype=torch.int32), packed, 1.0, torch.empty(0, 8))
    assert ops.choose(torch.empty(0, 8), torch.empty(0), torch.empty(0, 2, dtype=torch.int64)).tolist() == []


def test_what_cannot_be_served(ops: TritonOps) -> None:
    with pytest.raises(ValueError, match="at most 256"):
        ops.make_cache(1, 16, HeadShape(1, 1, 320), BF16)
    assert "exact" in ops.fingerprint
    assert TritonOps(CPU, "fast").fingerprint != ops.fingerprint
