"""From a transformers configuration to what the fast decoder runs by, or the reason why it can't.

What can't be described runs on the transformers route.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.decoder_spec import DecoderSpec, LayerSpec, RotarySpec
from engine.families import FAMILIES, Family, head_dim
from engine.kernels.ops import HeadShape

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""transformers' names → ours; other activations aren't known"""


@dataclass(frozen=True, slots=True)
class Undescribed:
    """The fast decoder doesn't know this model."""

    reason: str


def describe(config: Any, max_model_len: int) -> DecoderSpec | Undescribed:
    """A transformers configuration → what the decoder runs by.

    Rotary settings that look at the longest sequence see `max_model_len`, so that a sequence keeps its frequencies.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        return Undescribed(f"model type {config.model_type} isn't in the decoder's table")
    for name in family.must_be_unset:
        if getattr(config, name, None):
            return Undescribed(f"{config.model_type} with {name}")
    activation = getattr(config, family.activation)
    if activation not in _ACTIVATIONS:
        return Undescribed(f"activation {activation!r}")
    if not family.partial_rotary and any(_rotary_part(settings) != 1.0 for settings in _rotary_settings(config)):
        return Undescribed(f"{config.model_type} with rotation of part of a head")
    num_heads = config.num_attention_heads
    return DecoderSpec(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        mlp_size=config.intermediate_size,
        heads=HeadShape(num_heads, getattr(config, "num_key_value_heads", None) or num_heads, head_dim(config)),
        layers=_layers(config, family, max_model_len),
        names=family.names,
        norm=family.norm,
        norm_eps=getattr(config, family.norm_eps),
        norm_offset=family.norm_offset,
        norm_bias=family.norm_bias,
        head_norms=family.head_norms,
        parallel=family.parallel,
        activation=_ACTIVATIONS[activation],
        gated=family.gated,
        qkv_bias=bool(_value(config, family.qkv_bias)),
        out_bias=bool(_value(config, family.out_bias)),
        mlp_bias=bool(_value(config, family.mlp_bias)),
        head_bias=family.head_bias,
        tied_head=bool(config.tie_word_embeddings),
        attention_scale=float(_value(config, family.attention_scale)),
        attention_softcap=_value(config, family.attention_softcap),
        embedding_scale=float(_value(config, family.embedding_scale)),
        residual_scale=float(_value(config, family.residual_scale)),
        logit_scale=float(_value(config, family.logit_scale)) / float(_value(config, family.logit_divisor)),
        logit_softcap=float(_value(config, family.logit_softcap) or 0.0),
    )


def _value(config: Any, given: Any) -> Any:
    """A constant, a field of the configuration, or what a function makes of it."""
    if callable(given):
        return given(config)
    return getattr(config, given) if isinstance(given, str) else given


def _layers(config: Any, family: Family, max_model_len: int) -> tuple[LayerSpec, ...]:
    """Layers of the same kind share one RotarySpec."""
    kinds: list[str | None] = [None] * config.num_hidden_layers
    if any(isinstance(config.rope_parameters.get(kind), dict) for kind in set(_layer_types(config))):
        kinds = list(_layer_types(config))
    rotaries = {kind: _rotary(config, family, kind, max_model_len) for kind in set(kinds)}
    layers = zip(kinds, family.windows(config), family.rotary_layers(config), strict=True)
    return tuple(LayerSpec(window, rotaries[kind] if rotated else None) for kind, window, rotated in layers)


def _layer_types(config: Any) -> list[str]:
    return getattr(config, "layer_types", None) or []


def _rotary_settings(config: Any) -> list[dict[str, Any]]:
    """One, or one for each kind of layer."""
    settings = config.rope_parameters
    return [value for value in settings.values() if isinstance(value, dict)] or [settings]


def _rotary_part(settings: dict[str, Any]) -> float:
    return settings.get("partial_rotary_factor") or 1.0


def _rotary(config: Any, family: Family, kind: str | None, max_model_len: int) -> RotarySpec:
    """`kind` is the layer type whose settings count, None where all layers share them."""
    settings = config.rope_parameters if kind is None else config.rope_parameters[kind]
    if settings["rope_type"] == "default":
        dim = int(head_dim(config) * _rotary_part(settings))
        frequencies, scale = 1.0 / (settings["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim)), 1.0
    else:
        compute = ROPE_INIT_FUNCTIONS[settings["rope_type"]]
        frequencies, scale = compute(config, torch.device("cpu"), seq_len=max_model_len, layer_type=kind)
    return RotarySpec(tuple(frequencies.float().tolist()), float(scale), family.interleaved)
