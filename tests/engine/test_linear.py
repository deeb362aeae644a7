"""Tiled layers give the plain layers' values, and a row's bits whatever else is in the batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from engine.kernels.build import NoKernels, library
from engine.linear import (
    TILE_ROWS,
    TiledActivation,
    TiledHead,
    TiledLinear,
    TiledNorm,
    multiplies_elsewhere,
    padded_rows,
    tile_layers,
)
from engine.packed_linear import PackedEmbedding, PackedHead, PackedLayer, packed_level

SIZES = [1, 2, 15, 16, 17, 33, 64]


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def assert_rows_keep_their_bits(layer, width, dtype):
    torch.manual_seed(5)
    x = torch.randn(1, 64, width).to(dtype)
    every = layer(x)
    for size in SIZES:
        for first in {0, 1, 64 - size} & set(range(64 - size + 1)):
            part = layer(x[:, first : first + size])
            assert torch.equal(part, every[:, first : first + size]), (size, first)
    return x, every


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(64, 64), (576, 192), (40, 203), (1536, 576)])
def test_linear(dtype, bias, shape):
    in_features, out_features = shape
    plain = nn.Linear(in_features, out_features, bias=bias, dtype=dtype)
    tiled = TiledLinear.of_linear(plain)
    x, out = assert_rows_keep_their_bits(tiled, shape[0], dtype)
    torch.testing.assert_close(out, plain(x))
    assert tiled.weight is plain.weight


@pytest.mark.parametrize("bias", [False, True])
def test_head_is_summed_in_float32(bias):
    """Against float64; bfloat16 logits would be off by 2⁻⁹ of their size."""
    plain = nn.Linear(96, 5000, bias=bias, dtype=torch.bfloat16)
    x, out = assert_rows_keep_their_bits(TiledHead(plain), 96, torch.bfloat16)
    assert out.dtype == torch.float32
    expected = x.double() @ plain.weight.double().t() + (plain.bias.double() if bias else 0)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    assert TiledHead(plain)(x[:, :0]).shape == (1, 0, 5000)


def test_conv1d():
    plain = Conv1D(72, 40)
    x, out = assert_rows_keep_their_bits(TiledLinear.of_conv1d(plain), 40, torch.float32)
    torch.testing.assert_close(out, plain(x))


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "quick_gelu", "relu2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [104, 1000])
def test_activation(name, dtype, width):
    """64 × 1000 elements are more than one piece; 104 and 1000 aren't multiples of a vector."""
    plain = ACT2FN[name]
    x, out = assert_rows_keep_their_bits(TiledActivation(plain), width, dtype)
    torch.testing.assert_close(out, plain(x))
    strided = x.transpose(1, 2)
    assert torch.equal(TiledActivation(plain)(strided), out.transpose(1, 2))


def test_an_untiled_activation_depends_on_the_batch():
    """What the tiling is there for happens on this machine, or the tests above prove nothing about it."""
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("no vector unit, no vector tails")
    torch.manual_seed(0)
    x = torch.randn(100_003) * 4
    every = nn.functional.silu(x)
    pieces = [slice(first, first + size) for first in (0, 1, 5, 64) for size in (7, 17, 33, 65, 97, 1001)]
    assert any(not torch.equal(nn.functional.silu(x[piece].clone()), every[piece]) for piece in pieces)


def test_norm():
    norm = nn.LayerNorm(40)
    x = torch.randn(1, 48, 40)
    assert torch.equal(TiledNorm(norm)(x), norm(x))


def test_padded_rows():
    assert [padded_rows(size) for size in (0, 1, 16, 17)] == [16, 16, 16, 32]
    assert TILE_ROWS == 16


def test_every_layer_is_replaced(tiny_model):
    folder = tiny_model("phi-full-partial-rotary-biases")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    tile_layers(model, model.get_output_embeddings(), on_cpu=True)
    assert not [name for name, module in model.named_modules() if type(module) is nn.Linear]
    assert isinstance(model.lm_head, TiledHead)
    assert isinstance(model.model.layers[0].mlp.activation_fn, TiledActivation)
    assert isinstance(model.model.layers[0].input_layernorm, nn.LayerNorm)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    tile_layers(model, model.get_output_embeddings(), on_cpu=False)
    assert isinstance(model.model.layers[0].input_layernorm, TiledNorm)


