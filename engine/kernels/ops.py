"""The operations of a decoder: one contract, three implementations.

    cpp_ops      C++ for CPUs, at one of the levels avx512bf16, avx512, avx2
    torch_ops    plain torch in fixed row tiles: the fallback where there is no compiler, and every other one's oracle
    triton_ops   GPUs

What is the same in all:

* **Dtypes.** The model's dtype A (float32 or bfloat16) is that of weights, of what products read and of the cache.
  The residual stream `hidden`, products' results on their way to a norm or to rotation, and logits are float32. Every
  sum is float32; a value is rounded to A once, where it is written as A.
* **Row independence.** A row of a result has the same bits whatever the other rows are and however many: alone, in a
  batch, in a chunk of a prompt, in a verification. Each implementation (and each level) has bits of its own.
* **Outputs** are given by the caller and overwritten; nothing is allocated in a step. Tensors are contiguous unless a
  method says that rows may be strided. T tokens, L wanted logits, R rows as in `engine.batch`.

A layer's memory holds, for a slot (block_id, offset) and a KV head, one key and one value. How it is laid out is the
implementation's own affair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight [out_features, in_features] in the implementation's own layout."""

    data: torch.Tensor
    bias: torch.Tensor | None
    """float32, in the order of the packed columns"""
    in_features: int
    out_features: int
    """columns of the result: for a gated one those after gating, half of what is multiplied"""
    gated: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's index arrays, on the device; shapes as in `engine.batch`, block tables padded to one width."""

    token_ids: torch.Tensor
    """int32 [T]"""
    positions: torch.Tensor
    """int32 [T]"""
    slots: torch.Tensor
    """int64 [T]: block_id * block_size + offset"""
    query_starts: torch.Tensor
    """int32 [R + 1]"""
    context_lens: torch.Tensor
    """int32 [R]"""
    block_tables: torch.Tensor
    """int32 [R, B]; what lies beyond a row's own blocks is never read"""
    logit_indices: torch.Tensor
    """int64 [L]"""
    max_query_len: int
    max_context_len: int


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of one layer; a KV head serves num_heads / kv_heads query heads that follow each other."""

    num_heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotation of the first rotary_dim elements of a head.

    `table` float32 [positions, rotary_dim]: rotary_dim / 2 cosines, then as many sines, attention scaling included.
    Pairs are (i, i + rotary_dim / 2), or (2i, 2i + 1) when interleaved.
    """

    table: torch.Tensor
    rotary_dim: int
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norm of each query and key head before rotation; weights float32 [head_dim]."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """What a layer's attention does besides the plain thing."""

    scale: float
    window: int | None = None
    """a query sees its last so many positions, itself included"""
    softcap: float | None = None
    """scores become softcap · tanh(scores / softcap)"""
    sinks: torch.Tensor | None = None
    """float32 [num_heads]: logits that take weight and give no value"""


class LayerCache(Protocol):
    """Keys and values of one layer, opaque."""

    @property
    def block_size(self) -> int: ...


ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
"""gelu is the exact one, with erf"""


class Ops(Protocol):
    """See the module's text. Not thread-safe."""

    @property
    def fingerprint(self) -> str:
        """What decides the bits: implementation, level or GPU, version of the kernels."""
        ...

    # ------------------------------------------------------------------------------------------------ at load

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        """weight [N, K] of dtype A, any N and K; bias [N] of any float dtype."""
        ...

    def pack_gated(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        gate_bias: torch.Tensor | None = None,
        up_bias: torch.Tensor | None = None,
    ) -> PackedLinear:
        """gate and up [N, K], for `linear_gated`."""
        ...

    def make_cache(self, num_blocks: int, block_size: int, heads: HeadShape, dtype: torch.dtype) -> LayerCache:
        """A layer's memory, zeros. Raises ValueError for a shape that can't be served."""
        ...

    # ---------------------------------------------------------------------------------------------- in a step

    def embed(
        self, token_ids: torch.Tensor, table: PackedLinear | torch.Tensor, scale: float, hidden: torch.Tensor
    ) -> None:
        """hidden float32 [T, K] = scale · rows of the table: [V, K], or packed where the head is tied to it."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        """x float32 [T, K], rows may be strided; weight float32 [K]; out A or float32 [T, K], rows may be strided."""
        ...

    def rms_norm_add(self, x: torch.Tensor, weight: torch.Tensor, eps: float, scale: float, out: torch.Tensor) -> None:
        """out float32 [T, K] += scale · rms_norm(x)."""
        ...

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, out: torch.Tensor
    ) -> None:
        """As rms_norm, with mean and bias (float32)."""
        ...

    def linear(
        self, x: torch.Tensor, weight: PackedLinear, out: torch.Tensor, scale: float = 1.0, softcap: float = 0.0
    ) -> None:
        """x A [T, K], rows may be strided → out A or float32 [T, N] = scale · (x Wᵀ + bias), capped if softcap > 0."""
        ...

    def linear_add(self, x: torch.Tensor, weight: PackedLinear, scale: float, out: torch.Tensor) -> None:
        """out float32 [T, N] += scale · (x Wᵀ + bias)."""
        ...

    def linear_gated(self, x: torch.Tensor, weight: PackedLinear, activation: str, out: torch.Tensor) -> None:
        """out A [T, N] = activation(x Gᵀ) · (x Uᵀ)."""
        ...

    def linear_activation(self, x: torch.Tensor, weight: PackedLinear, activation: str, out: torch.Tensor) -> None:
        """out A [T, N] = activation(x Wᵀ + bias)."""
        ...

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
        """qkv float32 [T, (num_heads + 2 · kv_heads) · head_dim], rows may be strided: normalise and rotate queries and
        keys; queries A [T, num_heads, head_dim]; keys and values go to the cache at the plan's slots, rounded to A,
        what isn't finite as 0.
        """
        ...

    def attend(
        self,
        queries: torch.Tensor,
        heads: HeadShape,
        rule: AttentionRule,
        plan: StepPlan,
        cache: LayerCache,
        out: torch.Tensor,
    ) -> None:
        """queries A [T, num_heads, head_dim] → out A [T, num_heads · head_dim]. A query at position p sees keys at
        0 … p of its row's block table. Keys are reduced in partitions of 512 positions, merged in order. Weights may
        be rounded to A where they meet the values.
        """
        ...

    def choose(self, logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Per row of float32 logits [L, V] (rows may be strided), int64 [L] on the host: the lowest id with the highest
        (l − max l) / T + g, g from `engine.noise` with keys int64 [L, 2] = noise.row_key; T = 0: g = 0, no division.
        -1 where the highest logit isn't finite or a logit is NaN.
        """
        ...


@runtime_checkable
class DeviceChooser(Protocol):
    """Operations whose choice of tokens can stay on a device that isn't the host."""

    def choose_on_device(self, logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """As `Ops.choose`, with all arguments and the result on the device, and nothing waited for."""
        ...
