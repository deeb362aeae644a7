"""A model of a given shape with random weights: for measuring without downloading one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.decoder import Decoder
from engine.decoder_spec import DecoderSpec, LayerSpec, RotarySpec, WeightNames
from engine.decoder_weights import Weight
from engine.kernels.ops import HeadShape, LayerCache, Ops, PackedLinear


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama-shaped model."""

    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    heads: HeadShape
    rope_theta: float = 500000.0

    @property
    def matrix_elements(self) -> int:
        """Elements that a step of one token multiplies by: all but the embedding."""
        queries, keys = self.heads.num_heads * self.heads.head_dim, self.heads.kv_heads * self.heads.head_dim
        layer = self.hidden_size * (2 * queries + 2 * keys + 3 * self.mlp_size)
        return self.num_layers * layer + self.vocab_size * self.hidden_size

    @property
    def kv_elements_per_token(self) -> int:
        return 2 * self.num_layers * self.heads.kv_heads * self.heads.head_dim


LLAMA_8B = Shape(128256, 4096, 14336, 32, HeadShape(32, 8, 128))
"""Llama 3 8B's"""
TINY = Shape(203, 64, 96, 2, HeadShape(4, 2, 16))


def spec_of(shape: Shape) -> DecoderSpec:
    """What the decoder runs such a model by."""
    dims = torch.arange(0, shape.heads.head_dim, 2, dtype=torch.float) / shape.heads.head_dim
    rotary = RotarySpec(tuple((1.0 / shape.rope_theta**dims).tolist()), 1.0, interleaved=False)
    return DecoderSpec(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        mlp_size=shape.mlp_size,
        heads=shape.heads,
        layers=(LayerSpec(None, rotary),) * shape.num_layers,
        names=WeightNames(),
        norm="rms",
        norm_eps=1e-5,
        norm_offset=0.0,
        norm_bias=False,
        head_norms="none",
        parallel=False,
        activation="silu",
        gated=True,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        head_bias=False,
        tied_head=False,
        attention_scale=shape.heads.head_dim**-0.5,
        attention_softcap=None,
        embedding_scale=1.0,
        residual_scale=1.0,
        logit_scale=1.0,
        logit_softcap=0.0,
    )


def random_weights(
    shape: Shape, ops: Ops, dtype: torch.dtype, device: torch.device, seed: int = 1
) -> dict[str, Weight]:
    """Under the decoder's names, drawn on the device; scaled so that activations keep their size."""
    random = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        drawn = torch.empty((rows, columns), dtype=dtype, device=device)
        return drawn.normal_(0.0, columns**-0.5, generator=random)

    def packed(rows: int, columns: int) -> PackedLinear:
        return ops.pack(matrix(rows, columns))

    hidden, mlp, heads = shape.hidden_size, shape.mlp_size, shape.heads
    queries, keys = heads.num_heads * heads.head_dim, heads.kv_heads * heads.head_dim
    ones = torch.ones(hidden, device=device)
    weights: dict[str, Weight] = {
        "embedding": matrix(shape.vocab_size, hidden) * hidden**0.5,
        "head": packed(shape.vocab_size, hidden),
        "final_norm": ones,
    }
    for index in range(shape.num_layers):
        name = f"layers.{index}"
        weights[f"{name}.attention_norm"] = weights[f"{name}.mlp_norm"] = ones
        weights[f"{name}.qkv"] = packed(queries + 2 * keys, hidden)
        weights[f"{name}.out"] = packed(hidden, queries)
        weights[f"{name}.gate_up"] = ops.pack_gated(matrix(mlp, hidden), matrix(mlp, hidden))
        weights[f"{name}.down"] = packed(hidden, mlp)
    return weights


def random_decoder(
    shape: Shape,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    *,
    num_blocks: int,
    block_size: int,
) -> tuple[Decoder, list[LayerCache]]:
    """Ready to run, and the caches of its layers, each of so many blocks."""
    decoder = Decoder(spec_of(shape), random_weights(shape, ops, dtype, device), ops, dtype, device, max_model_len)
    caches = [ops.make_cache(num_blocks, block_size, shape.heads, dtype) for _ in range(shape.num_layers)]
    decoder.bind_caches(caches)
    return decoder, caches
