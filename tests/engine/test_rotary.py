"""Rotary tables give the model's own values, and a neighbour's length changes nothing."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.rotary import RotaryTable

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "short_factor": [1.0] * 8,
        "long_factor": [float(index + 2) for index in range(8)],
        "original_max_position_embeddings": 128,
    },
}


def rotary(name):
    return LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=64, num_attention_heads=4, max_position_embeddings=512, rope_parameters=dict(ROPES[name])
        )
    )


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_the_models_own_at_full_length(name, dtype):
    """The oracle sees the longest allowed sequence, as the table promises to assume."""
    table = RotaryTable(rotary(name), max_model_len=400)
    x = torch.zeros(1, 16, 64, dtype=dtype)
    positions = torch.tensor([[0, 5, 399, 64, 63, 127, 128, 300]])
    table.max_position = 399
    found = table(x, positions)
    expected = rotary(name)(x, torch.arange(400)[None])
    for part, whole in zip(found, expected, strict=True):
        assert part.dtype == dtype
        torch.testing.assert_close(
            part[0], whole[0, positions[0]], atol=1e-6 if dtype == torch.float32 else 1e-2, rtol=0
        )


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_a_long_neighbour_changes_nothing(name):
    table = RotaryTable(rotary(name), max_model_len=400)
    x = torch.zeros(1, 2, 64)
    table.max_position = 6
    alone = table(x, torch.tensor([[5, 6]]))
    table.max_position = 390
    beside = table(x, torch.tensor([[5, 390]]))
    assert torch.equal(alone[0][0, 0], beside[0][0, 0])
    assert torch.equal(alone[1][0, 0], beside[1][0, 0])


def test_short_limit_keeps_short_factors():
    """A limit within the original length gives exactly what transformers gives for short sequences."""
    table = RotaryTable(rotary("longrope"), max_model_len=100)
    table.max_position = 9
    positions = torch.arange(10)[None]
    for part, expected in zip(
        table(torch.zeros(1, 1, 64), positions), rotary("longrope")(torch.zeros(1, 1, 64), positions), strict=True
    ):
        torch.testing.assert_close(part, expected, atol=1e-6, rtol=0)


def test_growth_keeps_what_was_there():
    module = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=8192))
    table = RotaryTable(module, max_model_len=8192)
    x = torch.zeros(1, 1, 64)
    table.max_position = 3
    before = table(x, torch.tensor([[0, 1, 2, 3]]))[0]
    table.max_position = 5000
    assert torch.equal(table(x, torch.tensor([[0, 1, 2, 3]]))[0], before)
    assert table(x, torch.tensor([[5000]]))[0].shape == (1, 1, 16)
