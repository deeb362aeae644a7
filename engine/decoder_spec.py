"""What a decoder is, whatever family it comes from: plain data that the weights are read by and the decoder runs by.

hidden = embedding_scale · embedding[token]
each layer:
    x = norm(hidden)                            unless post_norms alone
    q, k, v = x Wqkv                            normalised per head or over their whole width, then rotated
    a = attention(q, k, v) Wo                   normalised if post_norms
    hidden += residual_scale · a
    x = norm(hidden)                            unless post_norms alone; the same x as above if parallel
    m = (activation(x Wg) · (x Wu)) Wd          or activation(x Wu) Wd; normalised if post_norms
    hidden += residual_scale · m
logits = cap(logit_scale · norm(hidden) Whead)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from engine.kernels.ops import HeadShape

_BLOCK = 64
"""Positions tabulated at a time: one fixed shape, so that a position's bits don't depend on how many there are."""


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Angles position · frequency of a head's first 2 · len(frequencies) elements; sines and cosines times scale."""

    frequencies: tuple[float, ...]
    """float32 values"""
    scale: float
    interleaved: bool
    """pairs are neighbours instead of halves"""

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.frequencies)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What may differ from layer to layer."""

    window: int | None
    """a query sees its last so many positions, itself included; None: all"""
    rotary: RotarySpec | None
    """None: this layer knows no positions"""


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Names of modules, those of a layer without the layer's own; `.weight` and `.bias` follow. None: there is none."""

    embedding: str = "model.embed_tokens"
    head: str = "lm_head"
    final_norm: str = "model.norm"
    layer: str = "model.layers.{}"
    attention_norm: str | None = "input_layernorm"
    attention_post_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """one name: queries, keys and values fused in this order"""
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    out: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """one name: fused in this order, or the only one of a plain MLP"""
    down: str = "mlp.down_proj"


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """See the module's text."""

    vocab_size: int
    hidden_size: int
    mlp_size: int
    heads: HeadShape
    layers: tuple[LayerSpec, ...]
    names: WeightNames
    norm: Literal["rms", "layer"]
    norm_eps: float
    norm_offset: float
    """what is added to norm weights as they are stored"""
    norm_bias: bool
    head_norms: Literal["none", "head", "row"]
    """queries and keys are normalised not at all, per head, or over the width of all heads"""
    parallel: bool
    activation: str
    """one of `engine.kernels.ops.ACTIVATIONS`"""
    gated: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    head_bias: bool
    tied_head: bool
    """the head's weight is the embedding"""
    attention_scale: float
    attention_softcap: float | None
    embedding_scale: float
    residual_scale: float
    logit_scale: float
    logit_softcap: float
    """0: none"""


def rotary_table(spec: RotarySpec, num_positions: int) -> torch.Tensor:
    """float32 [num_positions, rotary_dim]: cosines, then sines, for `engine.kernels.ops.Rotary`.

    An angle is the float32 product that transformers takes; its sine and cosine are computed in float64 and rounded
    once, so that they are the same on hosts whose vector libraries differ.
    """
    half = len(spec.frequencies)
    frequencies = torch.tensor(spec.frequencies, dtype=torch.float32)
    table = torch.empty((-(-num_positions // _BLOCK) * _BLOCK, 2 * half), dtype=torch.float32)
    for start in range(0, num_positions, _BLOCK):
        positions = torch.arange(start, start + _BLOCK, dtype=torch.float32)
        angles = (positions[:, None] * frequencies).double()
        block = table[start : start + _BLOCK]
        block[:, :half] = angles.cos() * spec.scale
        block[:, half:] = angles.sin() * spec.scale
    return table[:num_positions].contiguous()
