"""The least that a step can take: what it must read and multiply, by a machine's ceilings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig

from bench.ceilings import Ceilings
from engine.loading import ModelFacts


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of step."""

    rows: int
    context: int
    """tokens visible to a row's last, that one included"""
    tokens: int = 1
    """of every row in the step"""
    logits: int = 0
    """of every row; 0: of every token"""

    @property
    def num_logits(self) -> int:
        return self.logits or self.tokens


@dataclass(frozen=True, slots=True)
class Costs:
    """What a model reads and multiplies, for floors."""

    weight_bytes: float
    body_parameters: int
    ending_parameters: int
    """of them those behind the last layer's attention, which only tokens with wanted logits need"""
    head_parameters: int
    kv_bytes_per_token: int
    attention_width: int
    """query heads × head_dim × layers"""

    @classmethod
    def of(cls, facts: ModelFacts, dtype: torch.dtype, layer_share: float = 1.0) -> Costs:
        """`layer_share`: of their dtype's bytes, what the layers' weights are held in."""
        config: Any = AutoConfig.from_pretrained(facts.folder, local_files_only=True).get_text_config(decoder=True)
        head = facts.vocab_size * config.hidden_size
        # An embedding that isn't the head is read a row per token.
        body = facts.num_parameters - head * (1 if config.tie_word_embeddings else 2)
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        qkv = config.hidden_size * (config.num_attention_heads + 2 * kv_heads) * facts.head_dim
        return cls(
            weight_bytes=(layer_share * body + head) * dtype.itemsize,
            body_parameters=body,
            ending_parameters=body // facts.num_layers - qkv,
            head_parameters=head,
            kv_bytes_per_token=facts.kv_bytes_per_token(dtype.itemsize),
            attention_width=config.num_attention_heads * facts.head_dim * facts.num_layers,
        )

    def floor_s(self, work: Work, ceilings: Ceilings) -> float:
        visible = work.context - (work.tokens - 1) / 2
        flops = (
            2
            * work.rows
            * (
                (self.body_parameters - self.ending_parameters) * work.tokens
                + (self.ending_parameters + self.head_parameters) * work.num_logits
                + 2 * self.attention_width * work.tokens * visible
            )
        )
        return ceilings.floor_s(self.weight_bytes + work.rows * work.context * self.kv_bytes_per_token, flops)
