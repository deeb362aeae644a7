"""Layers of a transformers model whose weights are packed for the C++ products.

Such a product gives a row the same bits whatever else is in the batch (engine/kernels/csrc/linear.cpp), so nothing is
tiled here. A layer keeps the packed weight alone; the model's own is freed with the layer that it replaces.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from engine.kernels import cpp_linear
from engine.kernels.build import NoKernels, level_number
from engine.kernels.ops import PackedLinear

logger = logging.getLogger(__name__)


def packed_level(device: torch.device, dtype: torch.dtype) -> str | None:
    """The level of the C++ kernels that a model's layers run at; None where they stay as they are."""
    if device.type != "cpu" or dtype not in cpp_linear.DTYPES:
        return None
    try:
        return cpp_linear.load_operations()
    except NoKernels as error:
        _tell_once(str(error).partition("\n")[0])
        return None


_told: set[str] = set()


def _tell_once(why: str) -> None:
    if why not in _told:
        _told.add(why)
        logger.warning("plain torch multiplies: %s", why)


class _Packed(nn.Module):
    """What the packed layers share: the weight, and how it looks to a model that asks for it."""

    def __init__(self, packed: PackedLinear, level: str) -> None:
        super().__init__()
        self.packed = packed
        self.in_features = packed.in_features
        self.out_features = packed.out_features
        self._level = level_number(level)

    @property
    def weight(self) -> torch.Tensor:
        """[out_features, in_features]: a copy, made anew each time, for the rare code that looks at it."""
        return cpp_linear.unpack(self.packed)

    def _product(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """x [..., in_features] → [..., out_features] of `dtype`."""
        rows = x.reshape(-1, self.in_features)
        out = torch.empty((rows.shape[0], self.out_features), dtype=dtype)
        torch.ops.tandem.linear.default(self._level, rows, self.packed.data, self.packed.bias, 1.0, 0.0, out)
        return out.view(*x.shape[:-1], self.out_features)


class PackedLayer(_Packed):
    """Stands for `nn.Linear`, or for GPT-2's `Conv1D`, which stores its weight [in, out]."""

    @classmethod
    def of_linear(cls, linear: nn.Linear, level: str) -> PackedLayer:
        return cls(cpp_linear.pack(linear.weight, linear.bias), level)

    @classmethod
    def of_conv1d(cls, layer: nn.Module, level: str) -> PackedLayer:
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        bias: torch.Tensor = layer.bias  # type: ignore[assignment]
        packed = cls(cpp_linear.pack(weight.detach().t(), bias), level)
        packed.nf = layer.nf
        return packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] → [..., out_features], rounded once."""
        return self._product(x, x.dtype)


class PackedHead(_Packed):
    """The output embedding: float32 logits, summed and left in float32."""

    def __init__(self, linear: nn.Linear, level: str) -> None:
        super().__init__(cpp_linear.pack(linear.weight, linear.bias), level)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] → float32 [..., out_features]."""
        return self._product(x, torch.float32)


class PackedEmbedding(nn.Module):
    """The input embedding of a model whose head is tied to it: rows of the head's packed weight."""

    def __init__(self, head: PackedHead, padding_idx: int | None) -> None:
        super().__init__()
        self._head = [head]  # in a list: a module within a module would be listed twice
        self.padding_idx = padding_idx
        self.num_embeddings, self.embedding_dim = head.out_features, head.in_features

    @property
    def weight(self) -> torch.Tensor:
        return self._head[0].weight

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [...] → [..., embedding_dim] of the weight's dtype."""
        head = self._head[0]
        out = torch.empty((token_ids.numel(), self.embedding_dim), dtype=torch.float32)
        ids = token_ids.reshape(-1).to(torch.int32)
        torch.ops.tandem.embed.default(head._level, ids, head.packed.data, head.out_features, 1.0, out)
        return out.to(head.packed.data.dtype).view(*token_ids.shape, self.embedding_dim)
