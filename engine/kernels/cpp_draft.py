"""The operations of a draft model: products in 8-bit integers, and a choice that names the runner-up too.

A draft's numbers are nobody's concern: what it guesses is verified. So its weights stay int8 with a scale per row, as
they are stored, and what they are multiplied with is rounded to int8 as it comes (csrc/int8_linear.h draws the layout);
a step reads half of the bytes that bfloat16 takes. Everything else is `CppOps`.
"""

from __future__ import annotations

import torch

from engine.kernels import cpp_linear
from engine.kernels.build import level_number, library
from engine.kernels.cpp_linear import GATED_COLUMNS, TILE_COLUMNS
from engine.kernels.cpp_ops import ACTIVATION_NUMBERS, CppOps
from engine.kernels.ops import PackedLinear
from engine.kernels.pages import zero_pages

QUAD = 4
"""neighbours along the summed dimension that lie together"""
MOST = 127
NUMBERS_OF_TWO = 3
"""a row's: see `best_two`"""
MARGIN_UNITS = 1 << 20

_WRITE, _ADD, _GATE, _ACTIVATE = range(4)
"""how a product ends, in the order of csrc/linear.h"""


class DraftOps(CppOps):
    """See `engine.kernels.ops.Ops` for every method; weights to be packed may be of any float dtype."""

    def __init__(self, token_ids: torch.Tensor, level: str | None = None) -> None:
        """`token_ids` [V]: the target's ids of the head's rows, ascending. Otherwise as CppOps."""
        super().__init__(level)
        self._token_ids = token_ids.to(torch.int32).contiguous()
        self._int8_linear = torch.ops.tandem.int8_linear.default

    @property
    def fingerprint(self) -> str:
        return f"{super().fingerprint}-int8"

    # ------------------------------------------------------------------------------------------------ at load

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        return pack(weight, bias)

    def pack_gated(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        gate_bias: torch.Tensor | None = None,
        up_bias: torch.Tensor | None = None,
    ) -> PackedLinear:
        return pack_gated(gate, up, gate_bias, up_bias)

    # ---------------------------------------------------------------------------------------------- in a step

    def embed(
        self, token_ids: torch.Tensor, table: PackedLinear | torch.Tensor, scale: float, hidden: torch.Tensor
    ) -> None:
        if isinstance(table, PackedLinear):
            raise TypeError("a draft's embedding is its target's, not a packed head")
        super().embed(token_ids, table, scale, hidden)

    def linear(
        self, x: torch.Tensor, weight: PackedLinear, out: torch.Tensor, scale: float = 1.0, softcap: float = 0.0
    ) -> None:
        self._int8_linear(self._level, x, weight.data, weight.bias, _WRITE, 0, scale, softcap, out)

    def linear_add(self, x: torch.Tensor, weight: PackedLinear, scale: float, out: torch.Tensor) -> None:
        self._int8_linear(self._level, x, weight.data, weight.bias, _ADD, 0, scale, 0.0, out)

    def linear_gated(self, x: torch.Tensor, weight: PackedLinear, activation: str, out: torch.Tensor) -> None:
        number = ACTIVATION_NUMBERS[activation]
        self._int8_linear(self._level, x, weight.data, weight.bias, _GATE, number, 1.0, 0.0, out)

    def linear_activation(self, x: torch.Tensor, weight: PackedLinear, activation: str, out: torch.Tensor) -> None:
        number = ACTIVATION_NUMBERS[activation]
        self._int8_linear(self._level, x, weight.data, weight.bias, _ACTIVATE, number, 1.0, 0.0, out)

    def new_choices(self, num_rows: int) -> torch.Tensor:
        """See `best_two`."""
        return torch.zeros(num_rows, NUMBERS_OF_TWO, dtype=torch.int64)

    def best_two(
        self, logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor, numbers: torch.Tensor
    ) -> None:
        """`best_two` of the head's logits, by the target's ids."""
        best_two(self._level, logits, self._token_ids, temperatures, keys, numbers)


def pack(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
    """weight [N, K] of any float dtype; a row that was int8 with a scale becomes that again. bias [N]."""
    out_features, in_features = weight.shape
    data = _tiles(weight.detach().float())
    return PackedLinear(data, cpp_linear.padded_bias(bias, TILE_COLUMNS), in_features, out_features)


def pack_gated(
    gate: torch.Tensor,
    up: torch.Tensor,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
) -> PackedLinear:
    """gate and up [N, K], columns of both in every tile."""
    out_features, in_features = gate.shape
    halves = [
        torch.nn.functional.pad(half.detach().float(), (0, 0, 0, -out_features % GATED_COLUMNS)) for half in (gate, up)
    ]
    rows = torch.stack([half.view(-1, GATED_COLUMNS, in_features) for half in halves], dim=1).flatten(0, 2)
    bias = cpp_linear.gated_bias(out_features, gate_bias, up_bias)
    return PackedLinear(_tiles(rows.view(-1, in_features)), bias, in_features, out_features, gated=True)


def _tiles(weight: torch.Tensor) -> torch.Tensor:
    """uint8 [tiles, bytes of a tile]"""
    scale = weight.abs().amax(1).clamp(min=1e-30) / MOST
    q = (weight / scale[:, None]).round().clamp(-MOST, MOST).to(torch.int16)
    missing = -len(weight) % TILE_COLUMNS
    q = torch.nn.functional.pad(q, (0, -weight.shape[1] % QUAD, 0, missing))
    quads = (q + 128).to(torch.uint8).view(-1, TILE_COLUMNS, q.shape[1] // QUAD, QUAD).transpose(1, 2)
    scales = torch.nn.functional.pad(scale, (0, missing)).view(-1, TILE_COLUMNS)
    num_tiles, num_bytes = quads.shape[0], q.shape[1] * TILE_COLUMNS
    tiles = zero_pages((num_tiles, num_bytes + TILE_COLUMNS * 4), torch.uint8)
    tiles[:, :num_bytes] = quads.reshape(num_tiles, num_bytes)
    tiles[:, num_bytes:] = scales.contiguous().view(torch.uint8)
    return tiles


def best_two(
    level: int,
    logits: torch.Tensor,
    ids: torch.Tensor | None,
    temperatures: torch.Tensor,
    keys: torch.Tensor,
    numbers: torch.Tensor,
) -> None:
    """numbers int64 [L, 3] = first id, second id, margin in units of 1 / MARGIN_UNITS, of each row of float32 logits
    [L, V], rows may be strided; -1 where there is no first or second. ids int32 [V]: the tokens of the columns, None:
    their numbers. See csrc/best_two.h.
    """
    torch.ops.tandem.best_two.default(level, logits, ids, temperatures, keys, numbers)


def level_of_loaded() -> int | None:
    """The CPU's best level, if whoever loaded a model has loaded the kernels; nothing is built here."""
    return level_number(library()) if hasattr(torch.ops.tandem, "best_two") else None
