"""What keeps the bits of a row its own in plain torch: three ways to compute that the number of rows can't reach.

torch picks a kernel, and with it an order of sums, by the shape of its operands; a vector's tail is rounded by other
code than its body; a range is cut into threads' shares wherever it happens to be cut. So here

* **products** have one shape per weight. Rows come in tiles of ROW_TILE, the last one filled up with zeros, and a
  weight in slices of WEIGHT_SLICE outputs, widened to float32 (exactly) one at a time:

        weight [N, K]  ──slices──▶  [2048, K] … [rest, K]   each × [K, 8], the tile transposed  ──▶  float32 [slice, 8]

  Within one shape a row's bits depend neither on its place in the tile nor on its neighbours (tested).
* **functions** (exp, tanh, the activations) run over flat, aligned pieces of whole vectors, each on one thread;
* **sums over a row** fold it in halves until one column is left. Every addition is one rounded operation on whole
  columns, so there is nothing to pick; and the error grows with log2 K.

Whatever else `torch_ops` computes is single operations, correctly rounded (add, multiply, divide, square root), or
exact (maximum, copy, negate), the same in every arrangement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

ROW_TILE = 8
"""Rows of every product."""
WEIGHT_SLICE = 2048
"""Outputs per product: 4.5 MiB of float32 at width 576, which stays in cache."""
PRODUCTS_PER_GROUP = 16
"""Matrix products per batched call: always this many, since torch picks its route by their number too."""

_VECTOR = 64
"""Elements: a multiple of what any of torch's vector paths takes at once."""
_PIECE = 32768 - _VECTOR
"""Elements: below torch's grain size, so that one thread computes a piece whole."""

Function = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: dict[str, Function] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


def padded_tiles(x: torch.Tensor) -> torch.Tensor:
    """x [T, K], rows may be strided → float32 [tiles, ROW_TILE, K]; rows that x lacks are zero."""
    num_rows, width = x.shape
    num_tiles = -(-num_rows // ROW_TILE)
    rows = x.new_zeros((num_tiles * ROW_TILE, width), dtype=torch.float32)
    rows[:num_rows] = x
    return rows.view(num_tiles, ROW_TILE, width)


def products(tiles: torch.Tensor, weight: torch.Tensor) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """tiles from `padded_tiles`, weight [N, K] of any float dtype → (rows, columns, float32 [ROW_TILE, columns]) of
    x Wᵀ, piece by piece.
    """
    for start in range(0, weight.shape[0], WEIGHT_SLICE):
        part = weight[start : start + WEIGHT_SLICE].float()
        columns = slice(start, start + part.shape[0])
        for index, tile in enumerate(tiles):
            # The weight on the left: faster than on the right for so few rows.
            yield slice(index * ROW_TILE, (index + 1) * ROW_TILE), columns, torch.mm(part, tile.t()).t()


def apply(function: Function, x: torch.Tensor) -> torch.Tensor:
    """An elementwise function of x, of x's shape and dtype."""
    num_elements = x.numel()
    # Fresh memory, so that its start is aligned, filled up to whole vectors.
    flat = x.new_zeros(-(-num_elements // _VECTOR) * _VECTOR)
    flat[:num_elements].view(x.shape).copy_(x)
    for piece in flat.split(_PIECE):
        piece.copy_(function(piece))
    return flat[:num_elements].view(x.shape)


def softcapped(x: torch.Tensor, softcap: float) -> torch.Tensor:
    """softcap · tanh(x / softcap)."""
    return apply(torch.tanh, x / softcap).mul_(softcap)


def row_sums(x: torch.Tensor) -> torch.Tensor:
    """float32 [..., K] → [..., 1]: sums over the last dimension."""
    width = x.shape[-1]
    while width > 1:
        half = (width + 1) // 2
        folded = x[..., :half].clone()
        folded[..., : width - half] += x[..., half:width]
        x, width = folded, half
    return x


def rms_normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """float32 [..., K]: x / sqrt(mean x² + eps) · weight."""
    mean = row_sums(x * x) / x.shape[-1]
    return x / (mean + eps).sqrt_() * weight


def layer_normed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """float32 [..., K]: (x − mean) / sqrt(variance + eps) · weight + bias."""
    centred = x - row_sums(x) / x.shape[-1]
    variance = row_sums(centred * centred) / x.shape[-1]
    normed = centred / (variance + eps).sqrt_() * weight
    return normed if bias is None else normed + bias


def grouped_products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Batched product of float32 [e, r, k] and [e, k, c] in groups of one shape; e is a multiple of the group."""
    out = left.new_empty((left.shape[0], left.shape[1], right.shape[2]))
    for start in range(0, left.shape[0], PRODUCTS_PER_GROUP):
        group = slice(start, start + PRODUCTS_PER_GROUP)
        torch.bmm(left[group], right[group], out=out[group])
    return out
