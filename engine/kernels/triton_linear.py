"""Products on a GPU: x [T, K] · Wᵀ with what follows them, in one kernel and one tiling per weight.

W stays as models store it, [N, K] row by row, so that both operands are contiguous along k.

            K                         N
        ┌────────┐  BLOCK_T     ┌──┬──┬──┬──┐
      T │   x    │        ×     │  │  │  │  │ K      →   one program per tile [BLOCK_T, BLOCK_N] of the result
        └────────┘              └──┴──┴──┴──┘
                                 BLOCK_N

**Why a row's bits are its own.** An element of the result has one float32 accumulator, to which blocks of BLOCK_K
products are added in ascending k by one program; there is no split along K and there are no atomics. What an
instruction of the tensor cores does to one row doesn't depend on the other rows of its tile, but *which* instruction a
compiler takes, and so in what order the products inside one block are summed, depends on the tile's shape. Therefore
the tiling is a function of the weight alone, never of T: one row is computed in the same 64-row tile (63 rows of it
masked, neither read nor written) as 64 rows are. T is passed as a plain number that is not specialised on
(`do_not_specialize`; otherwise Triton would compile T = 1 and T divisible by 16 on their own).

What that costs: a row alone reads W exactly once, and its empty rows cost multiplications that the memory hides
(64 · 2 operations per 2 bytes of W; an H200 has 200 operations per byte). Large T would like larger tiles; whether
those have the same bits is measured by `bench/gpu_check.py` and not assumed here.

float32 operands are multiplied in float32 ("ieee"), never in TF32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.ops import PackedLinear
from engine.kernels.triton_math import activated, operand, rounded, softcapped


@dataclass(frozen=True, slots=True)
class Tiling:
    """How one weight is multiplied, whatever the number of rows."""

    block_t: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What happens to a float32 sum before it is written: bias, then scale, cap, activation, gate; see `ops.Ops`."""

    scale: float = 1.0
    softcap: float = 0.0
    activation: str = ""
    add: bool = False
    """the result is added to what is there"""


_FILLS_A_GPU = 128
"""programs that keep all of a large GPU's processors reading (an H200 has 132)"""
_ROW_TILES_TOGETHER = 16
"""row tiles that use one tile of W after each other, so that it is read from memory once"""


def tiling_of(weight: PackedLinear) -> Tiling:
    """The one tiling of a weight: columns as wide as still gives every processor a tile.

    A gated weight's program holds two tiles of W. Of bfloat16 no shape takes more than 96 KiB of shared memory, which
    GPUs from compute capability 8.0 on have.
    """
    if weight.data.dtype == torch.float32:
        return Tiling(32, 32, 32, num_warps=4, num_stages=2)
    if weight.out_features >= 128 * _FILLS_A_GPU and not weight.gated:
        return Tiling(64, 128, 64, num_warps=4, num_stages=4)
    if weight.out_features >= 64 * _FILLS_A_GPU:
        return Tiling(64, 64, 64, num_warps=4, num_stages=4)
    return Tiling(64, 32, 64 if weight.gated else 128, num_warps=4, num_stages=4)


@triton.jit
def _finished(sums, bias, columns, in_range, scale, softcap, HAS_BIAS: tl.constexpr, CAP: tl.constexpr):
    """scale · (sums + bias), capped; columns index the bias."""
    if HAS_BIAS:
        sums += tl.load(bias + columns, in_range, other=0.0)[None, :]
    sums *= scale
    if CAP:
        sums = softcapped(sums, softcap)
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    x,  # A [T, K], rows x_stride apart
    weight,  # A [N, K]; gated: [2N, K], gates above ups
    bias,  # float32 [N] or [2N]; anything where HAS_BIAS isn't set
    out,  # A or float32 [T, N], rows out_stride apart
    num_rows,
    out_features,
    in_features,
    x_stride,
    out_stride,
    scale,
    softcap,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CAP: tl.constexpr,
    ADD: tl.constexpr,
    WHOLE_K: tl.constexpr,  # BLOCK_K divides K
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    row_tile, column_tile = _tile_of(tl.program_id(0), num_rows, out_features, BLOCK_T, BLOCK_N, TOGETHER)
    rows = row_tile * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    own_rows = rows < num_rows
    own_columns = columns < out_features
    x_at = x + rows.to(tl.int64)[:, None] * x_stride + ks[None, :]
    weight_at = weight + columns.to(tl.int64)[:, None] * in_features + ks[None, :]
    up_distance = out_features.to(tl.int64) * in_features

    sums = tl.full((BLOCK_T, BLOCK_N), 0.0, tl.float32)
    up_sums = tl.full((BLOCK_T, BLOCK_N), 0.0, tl.float32)
    for start in range(0, in_features, BLOCK_K):
        if WHOLE_K:
            x_mask, weight_mask = own_rows[:, None], own_columns[:, None]
        else:
            own_ks = ks[None, :] < in_features - start
            x_mask, weight_mask = own_rows[:, None] & own_ks, own_columns[:, None] & own_ks
        left = operand(tl.load(x_at, x_mask, other=0.0))
        right = operand(tl.load(weight_at, weight_mask, other=0.0))
        sums = tl.dot(left, right.T, sums, input_precision="ieee")
        if GATED:
            up = operand(tl.load(weight_at + up_distance, weight_mask, other=0.0))
            up_sums = tl.dot(left, up.T, up_sums, input_precision="ieee")
        x_at += BLOCK_K
        weight_at += BLOCK_K

    result = activated(_finished(sums, bias, columns, own_columns, scale, softcap, HAS_BIAS, CAP), ACTIVATION)
    if GATED:
        result *= _finished(up_sums, bias, columns + out_features, own_columns, scale, softcap, HAS_BIAS, CAP)
    out_at = out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
    out_mask = own_rows[:, None] & own_columns[None, :]
    if ADD:
        result += tl.load(out_at, out_mask, other=0.0)
    tl.store(out_at, rounded(result, out.dtype.element_ty), out_mask)


