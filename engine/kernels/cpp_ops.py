"""The operations in C++, at one level of vector instructions: `CppOps` implements `engine.kernels.ops.Ops`.

A step makes a few hundred calls, so each is one look-up of an attribute and one call into torch's dispatcher, which
takes about two microseconds. What can be checked is checked there, in csrc/*_ops.cpp.
"""

from __future__ import annotations

from functools import partial

import torch

from engine.kernels import cpp_attention, cpp_choose, cpp_linear, cpp_screen
from engine.kernels.build import level_number, sources_hash
from engine.kernels.cpp_attention import CppCache
from engine.kernels.ops import (
    ACTIVATIONS,
    AttentionRule,
    HeadNorms,
    HeadShape,
    LayerCache,
    PackedLinear,
    Rotary,
    StepPlan,
)

KERNELS_VERSION = 1
"""Rises when results change a bit on purpose; the sources' hash tells of the other times."""

ACTIVATION_NUMBERS = {name: number for number, name in enumerate(ACTIVATIONS)}


def fingerprint(level: str) -> str:
    """What decides the bits of the C++ kernels."""
    return f"cpp{KERNELS_VERSION}-{level}/{sources_hash()}"


class CppOps:
    """See `engine.kernels.ops.Ops` for every method."""

    def __init__(self, level: str | None = None) -> None:
        """`level`: one of build.LEVELS; None: the best of this CPU. Raises build.NoKernels, or ValueError for a level
        that the CPU doesn't have.
        """
        best = cpp_linear.load_operations()
        self.level = level or best
        self._level = level_number(self.level)
        if self._level > level_number(best):
            raise ValueError(f"this CPU has no {self.level}, its best level is {best}")
        cpp_attention.load_operations()
        cpp_choose.load_operations()
        cpp_screen.load_operations()
        self._choose = cpp_choose.CppChoose(self.level).choose
        self.choose_head = partial(cpp_screen.choose_head, self._level)
        """`linear` and `choose` in one"""
        ops = torch.ops.tandem
        self._embed = ops.embed.default
        self._rms_norm = ops.rms_norm.default
        self._rms_norm_add = ops.rms_norm_add.default
        self._layer_norm = ops.layer_norm.default
        self._linear = ops.linear.default
        self._linear_add = ops.linear_add.default
        self._linear_gated = ops.linear_gated.default
        self._linear_activation = ops.linear_activation.default

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.level)

    # ------------------------------------------------------------------------------------------------ at load

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        return cpp_linear.pack(weight, bias)

    def pack_gated(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        gate_bias: torch.Tensor | None = None,
        up_bias: torch.Tensor | None = None,
    ) -> PackedLinear:
        return cpp_linear.pack_gated(gate, up, gate_bias, up_bias)

    def make_cache(self, num_blocks: int, block_size: int, heads: HeadShape, dtype: torch.dtype) -> CppCache:
        return cpp_attention.make_cache(num_blocks, block_size, heads, dtype)

    def new_choices(self, num_rows: int) -> torch.Tensor:
        """What the choice of tokens from the head is written to: int64, the token of each row."""
        return torch.zeros(num_rows, dtype=torch.int64)

    # ---------------------------------------------------------------------------------------------- in a step

    def embed(
        self, token_ids: torch.Tensor, table: PackedLinear | torch.Tensor, scale: float, hidden: torch.Tensor
    ) -> None:
        if isinstance(table, PackedLinear):
            self._embed(self._level, token_ids, table.data, table.out_features, scale, hidden)
        else:
            self._embed(self._level, token_ids, table, table.shape[0], scale, hidden)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        self._rms_norm(self._level, x, weight, eps, out)

    def rms_norm_add(self, x: torch.Tensor, weight: torch.Tensor, eps: float, scale: float, out: torch.Tensor) -> None:
        self._rms_norm_add(self._level, x, weight, eps, scale, out)

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, out: torch.Tensor
    ) -> None:
        self._layer_norm(self._level, x, weight, bias, eps, out)

    def linear(
        self, x: torch.Tensor, weight: PackedLinear, out: torch.Tensor, scale: float = 1.0, softcap: float = 0.0
    ) -> None:
        self._linear(self._level, x, weight.data, weight.bias, scale, softcap, out)

    def linear_add(self, x: torch.Tensor, weight: PackedLinear, scale: float, out: torch.Tensor) -> None:
        self._linear_add(self._level, x, weight.data, weight.bias, scale, out)

    def linear_gated(self, x: torch.Tensor, weight: PackedLinear, activation: str, out: torch.Tensor) -> None:
        self._linear_gated(self._level, x, weight.data, weight.bias, ACTIVATION_NUMBERS[activation], out)

    def linear_activation(self, x: torch.Tensor, weight: PackedLinear, activation: str, out: torch.Tensor) -> None:
        self._linear_activation(self._level, x, weight.data, weight.bias, ACTIVATION_NUMBERS[activation], out)

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
        cpp_attention.rotate_write(self._level, qkv, heads, norms, rotary, plan, _own(cache), queries)

    def attend(
        self,
        queries: torch.Tensor,
        heads: HeadShape,
        rule: AttentionRule,
        plan: StepPlan,
        cache: LayerCache,
        out: torch.Tensor,
    ) -> None:
        cpp_attention.attend(self._level, queries, rule, plan, _own(cache), out)

    def choose(self, logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return self._choose(logits, temperatures, keys)


def _own(cache: LayerCache) -> CppCache:
    if not isinstance(cache, CppCache):
        raise TypeError(f"a cache of these operations is expected, not {type(cache).__name__}")
    return cache
