"""The table of families, and what is read from a configuration by it."""

from __future__ import annotations

import pytest
import torch

from engine.decoder_spec import DecoderSpec, RotarySpec, rotary_table
from engine.description import Undescribed, describe
from engine.families import FAMILIES
from tests.engine.models import CONFIGS, tiny_config


def described(name: str, max_model_len: int = 512, **changes: object) -> DecoderSpec:
    spec = describe(tiny_config(name, **changes), max_model_len)
    assert isinstance(spec, DecoderSpec), spec
    return spec


def reason(name: str, **changes: object) -> str:
    spec = describe(tiny_config(name, **changes), 512)
    assert isinstance(spec, Undescribed)
    return spec.reason


def test_every_family_is_tested_against_transformers():
    """tests/engine/test_decoder.py runs every configuration whose type is in the table."""
    assert set(FAMILIES) <= {settings["model_type"] for settings in CONFIGS.values()}


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("gpt2-learned-positions", {}, "model type gpt2 isn't in the decoder's table"),
        ("qwen3-moe", {}, "model type qwen3_moe"),
        ("llama-grouped-biases", {"hidden_act": "relu6"}, "activation 'relu6'"),
        ("cohere-interleaved-rotary-logit-scale", {"use_qk_norm": True}, "cohere with use_qk_norm"),
        ("phi-full-partial-rotary-biases", {"qk_layernorm": True}, "phi with qk_layernorm"),
        (
            "llama-grouped-biases",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "llama with rotation of part of a head",
        ),
    ],
)
def test_what_it_cannot_describe_has_a_reason(name, changes, why):
    assert why in reason(name, **changes)


def test_windows_and_rotations_per_layer():
    gemma = described("gemma3-two-ropes-sliding")
    assert [layer.window for layer in gemma.layers] == [24, None, 24]
    local, full, again = (layer.rotary for layer in gemma.layers)
    assert local is again, "layers of a kind share one table"
    assert local != full
    assert [layer.rotary is None for layer in described("smollm3-nope").layers] == [False, True, False]
    cohere = described("cohere2-sliding-nope")
    assert [(layer.window, layer.rotary is None) for layer in cohere.layers] == [(24, False), (None, True), (24, False)]
    everywhere = described("exaone4-post-norm-sliding-nope", sliding_window=None, layer_types=["full_attention"] * 3)
    assert all(layer.rotary for layer in everywhere.layers)


def test_multipliers():
    granite = described("granite-multipliers", embedding_multiplier=12.0, attention_multiplier=0.02)
    assert (granite.embedding_scale, granite.attention_scale) == (12.0, 0.02)
    assert (granite.residual_scale, granite.logit_scale) == (0.5, 0.25)
    gemma = described("gemma2-soft-capping-sliding")
    assert (gemma.embedding_scale, gemma.attention_scale) == (8.0, 0.25)
    assert (gemma.attention_softcap, gemma.logit_softcap, gemma.norm_offset) == (5.0, 10.0, 1.0)


def test_frequencies_that_look_at_the_length_see_the_longest():
    long, short = (described("phi3-longrope-partial-rotary", length).layers[0].rotary for length in (512, 32))
    assert long is not None
    assert short is not None
    assert long.rotary_dim == 8
    ratios = [a / b for a, b in zip(short.frequencies, long.frequencies, strict=True)]
    assert ratios == pytest.approx([1.0, 1.5 / 1.1, 2.0 / 1.2, 4.0 / 1.3])


def test_table_of_angles():
    spec = RotarySpec((1.0, 0.25), 2.0, interleaved=False)
    table = rotary_table(spec, 130)
    assert table.shape == (130, 4)
    angles = torch.arange(130, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.25], dtype=torch.float64)
    expected = torch.cat((2 * angles.cos(), 2 * angles.sin()), dim=1)
    assert torch.equal(table, expected.float())
    assert torch.equal(rotary_table(spec, 7), table[:7]), "a position's bits don't depend on how many there are"
