"""The operations in plain torch, on any device: the fallback where there is no compiler, and the others' oracle.

`torch_tiles` says what keeps a row's bits its own; `torch_attention` and `torch_choose` hold the two big ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from engine.kernels.ops import AttentionRule, HeadNorms, HeadShape, LayerCache, PackedLinear, Rotary, StepPlan
from engine.kernels.torch_attention import KEY_TILE, QUERY_BLOCK, QueryBlocks, TorchCache, attend
from engine.kernels.torch_choose import choose
from engine.kernels.torch_tiles import (
    ACTIVATIONS,
    PRODUCTS_PER_GROUP,
    ROW_TILE,
    apply,
    layer_normed,
    padded_tiles,
    products,
    rms_normed,
    softcapped,
)

_VERSION = 1
"""Rises with every change of a bit."""


class TorchOps:
    """Implements `engine.kernels.ops.Ops`; see there for every method. Temporary memory is allocated in a step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: tuple[StepPlan, int, QueryBlocks] | None = None
        """the last step's query blocks, for caches of that block size; all layers share them"""

    @property
    def fingerprint(self) -> str:
        if self._device.type == "cuda":
            place = f"{torch.cuda.get_device_name(self._device)}/cuda{torch.version.cuda}"
        else:
            # Products may be split over threads differently for another number of them.
            place = f"cpu-{torch.backends.cpu.get_cpu_capability()}/threads{torch.get_num_threads()}"
        tiles = f"{ROW_TILE}x{QUERY_BLOCK}x{KEY_TILE}x{PRODUCTS_PER_GROUP}"
        return f"torch-ops{_VERSION}/{tiles}/{place}/torch{torch.__version__}"

    # ------------------------------------------------------------------------------------------------ at load

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        """The weight itself, not a copy."""
        return PackedLinear(weight.detach(), _float32(bias), weight.shape[1], weight.shape[0])

    def pack_gated(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        gate_bias: torch.Tensor | None = None,
        up_bias: torch.Tensor | None = None,
    ) -> PackedLinear:
        """Gate above up."""
        bias = None
        if gate_bias is not None or up_bias is not None:
            parts = [
                torch.zeros(len(weight), device=weight.device) if bias is None else bias.detach().float()
                for weight, bias in ((gate, gate_bias), (up, up_bias))
            ]
            bias = torch.cat(parts)
        return PackedLinear(torch.cat((gate.detach(), up.detach())), bias, gate.shape[1], gate.shape[0], gated=True)

    def make_cache(self, num_blocks: int, block_size: int, heads: HeadShape, dtype: torch.dtype) -> TorchCache:
        return TorchCache(num_blocks, block_size, heads, dtype, self._device)

    # ---------------------------------------------------------------------------------------------- in a step

    def embed(
        self, token_ids: torch.Tensor, table: PackedLinear | torch.Tensor, scale: float, hidden: torch.Tensor
    ) -> None:
        rows = table.data if isinstance(table, PackedLinear) else table
        torch.mul(rows.index_select(0, token_ids).float(), scale, out=hidden)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        out.copy_(rms_normed(x, weight, eps))

    def rms_norm_add(self, x: torch.Tensor, weight: torch.Tensor, eps: float, scale: float, out: torch.Tensor) -> None:
        out += rms_normed(x, weight, eps).mul_(scale)

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, out: torch.Tensor
    ) -> None:
        out.copy_(layer_normed(x, weight, bias, eps))

    def linear(
        self, x: torch.Tensor, weight: PackedLinear, out: torch.Tensor, scale: float = 1.0, softcap: float = 0.0
    ) -> None:
        for rows, columns, product in _biased_products(x, weight):
            scaled = product.mul_(scale)
            place = out[rows, columns]
            place.copy_((softcapped(scaled, softcap) if softcap > 0 else scaled)[: len(place)])

    def linear_add(self, x: torch.Tensor, weight: PackedLinear, scale: float, out: torch.Tensor) -> None:
        for rows, columns, product in _biased_products(x, weight):
            place = out[rows, columns]
            place += product.mul_(scale)[: len(place)]

    def linear_gated(self, x: torch.Tensor, weight: PackedLinear, activation: str, out: torch.Tensor) -> None:
        both = torch.empty((len(out), 2 * weight.out_features), dtype=torch.float32, device=out.device)
        self.linear(x, weight, both)
        gate, up = both.split(weight.out_features, dim=1)
        out.copy_(apply(ACTIVATIONS[activation], gate).mul_(up))

    def linear_activation(self, x: torch.Tensor, weight: PackedLinear, activation: str, out: torch.Tensor) -> None:
        for rows, columns, product in _biased_products(x, weight):
            place = out[rows, columns]
            place.copy_(apply(ACTIVATIONS[activation], product)[: len(place)])

    def rotate_write(
        self,
        qkv: torch.Tensor,
        heads: HeadShape,
        norms: HeadNorms | None,
        rotary: Rotary | None,
        plan: StepPlan,
        cache: LayerCache,
        queries: torch.Tensor,
    ) -> None:
        parts = qkv.unflatten(1, (-1, heads.head_dim)).split((heads.num_heads, heads.kv_heads, heads.kv_heads), dim=1)
        query, key, value = parts
        if norms is not None:
            query = rms_normed(query, norms.query, norms.eps)
            key = rms_normed(key, norms.key, norms.eps)
        if rotary is not None:
            rotate = partial(_rotated, rotary=rotary, rows=rotary.table.index_select(0, plan.positions))
            query, key = rotate(query), rotate(key)
        queries.copy_(query)
        _own(cache).write(plan.slots, key, value)

    def attend(
        self,
        queries: torch.Tensor,
        heads: HeadShape,
        rule: AttentionRule,
        plan: StepPlan,
        cache: LayerCache,
        out: torch.Tensor,
    ) -> None:
        if len(queries):
            own = _own(cache)
            out.copy_(attend(queries, heads, rule, self._query_blocks(plan, own), own))

    def choose(self, logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return choose(logits, temperatures, keys)

    def _query_blocks(self, plan: StepPlan, cache: TorchCache) -> QueryBlocks:
        if self._blocks is None or self._blocks[0] is not plan or self._blocks[1] != cache.block_size:
            self._blocks = plan, cache.block_size, QueryBlocks(plan, cache)
        return self._blocks[2]


def _biased_products(x: torch.Tensor, weight: PackedLinear) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """As `products`, with the bias; of rows, those beyond x's own are padding."""
    for rows, columns, product in products(padded_tiles(x), weight.data):
        yield rows, columns, product if weight.bias is None else product + weight.bias[columns]


def _rotated(x: torch.Tensor, rotary: Rotary, rows: torch.Tensor) -> torch.Tensor:
    """x float32 [T, heads, head_dim] turned by the tables' rows [T, rotary_dim]; every product rounded by itself."""
    half = rotary.rotary_dim // 2
    cosines, sines = rows[:, None, :half], rows[:, None, half:]
    if rotary.interleaved:
        first, second = slice(0, rotary.rotary_dim, 2), slice(1, rotary.rotary_dim, 2)
    else:
        first, second = slice(0, half), slice(half, rotary.rotary_dim)
    out = x.clone()
    out[..., first] = x[..., first] * cosines - x[..., second] * sines
    out[..., second] = x[..., second] * cosines + x[..., first] * sines
    return out


def _own(cache: LayerCache) -> TorchCache:
    if not isinstance(cache, TorchCache):
        raise TypeError(f"a cache of these operations is expected, not {type(cache).__name__}")
    return cache


def _float32(values: torch.Tensor | None) -> torch.Tensor | None:
    return None if values is None else values.detach().float()
