"""Coded weights: every bit comes back, products are those of the plain weight, damage stays inside."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from engine.kernels import cpp_linear
from engine.kernels.cpp_ops import CppOps
from engine.kernels.ops import PackedLinear
from tests.engine.kernels.conftest import on_threads
from tests.engine.kernels.oracle import assert_same_bits

BF16 = torch.bfloat16
HEAD, PAIR = 64, 192
SHAPES = [(33, 7), (95, 64), (1, 1), (40, 130), (64, 3), (32, 577), (70, 4)]
"""(columns, depth): depths that end within a pair of steps and within a step"""
ROWS = (1, 2, 3, 5, 8, 9, 16, 17, 40)
"""of which the last ones are multiplied by decoded tiles, at every level"""


@pytest.fixture
def three_threads(ops: CppOps) -> Iterator[None]:
    with on_threads(3):
        yield


def _weight(n: int, k: int, odd: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers, and one in `odd` of another kind altogether; 0: none."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn((n, k), generator=generator).to(BF16)
    if odd:
        strange = torch.tensor([0.0, -0.0, 1e30, -1e-30, 1e-40, 300.0, -65536.0, 2.0**-100]).to(BF16)
        places = torch.rand((n, k), generator=generator) < 1 / odd
        weight[places] = strange[torch.randint(len(strange), (int(places.sum()),), generator=generator)]
    return weight


def _coded(packed: PackedLinear) -> PackedLinear:
    coded = cpp_linear.coded(packed)
    assert coded.data.dtype is torch.uint8
    return coded


def _num_exceptions(coded: PackedLinear, num_tiles: int, depth: int) -> int:
    return (coded.data.numel() - num_tiles * (HEAD + PAIR * -(-depth // 4))) // 8


def _decoded(coded: PackedLinear, num_tiles: int, depth: int) -> np.ndarray:
    """The plain tiles' bits uint16 [tiles, pairs · 2, 32, 2], element by element as the drawing says."""
    data = coded.data.numpy()
    num_pairs = -(-depth // 4)
    tile_bytes = HEAD + PAIR * num_pairs
    exceptions = data[num_tiles * tile_bytes :].reshape(-1, 8)
    out = np.zeros((num_tiles, num_pairs * 128), np.uint16)
    for tile in range(num_tiles):
        start = data[tile * tile_bytes : (tile + 1) * tile_bytes]
        first, count = start[16:24].view(np.int32)
        for place in range(num_pairs * 128):
            pair, step, column, half = place // 128, place // 64 % 2, place // 2 % 32, place % 2
            lane, byte = column % 16 // 4, column // 16 * 8 + column % 4 * 2 + half
            pair_bytes = start[HEAD + pair * PAIR : HEAD + (pair + 1) * PAIR]
            code = int(pair_bytes[128 + lane * 16 + byte]) >> (4 * step) & 15
            out[tile, place] = int(start[code]) << 8 | int(pair_bytes[step * 64 + lane * 16 + byte])
        for entry in exceptions[first : first + count]:
            out[tile, int(entry[:4].view(np.uint32)[0])] = entry[4:6].view(np.uint16)[0]
    return out.reshape(num_tiles, num_pairs * 2, 32, 2)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_bit_comes_back(n: int, k: int, some_ops: CppOps) -> None:
    packed = some_ops.pack(_weight(n, k, odd=100 if k > 100 else 0))
    num_tiles, steps = packed.data.shape[:2]
    coded = _coded(packed)
    if k > 100:
        assert _num_exceptions(coded, num_tiles, k) > 0
    decoded = _decoded(coded, num_tiles, k)
    assert (decoded[:, :steps] == packed.data.view(torch.int16).numpy().view(np.uint16)).all()


@pytest.mark.parametrize("odd", [0, 100])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.usefixtures("three_threads")
def test_products_have_the_plain_weights_bits(n: int, k: int, odd: int, ops: CppOps) -> None:
    """Whatever becomes of the sums, and however many rows there are."""
    odd = odd if k > 100 else 0
    packed = ops.pack(_weight(n, k, odd), torch.randn(n))
    gated = ops.pack_gated(_weight(n, k, odd, seed=1), _weight(n, k, odd, seed=2))
    coded, coded_gated = _coded(packed), _coded(gated)
    x = _weight(max(ROWS), k, odd=0, seed=3)
    for rows in ROWS:
        results = []
        for weight, gated_weight in ((packed, gated), (coded, coded_gated)):
            written, added = torch.empty(rows, n), torch.ones(rows, n)
            together, activated = torch.empty(rows, n, dtype=BF16), torch.empty(rows, n)
            ops.linear(x[:rows], weight, written, 0.5, 30.0)
            ops.linear_add(x[:rows], weight, 0.25, added)
            ops.linear_gated(x[:rows], gated_weight, "silu", together)
            ops.linear_activation(x[:rows], weight, "gelu", activated)
            results.append((written, added, together, activated))
        for plain, ours in zip(*results, strict=True):
            assert_same_bits(ours, plain)


def test_an_exception_in_every_place_is_multiplied(ops: CppOps) -> None:
    """One by one, so that none hides behind another; the last ones lie beyond a whole pair of steps."""
    n, k = 32, 131
    plain = torch.ones((n, k), dtype=BF16)
    x = _weight(17, k, odd=0, seed=4)
    # As many other upper bytes as make the one that is looked for an exception.
    for index in range(17):
        plain[:2, index] = 2.0 ** (2 * index - 20)
    for place in range(17, k):
        weight = plain.clone()
        weight[place % n, place] = -3e-20
        packed = ops.pack(weight)
        coded = _coded(packed)
        assert _num_exceptions(coded, 1, k) > 0
        for rows in (1, 17):
            expected, found = torch.empty(rows, n), torch.empty(rows, n)
            ops.linear(x[:rows], packed, expected)
            ops.linear(x[:rows], coded, found)
            assert_same_bits(found, expected)


def test_weights_without_a_pattern_stay_as_they_are(some_ops: CppOps) -> None:
    bits = torch.randint(-(1 << 15), 1 << 15, (64, 64), generator=torch.Generator().manual_seed(0))
    packed = some_ops.pack(bits.to(torch.int16).view(BF16))
    assert cpp_linear.coded(packed) is packed
    floats = some_ops.pack(torch.randn(64, 64))
    assert cpp_linear.coded(floats) is floats


def test_less_is_read(some_ops: CppOps) -> None:
    packed = some_ops.pack(_weight(576, 576, odd=0))
    assert _coded(packed).data.nbytes < 0.76 * packed.data.nbytes


def test_damage_reads_nothing_beyond_the_weight(ops: CppOps) -> None:
    """Whatever a file holds: heads that name exceptions that aren't there, places beyond the tile, out of order."""
    n, k = 64, 300
    coded = _coded(ops.pack(_weight(n, k, odd=100)))
    tile_bytes = HEAD + PAIR * -(-k // 4)
    generator = torch.Generator().manual_seed(5)
    x = _weight(17, k, odd=0)
    for low in (-(1 << 31), 0, (1 << 31) - 1000):
        data = coded.data.clone()
        for tile in range(2):
            numbers = torch.randint(low, low + 1000, (2,), generator=generator).to(torch.int32)
            data[tile * tile_bytes + 16 : tile * tile_bytes + 24] = numbers.view(torch.uint8)
        rest = data[2 * tile_bytes :]
        rest[:] = torch.randint(256, rest.shape, generator=generator).to(torch.uint8)
        for rows in (1, 17):
            ops.linear(x[:rows], PackedLinear(data, None, k, n), torch.empty(rows, n))


def test_exceptions_beyond_the_weights_end_are_nobodys(ops: CppOps) -> None:
    """A head that names more than there are, before memory that would serve."""
    n, k = 64, 300
    coded = _coded(ops.pack(_weight(n, k, odd=100)))
    size, last_head = coded.data.numel(), HEAD + PAIR * -(-k // 4)
    foreign = torch.tensor([[9536 + place, 0x7FC0] for place in range(64)], dtype=torch.int32)  # NaN in the last step
    memory = torch.cat([coded.data, foreign.flatten().view(torch.uint8)])
    memory[last_head + 20 : last_head + 24] = torch.tensor([1 << 20], dtype=torch.int32).view(torch.uint8)
    x = _weight(17, k, odd=0)
    expected, found = torch.empty(17, n), torch.empty(17, n)
    ops.linear(x, coded, expected)
    ops.linear(x, PackedLinear(memory[:size], None, k, n), found)
    assert_same_bits(found, expected)


def test_wrong_arguments_are_named(some_ops: CppOps) -> None:
    coded = _coded(some_ops.pack(_weight(40, 16, odd=0)))
    x, out = _weight(3, 16, odd=0), torch.empty(3, 40)
    some_ops.linear(x, coded, out)
    with pytest.raises(RuntimeError, match=r"a coded weight of .* doesn't take x of 24 columns to 2 tiles"):
        some_ops.linear(_weight(3, 24, odd=0), coded, out)
    with pytest.raises(RuntimeError, match="doesn't take x of 16 columns to 3 tiles"):
        some_ops.linear(x, coded, torch.empty(3, 80))
    with pytest.raises(RuntimeError, match="packed one of x's type"):
        some_ops.linear(x.float(), coded, out)
    with pytest.raises(RuntimeError, match="packed bfloat16 weight is expected"):
        torch.ops.tandem.code.default(torch.zeros(2, 16, 32))
