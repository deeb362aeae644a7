"""Tiny models with seeded weights, one configuration for each thing that sets a family apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB_SIZE = 203
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 104,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_WINDOW = 24
"""shorter than every context that the tests compare"""

CONFIGS: dict[str, dict[str, Any]] = {
    "llama-grouped-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-multi-query-tied": {"model_type": "llama", "num_key_value_heads": 1, "tie_word_embeddings": True},
    "llama3-rope": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2-biases": {"model_type": "qwen2"},
    "qwen3-qk-norm-wide-heads": {"model_type": "qwen3", "head_dim": 32},
    "mistral-sliding": {"model_type": "mistral", "sliding_window": _WINDOW, "head_dim": 16},
    "gemma2-soft-capping-sliding": {
        "model_type": "gemma2",
        "num_key_value_heads": 1,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": _WINDOW,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
        "tie_word_embeddings": True,
    },
    "gemma3-two-ropes-sliding": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": _WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "tie_word_embeddings": True,
    },
    "phi-full-partial-rotary-biases": {
        "model_type": "phi",
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "phi3-fused-sliding": {"model_type": "phi3", "sliding_window": _WINDOW, "pad_token_id": 0},
    "gpt-neox-partial-rotary-parallel": {
        "model_type": "gpt_neox",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "use_parallel_residual": True,
    },
    "olmo2-post-norm-full": {"model_type": "olmo2", "num_key_value_heads": 4},
    "cohere-interleaved-rotary-logit-scale": {"model_type": "cohere", "logit_scale": 0.25, "tie_word_embeddings": True},
    "granite-multipliers": {"model_type": "granite", "logits_scaling": 4.0, "residual_multiplier": 0.5},
    "gpt2-learned-positions": {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 512,
        "tie_word_embeddings": True,
    },
    "gpt-oss-sinks-sliding-moe": {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "sliding_window": _WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "linear-rope": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    },
    "dynamic-rope": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    },
    "yarn-rope": {
        "model_type": "qwen2",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "phi3-longrope-partial-rotary": {
        "model_type": "phi3",
        "original_max_position_embeddings": 32,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 1.5, 2.0, 4.0],
        },
    },
    "ministral-mixed-windows": {
        "model_type": "ministral",
        "head_dim": 16,
        "sliding_window": _WINDOW,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "gemma-scaled-embedding": {"model_type": "gemma", "head_dim": 32, "tie_word_embeddings": True},
    "olmo3-post-norm-sliding": {
        "model_type": "olmo3",
        "sliding_window": _WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "exaone4-post-norm-sliding-nope": {
        "model_type": "exaone4",
        "head_dim": 16,
        "sliding_window": _WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "smollm3-nope": {"model_type": "smollm3", "no_rope_layers": [1, 0, 1], "tie_word_embeddings": True},
    "starcoder2-layer-norm-plain": {"model_type": "starcoder2", "sliding_window": _WINDOW, "use_bias": True},
    "cohere2-sliding-nope": {
        "model_type": "cohere2",
        "logit_scale": 0.25,
        "sliding_window": _WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "tie_word_embeddings": True,
    },
    "glm-partial-interleaved": {"model_type": "glm", "head_dim": 16},
    "glm4-norms-around": {"model_type": "glm4", "head_dim": 16},
    "ernie4_5-interleaved-biases": {"model_type": "ernie4_5", "head_dim": 16, "use_bias": True},
    "helium-interleaved": {"model_type": "helium", "head_dim": 16},
    "seed_oss-biases": {"model_type": "seed_oss", "head_dim": 16, "attention_out_bias": True},
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "decoder_sparse_step": 1,
    },
}


def tiny_config(name: str, **changes: Any) -> Any:
    """The named configuration, as transformers reads it."""
    settings = {**_BASE, **CONFIGS[name], **changes}
    if settings["model_type"] == "gpt2":
        for absent in ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"):
            del settings[absent]
    return AutoConfig.for_model(**settings)


def write_tiny_model(folder: Path, name: str, **changes: Any) -> Path:
    """A folder with configuration, seeded weights and a tokenizer file for the named configuration."""
    config = tiny_config(name, **changes)
    torch.manual_seed(20)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Norm weights and biases start as ones and zeros; a model that dropped them would look right.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        if config.tie_word_embeddings:
            # A token's own embedding would win every argmax, and the output be one token for ever.
            model.get_input_embeddings().weight.mul_(0.1)
    model.save_pretrained(folder)
    vocabulary = {f"t{token_id}": token_id for token_id in range(VOCAB_SIZE)}
    tokenizer = {"model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder
