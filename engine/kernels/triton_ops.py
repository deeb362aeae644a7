"""The operations on a GPU, by Triton kernels of ours; see the kernels' modules for what keeps a row's bits its own.

    triton_linear      products and their epilogues          triton_attention   paged attention
    triton_norm        norms, embedding                      triton_choose      choice of a token
    triton_rotary      norms of heads, rotation, cache       triton_math        what they share

Nothing here waits for the GPU except `choose`, whose result is the host's; `choose_on_device` is the same without that.
Temporary memory comes from torch's allocator, so a step may be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton

from engine.kernels import triton_attention, triton_choose, triton_norm, triton_rotary
from engine.kernels.ops import AttentionRule, HeadNorms, HeadShape, LayerCache, PackedLinear, Rotary, StepPlan
from engine.kernels.triton_linear import Epilogue, multiply, multiply_by_library
from engine.kernels.triton_math import INTERPRETED

Numerics = Literal["exact", "fast"]

MAX_HEAD_DIM = 256
_VERSION = 1
"""Rises with every change of a bit."""


@dataclass(slots=True)
class TritonCache:
    """One layer's keys and values, A [num_blocks, kv_heads, block_size, head_dim] each."""

    keys: torch.Tensor
    values: torch.Tensor
    block_size: int


class TritonOps:
    """Implements `engine.kernels.ops.Ops`; see there for every method."""

    def __init__(self, device: torch.device, numerics: Numerics = "exact") -> None:
        """With numerics "fast", products are cuBLAS's: a row's bits then depend on how many rows there are."""
        if device.type != "cuda" and not INTERPRETED:
            raise ValueError(
                f"Triton's kernels run on a GPU, not on {device}; TRITON_INTERPRET=1 runs them in its interpreter"
            )
        self._device = device
        self._multiply = multiply_by_library if numerics == "fast" else multiply
        self._numerics = numerics

    @property
    def fingerprint(self) -> str:
        if self._device.type == "cuda" and not INTERPRETED:
            place = f"{torch.cuda.get_device_name(self._device)}/cuda{torch.version.cuda}"
        else:
            place = "interpreter"
        library = f"/torch{torch.__version__}" if self._numerics == "fast" else ""
        return f"triton-ops{_VERSION}/{self._numerics}/{place}/triton{triton.__version__}{library}"

    # ------------------------------------------------------------------------------------------------ at load

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        """The weight as it is, not a copy if it is on the device already."""
        return PackedLinear(
            weight.detach().to(self._device).contiguous(), self._float32(bias), weight.shape[1], weight.shape[0]
        )

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
            none = torch.zeros(len(gate))
            bias = torch.cat([none if b is None else b.detach().float().cpu() for b in (gate_bias, up_bias)])
        weight = torch.cat((gate.detach(), up.detach())).to(self._device)
        return PackedLinear(weight, self._float32(bias), gate.shape[1], gate.shape[0], gated=True)

    def make_cache(self, num_blocks: int, block_size: int, heads: HeadShape, dtype: torch.dtype) -> TritonCache:
        if heads.head_dim > MAX_HEAD_DIM:
            raise ValueError(f"heads of {heads.head_dim} elements; the GPU's attention takes at most {MAX_HEAD_DIM}")
        shape = (num_blocks, heads.kv_heads, block_size, heads.head_dim)
        keys = torch.zeros(shape, dtype=dtype, device=self._device)
        return TritonCache(keys, torch.zeros_like(keys), block_size)

    # ---------------------------------------------------------------------------------------------- in a step

    def embed(
        self, token_ids: torch.Tensor, table: PackedLinear | torch.Tensor, scale: float, hidden: torch.Tensor
    ) -> None:
        rows = table.data if isinstance(table, PackedLinear) else table
        triton_norm.embed(token_ids, rows, scale, hidden)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        triton_norm.rms_norm(x, weight, eps, out)

    def rms_norm_add(self, x: torch.Tensor, weight: torch.Tensor, eps: float, scale: float, out: torch.Tensor) -> None:
        triton_norm.rms_norm(x, weight, eps, out, add=True, scale=scale)

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, out: torch.Tensor
    ) -> None:
        triton_norm.layer_norm(x, weight, bias, eps, out)

    def linear(
        self, x: torch.Tensor, weight: PackedLinear, out: torch.Tensor, scale: float = 1.0, softcap: float = 0.0
    ) -> None:
        self._multiply(x, weight, Epilogue(scale=scale, softcap=softcap), out)

    def linear_add(self, x: torch.Tensor, weight: PackedLinear, scale: float, out: torch.Tensor) -> None:
        self._multiply(x, weight, Epilogue(scale=scale, add=True), out)

    def linear_gated(self, x: torch.Tensor, weight: PackedLinear, activation: str, out: torch.Tensor) -> None:
        self._multiply(x, weight, Epilogue(activation=activation), out)

    def linear_activation(self, x: torch.Tensor, weight: PackedLinear, activation: str, out: torch.Tensor) -> None:
        self._multiply(x, weight, Epilogue(activation=activation), out)

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
        own = _own(cache)
        triton_rotary.rotate_write(qkv, heads, norms, rotary, plan, own.keys, own.values, queries)

    def attend(
        self,
        queries: torch.Tensor,
        heads: HeadShape,
        rule: AttentionRule,
        plan: StepPlan,
        cache: LayerCache,
        out: torch.Tensor,
    ) -> None:
        own = _own(cache)
        triton_attention.attend(queries, heads, rule, plan, own.keys, own.values, out)

    def choose(self, logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return self.choose_on_device(logits, temperatures, keys).cpu()

    def choose_on_device(self, logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """As `choose`, with the result on the device: the next step may read it before the host does."""
        temperatures = temperatures.to(self._device, torch.float32, non_blocking=True)
        return triton_choose.choose(logits, temperatures, keys.to(self._device, non_blocking=True))

    def _float32(self, values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values.detach().to(self._device, torch.float32)


def _own(cache: LayerCache) -> TritonCache:
    if not isinstance(cache, TritonCache):
        raise TypeError(f"a cache of these operations is expected, not {type(cache).__name__}")
    return cache