@triton.jit
def _tile_of(program, num_rows, out_features, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, TOGETHER: tl.constexpr):
    """(row tile, column tile): of TOGETHER row tiles, those of one column tile follow each other."""
    row_tiles = tl.cdiv(num_rows, BLOCK_T)
    per_group = TOGETHER * tl.cdiv(out_features, BLOCK_N)
    first = program // per_group * TOGETHER
    size = tl.minimum(row_tiles - first, TOGETHER)
    within = program % per_group
    return first + within % size, within // size


@triton.jit
def epilogue_kernel(
    sums,  # float32 [T, N] or [T, 2N], contiguous
    bias,
    out,
    out_features,
    out_stride,
    scale,
    softcap,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CAP: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    own = columns < out_features
    sums += row * out_features * (2 if GATED else 1)
    found = tl.load(sums + columns, own, other=0.0)[None, :]
    result = activated(_finished(found, bias, columns, own, scale, softcap, HAS_BIAS, CAP), ACTIVATION)
    if GATED:
        found = tl.load(sums + out_features + columns, own, other=0.0)[None, :]
        result *= _finished(found, bias, columns + out_features, own, scale, softcap, HAS_BIAS, CAP)
    out_at = out + row * out_stride + columns[None, :]
    if ADD:
        result += tl.load(out_at, own[None, :], other=0.0)
    tl.store(out_at, rounded(result, out.dtype.element_ty), own[None, :])


def multiply(
    x: torch.Tensor, weight: PackedLinear, epilogue: Epilogue, out: torch.Tensor, tiling: Tiling | None = None
) -> None:
    """x A [T, K] · weightᵀ through the epilogue into out [T, N]; rows of both may be strided.

    A tiling is given only to compare tilings.
    """
    if not len(x):
        return
    tiles = tiling or tiling_of(weight)
    num_tiles = triton.cdiv(len(x), tiles.block_t) * triton.cdiv(weight.out_features, tiles.block_n)
    product_kernel[(num_tiles,)](
        x,
        weight.data,
        weight.data if weight.bias is None else weight.bias,
        out,
        len(x),
        weight.out_features,
        weight.in_features,
        x.stride(0),
        out.stride(0),
        epilogue.scale,
        epilogue.softcap,
        GATED=weight.gated,
        ACTIVATION=epilogue.activation,
        HAS_BIAS=weight.bias is not None,
        CAP=epilogue.softcap > 0,
        ADD=epilogue.add,
        WHOLE_K=weight.in_features % tiles.block_k == 0,
        BLOCK_T=tiles.block_t,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        TOGETHER=_ROW_TILES_TOGETHER,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def multiply_by_library(x: torch.Tensor, weight: PackedLinear, epilogue: Epilogue, out: torch.Tensor) -> None:
    """As `multiply`, the product by cuBLAS, which takes another order of sums for another number of rows."""
    if not len(x):
        return
    if x.device.type == "cuda" and x.dtype != torch.float32:
        sums = torch.mm(x, weight.data.t(), out_dtype=torch.float32)
    else:
        sums = torch.mm(x.float(), weight.data.float().t())
    finish(sums, weight, epilogue, out)


def finish(sums: torch.Tensor, weight: PackedLinear, epilogue: Epilogue, out: torch.Tensor) -> None:
    """The epilogue alone: sums float32 [T, N], or [T, 2N] of a gated weight, into out [T, N]."""
    block = min(1024, triton.next_power_of_2(weight.out_features))
    epilogue_kernel[(len(sums), triton.cdiv(weight.out_features, block))](
        sums,
        sums if weight.bias is None else weight.bias,
        out,
        weight.out_features,
        out.stride(0),
        epilogue.scale,
        epilogue.softcap,
        GATED=weight.gated,
        ACTIVATION=epilogue.activation,
        HAS_BIAS=weight.bias is not None,
        CAP=epilogue.softcap > 0,
        ADD=epilogue.add,
        BLOCK_N=block,
    )
