"""Packed weights for the C++ products, and what tracing must know of their operations.

`torch.ops.tandem.<name>` exists once `build.library()` has returned; layouts are drawn in csrc/linear.h.
"""

from __future__ import annotations

import dataclasses
import hashlib
from functools import cache
from pathlib import Path

import torch

from engine.kernels.build import SOURCES, library
from engine.kernels.ops import PackedLinear

TILE_COLUMNS = 32
GATED_COLUMNS = TILE_COLUMNS // 2
DTYPES = (torch.float32, torch.bfloat16)
CODED_SHARE = 0.75
"""of their bytes, what coded weights take; tables and exceptions are within a hundredth of that"""


def pack(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
    """weight [N, K], float32 or bfloat16, any N and K; bias [N] of any float dtype."""
    load_operations()
    out_features, in_features = weight.shape
    data = torch.ops.tandem.pack.default(weight.detach())
    return PackedLinear(data, padded_bias(bias, TILE_COLUMNS), in_features, out_features)


def pack_gated(
    gate: torch.Tensor,
    up: torch.Tensor,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
) -> PackedLinear:
    """gate and up [N, K], columns of both in every tile."""
    load_operations()
    out_features, in_features = gate.shape
    data = torch.ops.tandem.pack_gated.default(gate.detach(), up.detach())
    bias = gated_bias(out_features, gate_bias, up_bias)
    return PackedLinear(data, bias, in_features, out_features, gated=True)


def gated_bias(num: int, gate: torch.Tensor | None, up: torch.Tensor | None) -> torch.Tensor | None:
    """The biases [num] of both in the order of a gated weight's packed columns; None if there is neither."""
    if gate is None and up is None:
        return None
    halves = [padded_bias(torch.zeros(num) if half is None else half, GATED_COLUMNS) for half in (gate, up)]
    return torch.stack([half.view(-1, GATED_COLUMNS) for half in halves if half is not None], dim=1).flatten()


def coded(packed: PackedLinear) -> PackedLinear:
    """The same weight in three quarters of the bytes, for products only (csrc/linear_coded.h); as it is where it isn't
    bfloat16, or its values are too many.
    """
    if packed.data.dtype is not torch.bfloat16:
        return packed
    data: torch.Tensor = torch.ops.tandem.code.default(packed.data)
    return dataclasses.replace(packed, data=data) if data.numel() else packed


def packed_layout() -> str:
    """A hash of what decides how weights are packed, the same at every level; other kernels may change without it."""
    digest = hashlib.sha256()
    sources = ("linear.h", "linear_ops.cpp", "linear_coded.h", "linear_coded_ops.cpp")
    for path in (Path(__file__), *(SOURCES / name for name in sources)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def unpack(packed: PackedLinear) -> torch.Tensor:
    """The weight [N, K] that `pack` was given; not of a coded one."""
    pairs = packed.data if packed.data.dim() == 4 else packed.data[..., None]
    rows = pairs.permute(0, 2, 1, 3).reshape(pairs.shape[0] * TILE_COLUMNS, -1)
    return rows[: packed.out_features, : packed.in_features].contiguous()


def padded_bias(bias: torch.Tensor | None, multiple: int) -> torch.Tensor | None:
    """float32, as many as a whole number of tiles has columns."""
    if bias is None:
        return None
    return torch.nn.functional.pad(bias.detach().float(), (0, -len(bias) % multiple)).contiguous()


@cache
def load_operations() -> str:
    """Load the library, tell torch how the operations behave on tensors without data, and return the best level.

    Raises `build.NoKernels`.
    """
    level = library()
    for name in _MUTATING:
        torch.library.register_fake(f"tandem::{name}", _fake_writing)
    torch.library.register_fake("tandem::pack", _fake_pack)
    torch.library.register_fake("tandem::code", _fake_code)
    torch.library.register_fake("tandem::pack_gated", lambda gate, up: _fake_pack(gate, GATED_COLUMNS))
    return level


_MUTATING = (
    "linear",
    "linear_add",
    "linear_gated",
    "linear_activation",
    "embed",
    "rms_norm",
    "rms_norm_add",
    "layer_norm",
    "int8_linear",
    "best_two",
)
"""operations that only write into an argument: there is nothing to say of their results' shapes"""


def _fake_writing(*args: object, **kwargs: object) -> None:
    pass


def _fake_pack(weight: torch.Tensor, columns: int = TILE_COLUMNS) -> torch.Tensor:
    num_tiles = -(-weight.shape[0] // columns)
    if weight.dtype == torch.float32:
        return weight.new_empty((num_tiles, weight.shape[1], TILE_COLUMNS))
    return weight.new_empty((num_tiles, -(-weight.shape[1] // 2), TILE_COLUMNS, 2))


def _fake_code(packed: torch.Tensor) -> torch.Tensor:
    """How many bytes, or whether any, is seen by the values only."""
    return packed.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.uint8)
