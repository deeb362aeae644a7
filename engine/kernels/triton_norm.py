"""Norms and the embedding on a GPU: one program per row, which lies whole in its registers.

    ┌─────────────── BLOCK ≥ K ───────────────┐
row │ x0 x1 x2 …                     x(K-1) 0 │   one sum over the block, in an order that BLOCK and the number of
    └─────────────────────────────────────────┘   warps decide; both follow from K, so a row's bits are its own
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton_math import rounded


@triton.jit
def rms_norm_kernel(
    x,  # float32 [T, K]
    weight,  # float32 [K]
    out,  # A or float32 [T, K]
    width,
    x_stride,
    out_stride,
    eps,
    scale,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    own = at < width
    values = tl.load(x + row * x_stride + at, own, other=0.0)
    mean = tl.sum(values * values, 0) / width
    normed = values * (1.0 / tl.sqrt_rn(mean + eps)) * tl.load(weight + at, own, other=0.0)
    out_at = out + row * out_stride + at
    if ADD:
        normed = tl.load(out_at, own, other=0.0) + normed * scale
    tl.store(out_at, rounded(normed, out.dtype.element_ty), own)


@triton.jit
def layer_norm_kernel(
    x,
    weight,
    bias,  # float32 [K]; anything where HAS_BIAS isn't set
    out,
    width,
    x_stride,
    out_stride,
    eps,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    own = at < width
    values = tl.load(x + row * x_stride + at, own, other=0.0)
    centred = tl.where(own, values - tl.sum(values, 0) / width, 0.0)
    variance = tl.sum(centred * centred, 0) / width
    normed = centred * (1.0 / tl.sqrt_rn(variance + eps)) * tl.load(weight + at, own, other=0.0)
    if HAS_BIAS:
        normed += tl.load(bias + at, own, other=0.0)
    tl.store(out + row * out_stride + at, rounded(normed, out.dtype.element_ty), own)


@triton.jit
def embed_kernel(token_ids, table, hidden, scale, width, table_stride, hidden_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = at < width
    token_id = tl.load(token_ids + row).to(tl.int64)
    values = tl.load(table + token_id * table_stride + at, own, other=0.0)
    tl.store(hidden + row * hidden_stride + at, values.to(tl.float32) * scale, own)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, *, add: bool = False, scale: float = 1.0
) -> None:
    """out = rms_norm(x), or out += scale · rms_norm(x)."""
    if not len(x):
        return
    width = x.shape[1]
    block = triton.next_power_of_2(width)
    rms_norm_kernel[(len(x),)](
        x,
        weight,
        out,
        width,
        x.stride(0),
        out.stride(0),
        eps,
        scale,
        ADD=add,
        BLOCK=block,
        num_warps=_warps(block),
    )


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, out: torch.Tensor) -> None:
    """out = layer_norm(x)."""
    if not len(x):
        return
    width = x.shape[1]
    block = triton.next_power_of_2(width)
    layer_norm_kernel[(len(x),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        width,
        x.stride(0),
        out.stride(0),
        eps,
        HAS_BIAS=bias is not None,
        BLOCK=block,
        num_warps=_warps(block),
    )


def embed(token_ids: torch.Tensor, table: torch.Tensor, scale: float, hidden: torch.Tensor) -> None:
    """hidden [T, K] = scale · table[token_ids]."""
    if not len(token_ids):
        return
    width = table.shape[1]
    block = min(1024, triton.next_power_of_2(width))
    embed_kernel[(len(token_ids), triton.cdiv(width, block))](
        token_ids, table, hidden, scale, width, table.stride(0), hidden.stride(0), BLOCK=block
    )


def _warps(block: int) -> int:
    """About 16 elements per thread."""
    return max(1, min(16, block // 512))
