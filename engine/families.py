"""Which models the fast decoder knows: one table from a model type to what sets it apart from Llama.

`engine.description` reads a configuration by it. The values follow transformers' modelling files of the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.decoder_spec import WeightNames


def _full_attention(config: Any) -> list[int | None]:
    return [None] * config.num_hidden_layers


def _window_everywhere(config: Any) -> list[int | None]:
    return [config.sliding_window] * config.num_hidden_layers


def _window_by_layer_type(config: Any) -> list[int | None]:
    return [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]


def _rotary_everywhere(config: Any) -> list[bool]:
    return [True] * config.num_hidden_layers


def _rotary_in_sliding_layers(config: Any) -> list[bool]:
    return [kind == "sliding_attention" for kind in config.layer_types]


def _rotary_in_sliding_layers_if_any(config: Any) -> list[bool]:
    return _rotary_everywhere(config) if config.sliding_window is None else _rotary_in_sliding_layers(config)


def _rotary_where_listed(config: Any) -> list[bool]:
    return [bool(has_rotary) for has_rotary in config.no_rope_layers]


def head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _root_of_head_dim(config: Any) -> float:
    return head_dim(config) ** -0.5


def _root_of_query_scalar(config: Any) -> float:
    return config.query_pre_attn_scalar**-0.5


def _root_of_width(config: Any) -> float:
    return config.hidden_size**0.5


@dataclass(frozen=True, slots=True)
class Family:
    """What sets a model type apart from Llama; a string stands for the configuration's field of that name."""

    names: WeightNames = field(default_factory=WeightNames)
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: str = "rms_norm_eps"
    norm_offset: float = 0.0
    norm_bias: bool = False
    head_norms: Literal["none", "head", "row"] = "none"
    parallel: bool = False
    activation: str = "hidden_act"
    gated: bool = True
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    head_bias: bool = False
    windows: Callable[[Any], list[int | None]] = _full_attention
    rotary_layers: Callable[[Any], list[bool]] = _rotary_everywhere
    partial_rotary: bool = False
    """the rotary settings may name a part of the head"""
    interleaved: bool = False
    attention_scale: Callable[[Any], float] | str = _root_of_head_dim
    attention_softcap: str | None = None
    embedding_scale: Callable[[Any], float] | str | float = 1.0
    residual_scale: str | float = 1.0
    logit_scale: str | float = 1.0
    logit_divisor: str | float = 1.0
    logit_softcap: str | None = None
    must_be_unset: tuple[str, ...] = ()
    """fields that turn on what isn't described here"""


_POST_NORMS = WeightNames(
    attention_norm=None,
    attention_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="post_feedforward_layernorm",
)
_NORMS_AROUND = WeightNames(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
_GEMMA: dict[str, Any] = {
    "norm_offset": 1.0,
    "qkv_bias": "attention_bias",
    "out_bias": "attention_bias",
    "embedding_scale": _root_of_width,
    "must_be_unset": ("use_bidirectional_attention",),
}
_GEMMA2: dict[str, Any] = {
    **_GEMMA,
    "names": _NORMS_AROUND,
    "activation": "hidden_activation",
    "windows": _window_by_layer_type,
    "attention_scale": _root_of_query_scalar,
    "logit_softcap": "final_logit_softcapping",
}
_COHERE: dict[str, Any] = {
    "names": WeightNames(mlp_norm=None),
    "norm": "layer",
    "norm_eps": "layer_norm_eps",
    "parallel": True,
    "qkv_bias": "attention_bias",
    "out_bias": "attention_bias",
    "interleaved": True,
    "logit_scale": "logit_scale",
}
_GLM: dict[str, Any] = {"qkv_bias": "attention_bias", "partial_rotary": True, "interleaved": True}

FAMILIES: dict[str, Family] = {
    "llama": Family(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Family(windows=_window_everywhere),
    "ministral": Family(windows=_window_by_layer_type),
    "qwen2": Family(qkv_bias=True, windows=_window_by_layer_type),
    "qwen3": Family(
        head_norms="head", qkv_bias="attention_bias", out_bias="attention_bias", windows=_window_by_layer_type
    ),
    "phi3": Family(
        names=WeightNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
        windows=_window_everywhere,
        partial_rotary=True,
    ),
    "gemma": Family(**_GEMMA),
    "gemma2": Family(**_GEMMA2, attention_softcap="attn_logit_softcapping"),
    "gemma3_text": Family(**_GEMMA2, head_norms="head"),
    "granite": Family(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias="mlp_bias",
        attention_scale="attention_multiplier",
        embedding_scale="embedding_multiplier",
        residual_scale="residual_multiplier",
        logit_divisor="logits_scaling",
    ),
    "olmo2": Family(names=_POST_NORMS, head_norms="row", qkv_bias="attention_bias", out_bias="attention_bias"),
    "olmo3": Family(
        names=_POST_NORMS,
        head_norms="row",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        windows=_window_by_layer_type,
    ),
    "exaone4": Family(
        names=_POST_NORMS,
        head_norms="head",
        windows=_window_by_layer_type,
        rotary_layers=_rotary_in_sliding_layers_if_any,
    ),
    "smollm3": Family(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias="mlp_bias",
        windows=_window_by_layer_type,
        rotary_layers=_rotary_where_listed,
    ),
    "starcoder2": Family(
        names=WeightNames(gate_up=("mlp.c_fc",), down="mlp.c_proj"),
        norm="layer",
        norm_eps="norm_epsilon",
        norm_bias=True,
        gated=False,
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        windows=_window_everywhere,
    ),
    "phi": Family(
        names=WeightNames(
            final_norm="model.final_layernorm",
            mlp_norm=None,
            out="self_attn.dense",
            gate_up=("mlp.fc1",),
            down="mlp.fc2",
        ),
        norm="layer",
        norm_eps="layer_norm_eps",
        norm_bias=True,
        parallel=True,
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_bias=True,
        partial_rotary=True,
        must_be_unset=("qk_layernorm",),
    ),
    "cohere": Family(**_COHERE, must_be_unset=("use_qk_norm",)),
    "cohere2": Family(**_COHERE, windows=_window_by_layer_type, rotary_layers=_rotary_in_sliding_layers),
    "glm": Family(**_GLM, names=WeightNames(gate_up=("mlp.gate_up_proj",))),
    "glm4": Family(
        **_GLM,
        names=WeightNames(
            attention_post_norm="post_self_attn_layernorm",
            mlp_post_norm="post_mlp_layernorm",
            gate_up=("mlp.gate_up_proj",),
        ),
    ),
    "ernie4_5": Family(qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias", interleaved=True),
    "helium": Family(qkv_bias="attention_bias", mlp_bias="mlp_bias", interleaved=True),
    "seed_oss": Family(qkv_bias="attention_bias", out_bias="attention_out_bias", mlp_bias="mlp_bias"),
}
