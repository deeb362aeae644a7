"""GGUF in, transformers' layout out: the weights, their row order, and the tokenizer's ids."""

from __future__ import annotations

import json
import logging
from itertools import pairwise

import gguf
import numpy as np
import pytest
import regex
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from engine.errors import IncompleteModel, OutOfMemory, UnsupportedModel
from engine.gguf_conversion import converted_gguf
from engine.loading import check_supported, resolve_model

GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
NUM_HEADS, KV_HEADS = 4, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "Café 123 😊",
    "x =   5\n\n\n  77 a",
    "  1",
    "It's 9pm, they'll pay 1,000,000 €",
    "\t\t2\n \n3",
    "naïve  ١٢٣",
    "",
]


def byte_alphabet():
    """GPT-2's printable stand-in for each byte (openai/gpt-2, encoder.py)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + index) for index, byte in enumerate(others)}


def spelled(text):
    alphabet = byte_alphabet()
    return "".join(alphabet[byte] for byte in text.encode())


MERGED = ["  ", "   ", " x", "af", "Caf", "é", " 1", "It", "'s"]
VOCABULARY = [*SPECIAL, *byte_alphabet().values(), *map(spelled, MERGED)]
MERGES = [tuple(map(spelled, pair)) for pair in [(" ", " "), ("  ", " "), (" ", "x"), ("a", "f"), ("C", "af")]]
MERGES += [tuple(spelled("é")), (spelled(" "), "1"), ("I", "t"), ("'", "s")]


IDS = {token: index for index, token in enumerate(VOCABULARY)}


def smollm_ids(text, merges=MERGES, ids_of=IDS):
    """An independent byte-level BPE: llama.cpp's patterns for `smollm` and the file's merges, lowest rank first."""
    pieces = [part for part in regex.split(r"(\p{N})", text) if part]
    words = []
    for piece in pieces:
        words += regex.findall(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", piece)
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    ids = []
    for word in words:
        symbols = list(spelled(word))
        while len(symbols) > 1:
            pairs = list(pairwise(symbols))
            best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
            if best not in ranks:
                break
            at = pairs.index(best)
            symbols[at : at + 2] = ["".join(best)]
        ids += [ids_of[symbol] for symbol in symbols]
    return ids


def permuted(weight, num_heads):
    """llama.cpp's `convert_hf_to_gguf.py`, LlamaModel.permute: rotary pairs side by side instead of half apart."""
    rows = weight.shape[0]
    return weight.reshape(num_heads, 2, rows // num_heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name):
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in top:
        return top[name]
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{GGUF_NAMES[module]}.{kind}"


def export_llama(path, model, pre="smollm"):
    """What llama.cpp's converter writes for a Llama model, in float32."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in VOCABULARY])
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    for name, tensor in model.state_dict().items():
        weight = tensor.numpy()
        if "q_proj" in name:
            weight = permuted(weight, NUM_HEADS)
        elif "k_proj" in name:
            weight = permuted(weight, KV_HEADS)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A tiny Llama without biases, as GGUF knows it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=NUM_HEADS,
            num_key_value_heads=KV_HEADS,
            max_position_embeddings=128,
            initializer_range=0.2,
        )
    )


@pytest.fixture(scope="module")
def converted(original, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    file = export_llama(folder / "tiny.gguf", original)
    return resolve_model(str(file), cache=folder / "cache")


def test_export_then_import_gives_the_same_weights(original, converted):
    """Case 92: q_proj and k_proj come back in their own row order."""
    weights = load_file(converted / "model.safetensors")
    expected = original.state_dict()
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name
    q_proj = expected["model.layers.0.self_attn.q_proj.weight"].numpy()
    assert not np.array_equal(permuted(q_proj, NUM_HEADS), q_proj), "the export permuted nothing"


def test_the_converted_folder_is_complete(converted, load_runner, original, sequences):
    facts = check_supported(converted)
    assert facts.eos_token_ids == (0, 2)
    assert facts.dtype == "float32"
    assert (converted / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    assert not list(converted.parent.glob(".partial*"))
    prompt = [5, 40, 9, 77, 130, 200, 31]
    logits = sequences(load_runner(converted)).run(("a", 0, prompt))
    with torch.inference_mode():
        torch.testing.assert_close(logits, original(torch.tensor([prompt])).logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_ids(converted, text):
    """Case 93, on a vocabulary in which a pattern that keeps spaces and digits together shows."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(converted)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids == smollm_ids(text)
    assert tokenizer.decode(ids) == text


def test_an_unknown_pattern_is_warned_of_at_every_start(original, tmp_path, caplog):
    file = export_llama(tmp_path / "odd.gguf", original, pre="no-such-pattern")
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "engine.gguf_conversion"):
            converted_gguf(file, cache=tmp_path / "cache")
        assert "odd.gguf cuts text by the pattern 'no-such-pattern'" in caplog.text


def test_converted_once(converted, original, tmp_path, monkeypatch):
    file = export_llama(tmp_path / "tiny.gguf", original)
    folder = resolve_model(str(tmp_path), cache=tmp_path / "cache")
    monkeypatch.setattr("engine.gguf_conversion.convert_gguf", lambda *args: pytest.fail("converted again"))
    assert resolve_model(str(file), cache=tmp_path / "cache") == folder
    assert folder.name == converted.name, "the name follows the content"


def test_damaged_files_leave_nothing_behind(original, tmp_path):
    file = export_llama(tmp_path / "tiny.gguf", original)
    whole = file.read_bytes()
    for content in (b"GGUF", b"not a model at all" * 10, whole[: len(whole) // 2]):
        file.write_bytes(content)
        with pytest.raises((IncompleteModel, UnsupportedModel), match=r"tiny\.gguf"):
            converted_gguf(file, cache=tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_a_full_disk_is_said_so(original, tmp_path, monkeypatch):
    file = export_llama(tmp_path / "tiny.gguf", original)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(OutOfMemory, match=r"no disk space for tiny-.*0\.00 GB are free"):
        converted_gguf(file, cache=tmp_path / "cache")


def test_several_files_in_a_folder_need_a_name(original, tmp_path):
    export_llama(tmp_path / "a.gguf", original)
    export_llama(tmp_path / "b.gguf", original)
    with pytest.raises(UnsupportedModel, match="holds 2 GGUF files; name one of them"):
        resolve_model(str(tmp_path), cache=tmp_path / "cache")


def test_transformers_loads_the_folder(converted, original):
    model = AutoModelForCausalLM.from_pretrained(converted)
    assert json.loads((converted / "config.json").read_text())["model_type"] == "llama"
    assert torch.equal(model.model.embed_tokens.weight, original.model.embed_tokens.weight)


@pytest.mark.real_model
def test_default_model_tokenizer(default_model):
    """Case 93 on the real vocabulary; and the ids that SmolLM2's own repository documents for its chat format."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(default_model)
    model = json.loads((default_model / "tokenizer.json").read_text())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    for text in TEXTS:
        assert tokenizer(text, add_special_tokens=False).input_ids == smollm_ids(text, merges, model["vocab"])
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert tokenizer("hi").input_ids == smollm_ids("hi", merges, model["vocab"]), "no BOS of its own"
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert rendered.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert check_supported(default_model).eos_token_ids == (2,)