@pytest.fixture
def level():
    try:
        return library()
    except NoKernels as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(64, 64), (576, 192), (41, 203)])
def test_packed_linear(dtype, bias, shape, level):
    num_in, num_out = shape
    plain = nn.Linear(num_in, num_out, bias=bias, dtype=dtype)
    packed = PackedLayer.of_linear(plain, level)
    x, out = assert_rows_keep_their_bits(packed, shape[0], dtype)
    torch.testing.assert_close(out, plain(x))
    assert torch.equal(packed.weight, plain.weight)
    assert packed(x[:, :0]).shape == (1, 0, shape[1])


def test_packed_head_and_its_embedding(level):
    plain = nn.Linear(96, 5000, bias=False, dtype=torch.bfloat16)
    head = PackedHead(plain, level)
    x, out = assert_rows_keep_their_bits(head, 96, torch.bfloat16)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), x.double() @ plain.weight.double().t(), atol=1e-5, rtol=1e-5)
    ids = torch.tensor([[0, 31, 32, 4999], [7, 7, 1, 2]])
    assert torch.equal(PackedEmbedding(head, None)(ids), plain.weight[ids])


def test_packed_conv1d(level):
    plain = Conv1D(72, 40)
    packed = PackedLayer.of_conv1d(plain, level)
    x, out = assert_rows_keep_their_bits(packed, 40, torch.float32)
    torch.testing.assert_close(out, plain(x))
    assert packed.nf == 72


@pytest.mark.parametrize("name", ["llama-multi-query-tied", "gpt2-learned-positions", "phi-full-partial-rotary-biases"])
def test_packed_weights_are_not_held_twice(name, tiny_model, level):
    """What the model holds afterwards is its packed weights, its norms and what it looks up; each once."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_model(name)))
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    originals = [module for module in model.modules() if isinstance(module, (nn.Linear, Conv1D))]
    tile_layers(model, model.get_output_embeddings(), on_cpu=True, level=level)
    assert all(module.weight is None for module in originals), "freed although somebody still holds the layer"
    assert isinstance(model.lm_head, PackedHead)
    assert isinstance(model.get_input_embeddings(), PackedEmbedding if tied else nn.Embedding)
    assert not any(p.dim() > 1 for p in model.parameters() if p.shape[0] not in (203, 512)), "beyond embeddings"
    assert sum(p.shape[0] == 203 for p in model.parameters() if p.dim() > 1) == (0 if tied else 1)
    assert not multiplies_elsewhere(model)


def test_what_is_left_lets_go_of_the_weight_file(tiny_model, level):
    """Weights are views of one mapped file; a norm that stayed one would keep all of it in memory."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_model("llama-grouped-biases")))
    file = torch.randn(10_000)
    model.model.norm.weight.data = file[100:164]
    tile_layers(model, model.get_output_embeddings(), on_cpu=True, level=level)
    assert torch.equal(model.model.norm.weight, file[100:164])
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


def test_a_scaling_embedding_keeps_its_weight(tiny_model, level):
    """Gemma's multiplies as well, so the head goes on sharing its weight."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_model("gemma3-two-ropes-sliding")))
    tile_layers(model, model.get_output_embeddings(), on_cpu=True, level=level)
    assert isinstance(model.lm_head, TiledHead)
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_experts_multiply_elsewhere(tiny_model, level):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_model("qwen3-moe")))
    tile_layers(model, model.get_output_embeddings(), on_cpu=True, level=level)
    assert multiplies_elsewhere(model)


def test_other_devices_and_dtypes_are_not_packed(level):
    assert packed_level(torch.device("cpu"), torch.bfloat16) == level
    assert packed_level(torch.device("cpu"), torch.float16) is None
    assert packed_level(torch.device("meta"), torch.bfloat16) is None
