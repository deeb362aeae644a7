"""What only the C++ products have: layouts, functions at the edges, threads, tracing. test_ops_rows has the rest."""

from __future__ import annotations

import math

import pytest
import torch

from engine.kernels import build, cpp_linear, threads
from engine.kernels.cpp_ops import CppOps
from engine.kernels.ops import ACTIVATIONS, PackedLinear
from tests.engine.kernels.conftest import built_levels, on_threads
from tests.engine.kernels.oracle import assert_same_bits

F32, BF16 = torch.float32, torch.bfloat16
SHAPES = [(33, 7, BF16), (95, 64, BF16), (1, 130, BF16), (40, 129, F32), (64, 1, F32), (200, 96, BF16)]
"""(columns, depth, dtype): odd ones, a single one, several tiles"""


def _normal(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ------------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (32, 2), (33, 7), (95, 64)])
def test_packed_elements_lie_where_the_drawing_says(n: int, k: int, dtype: torch.dtype, some_ops: CppOps) -> None:
    weight = _normal(n, k, dtype=dtype)
    packed = some_ops.pack(weight)
    pair = 2 if dtype == BF16 else 1
    flat = packed.data.reshape(-1)
    found = torch.zeros_like(weight)
    steps = -(-k // pair)
    for row in range(n):
        for column in range(k):
            place = ((row // 32 * steps + column // pair) * 32 + row % 32) * pair + column % pair
            found[row, column] = flat[place]
    assert torch.equal(found, weight)
    assert flat.count_nonzero() == weight.count_nonzero(), "what lies beyond is 0"
    assert torch.equal(cpp_linear.unpack(packed), weight)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_gated_tile_holds_both(dtype: torch.dtype, some_ops: CppOps) -> None:
    gate, up = _normal(21, 6, dtype=dtype), _normal(21, 6, dtype=dtype, seed=1)
    packed = some_ops.pack_gated(gate, up, torch.arange(21.0), None)
    columns = cpp_linear.unpack(PackedLinear(packed.data, None, 6, 64))
    padded = [torch.nn.functional.pad(half, (0, 0, 0, 11)).view(2, 16, 6) for half in (gate, up)]
    assert torch.equal(columns.view(2, 2, 16, 6), torch.stack(padded, dim=1))
    assert packed.bias is not None
    assert packed.bias.tolist() == [*range(16), *[0] * 16, *range(16, 21), *[0] * 27]


def test_rows_of_a_view_are_packed(some_ops: CppOps) -> None:
    """Transposed, as GPT-2 stores them, and with rows apart."""
    weight = _normal(40, 24)
    assert torch.equal(some_ops.pack(weight.t()).data, some_ops.pack(weight.t().contiguous()).data)
    assert torch.equal(some_ops.pack(weight[::2]).data, some_ops.pack(weight[::2].contiguous()).data)


# ------------------------------------------------------------------------------------------------- one row, one result


@pytest.mark.parametrize(("n", "k", "dtype"), SHAPES)
def test_a_rows_bits_are_its_own(n: int, k: int, dtype: torch.dtype, ops: CppOps) -> None:
    """Alone, in batches of every size up to 40, at every place, with one, two and three threads."""
    packed = ops.pack(_normal(n, k, dtype=dtype), _normal(n, seed=1))
    x = _normal(40, k, dtype=dtype, seed=2)
    alone = torch.empty(40, n)
    for row in range(40):
        ops.linear(x[row : row + 1], packed, alone[row : row + 1])
    for count in (1, 2, 3):
        with on_threads(count):
            for size in range(1, 41):
                start = (size * 7) % (41 - size)
                out = torch.full((size, n), math.nan)
                ops.linear(x[start : start + size], packed, out)
                assert_same_bits(out, alone[start : start + size])


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_blocks_of_rows_leave_no_trace(dtype: torch.dtype, ops: CppOps) -> None:
    """More rows than a core's cache holds, so that they are computed block by block."""
    rows, k, n = 150, 4099, 40
    packed = ops.pack(_normal(n, k, dtype=dtype))
    x = _normal(rows, k, dtype=dtype, seed=1)
    together, alone = torch.empty(rows, n), torch.empty(rows, n)
    with on_threads(3):
        ops.linear(x, packed, together)
    for row in range(rows):
        ops.linear(x[row : row + 1], packed, alone[row : row + 1])
    assert_same_bits(together, alone)


def test_sums_run_along_k_in_order(ops: CppOps) -> None:
    """float32 fused multiply-adds in pure Python, exact in float64 because each product has at most 48 bits."""
    k = 37
    weight, x = _normal(1, k), _normal(1, k, seed=1)
    out = torch.empty(1, 1)
    ops.linear(x, ops.pack(weight), out)
    total = 0.0
    for a, b in zip(x[0].tolist(), weight[0].tolist(), strict=True):
        total = torch.tensor(math.fsum((a * b, total)), dtype=torch.float64).float().item()
    assert out.item() == total


def test_levels_agree_but_for_rounding(some_ops: CppOps) -> None:
    """A level that read another weight or another row would be off by far more."""
    weight, x = _normal(70, 301, dtype=BF16), _normal(11, 301, dtype=BF16, seed=1)
    exact = x.double() @ weight.double().T
    for level in built_levels():
        ops = CppOps(level)
        out = torch.empty(11, 70)
        ops.linear(x, ops.pack(weight), out)
        assert (out.double() - exact).abs().max() < 1e-4


# ----------------------------------------------------------------------------------------------- functions at the edges

IDENTITY = torch.ones(1, 1)
FUNCTIONS = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: x / 2 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: x.clamp(min=0),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_over_their_range(name: str, ops: CppOps) -> None:
    """A product with 1 hands x over unchanged. Absolute error, relative to |x| where that is above 1: 3e-7."""
    x = torch.cat([torch.linspace(-12, 12, 20001), torch.linspace(-0.01, 0.01, 501), torch.tensor([-90.0, 90.0, 0.0])])
    out = torch.empty(len(x), 1)
    ops.linear_activation(x[:, None].contiguous(), ops.pack(IDENTITY), name, out)
    error = (out[:, 0].double() - FUNCTIONS[name](x.double())).abs() / x.double().abs().clamp(min=1)
    assert error.max() < 3e-7


def test_softcap_keeps_small_logits(ops: CppOps) -> None:
    """tanh is relative near 0 and absolute elsewhere: 2e-7 of both."""
    x = torch.cat([torch.linspace(-9, 9, 20001), torch.logspace(-9, 0, 500), -torch.logspace(-9, 0, 500)])
    out = torch.empty(len(x), 1)
    ops.linear(x[:, None].contiguous(), ops.pack(IDENTITY), out, 1.0, 1.0)
    exact = torch.tanh(x.double())
    assert ((out[:, 0].double() - exact).abs() / exact.abs().clamp(min=1e-12)).max() < 2e-7


@pytest.mark.parametrize("name", [*ACTIVATIONS, "softcap"])
def test_nan_stays_and_infinity_is_bounded(name: str, ops: CppOps) -> None:
    """A broken weight must be seen in the logits, not capped into a number."""
    x = torch.tensor([[math.nan], [math.inf], [1e30]])
    out = torch.empty(3, 1)
    if name == "softcap":
        ops.linear(x, ops.pack(IDENTITY), out, 1.0, 30.0)
        assert out[1:, 0].tolist() == [30.0, 30.0]
    else:
        ops.linear_activation(x, ops.pack(IDENTITY), name, out)
        assert out[1, 0] == math.inf
        assert out[2, 0] == torch.tensor(1e30)
    assert out[0, 0].isnan()


def test_an_odd_depth_reads_nothing_beyond_the_row(ops: CppOps) -> None:
    """The last pair's other half belongs to the next row, here NaN."""
    buffer = torch.full((5, 8), math.nan, dtype=BF16)
    buffer[:, :7] = _normal(5, 7, dtype=BF16)
    weight = _normal(20, 7, dtype=BF16, seed=1)
    out = torch.empty(5, 20)
    ops.linear(buffer[:, :7], ops.pack(weight), out)
    torch.testing.assert_close(out, buffer[:, :7].float() @ weight.float().T, atol=1e-5, rtol=1e-5)


# --------------------------------------------------------------------------------------------------------- refusals


def test_wrong_arguments_are_named(some_ops: CppOps) -> None:
    ops = some_ops
    packed = ops.pack(_normal(40, 16))
    x, out = _normal(3, 16), torch.empty(3, 40)
    with pytest.raises(RuntimeError, match="doesn't take x"):
        ops.linear(_normal(3, 17), packed, out)
    with pytest.raises(RuntimeError, match="doesn't take x"):
        ops.linear(x, packed, torch.empty(3, 80))
    with pytest.raises(RuntimeError, match="3 rows, out has 2"):
        ops.linear(x, packed, out[:2])
    with pytest.raises(RuntimeError, match="packed one of x's type"):
        ops.linear(x.bfloat16(), packed, out)
    with pytest.raises(RuntimeError, match="out must be float32"):
        ops.linear_add(x, packed, 1.0, out.bfloat16())
    with pytest.raises(RuntimeError, match="x must be float32 or bfloat16"):
        ops.linear(x.double(), packed, out)
    with pytest.raises(RuntimeError, match="rows must be contiguous"):
        ops.linear(_normal(16, 3).t(), packed, out)
    with pytest.raises(RuntimeError, match="differ in shape"):
        ops.pack_gated(_normal(4, 16), _normal(5, 16))
    with pytest.raises(IndexError, match="token id 40 is outside 0 … 39"):
        ops.embed(torch.tensor([1, 40], dtype=torch.int32), packed, 1.0, torch.empty(2, 16))
    with pytest.raises(IndexError, match="token id -1"):
        ops.embed(torch.tensor([-1], dtype=torch.int32), _normal(40, 16), 1.0, torch.empty(1, 16))
    with pytest.raises(ValueError, match="sse"):
        CppOps("sse")


# ----------------------------------------------------------------------------------------------------------- tracing


def test_torch_accepts_the_operations(some_ops: CppOps) -> None:
    """torch.library.opcheck: schemas tell the truth about what is written, fakes work."""
    level = build.level_number(some_ops.level)
    tandem = torch.ops.tandem
    x, weight = _normal(3, 16, dtype=BF16), some_ops.pack(_normal(40, 16, dtype=BF16), _normal(40))
    gated = some_ops.pack_gated(_normal(40, 16, dtype=BF16), _normal(40, 16, dtype=BF16))
    hidden, ones = _normal(3, 16), torch.ones(16)
    data, bias = weight.data, weight.bias
    ids = torch.tensor([0, 39, 5], dtype=torch.int32)
    cases = [
        (tandem.pack, (_normal(33, 7),)),
        (tandem.pack, (_normal(33, 7, dtype=BF16),)),
        (tandem.pack_gated, (_normal(33, 7, dtype=BF16), _normal(33, 7, dtype=BF16))),
        (tandem.linear, (level, x, data, bias, 1.0, 0.0, torch.zeros(3, 40))),
        (tandem.linear_add, (level, x, data, None, 0.5, torch.zeros(3, 40))),
        (tandem.linear_gated, (level, x, gated.data, gated.bias, 0, torch.zeros(3, 40, dtype=BF16))),
        (tandem.linear_activation, (level, x, data, bias, 1, torch.zeros(3, 40, dtype=BF16))),
        (tandem.embed, (level, ids, data, 40, 1.0, hidden)),
        (tandem.rms_norm, (level, hidden, ones, 1e-5, torch.zeros(3, 16, dtype=BF16))),
        (tandem.rms_norm_add, (level, hidden, ones, 1e-5, 1.0, torch.zeros(3, 16))),
        (tandem.layer_norm, (level, hidden, ones, ones, 1e-5, torch.zeros(3, 16))),
    ]
    for operation, arguments in cases:
        torch.library.opcheck(operation.default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_a_step_can_be_traced(some_ops: CppOps) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    weight = some_ops.pack(_normal(40, 16))

    def step(x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        normed, out = torch.empty(3, 16), torch.empty(3, 40)
        some_ops.rms_norm(x, norm, 1e-5, normed)
        some_ops.linear(normed, weight, out)
        return out

    x, norm = _normal(3, 16), torch.ones(16)
    graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(x, norm)
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert [name for name in names if "tandem" in name] == ["tandem.rms_norm.default", "tandem.linear.default"]
    assert torch.equal(graph(x, norm), step(x, norm))


def test_every_operation_has_a_fake(some_ops: CppOps) -> None:
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("tandem::")]
    assert len(names) > 10
    without_tensors = {"tandem::best_level", "tandem::set_threads", "tandem::num_threads"}
    lacking = [
        name
        for name in names
        if name not in without_tensors and not torch._library.simple_registry.singleton.find(name).fake_impl.kernel
    ]
    assert not lacking


# ------------------------------------------------------------------------------------------------------------ the rest


def test_the_fingerprint_names_level_and_sources(some_ops: CppOps) -> None:
    prints = {CppOps(level).fingerprint for level in built_levels()}
    assert len(prints) == len(built_levels())
    assert all(build.sources_hash() in text for text in prints)


def test_threads_are_used_when_told(some_ops: CppOps) -> None:
    with on_threads(1):
        assert threads.use_threads(2) == 2
        assert torch.ops.tandem.num_threads() == 2
