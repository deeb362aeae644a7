"""What a folder holds, and every refusal by name, before any weight is read."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.errors import IncompleteModel, ModelNotFound, UnsupportedModel
from engine.loading import check_supported, resolve_model


@pytest.fixture
def folder(tiny_model, tmp_path):
    """A copy to damage."""
    return shutil.copytree(tiny_model("llama-grouped-biases"), tmp_path / "model")


def change_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps(config))


def test_facts(folder):
    facts = check_supported(folder)
    assert (facts.model_type, facts.architecture) == ("llama", "LlamaForCausalLM")
    assert (facts.vocab_size, facts.max_model_len, facts.num_layers) == (203, 512, 3)
    assert (facts.kv_heads, facts.head_dim, facts.dtype) == (2, 16, "float32")
    assert (facts.bos_token_id, facts.eos_token_ids) == (1, (2,))
    assert facts.kv_bytes_per_token(4) == 2 * 3 * 2 * 16 * 4
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert facts.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_eos_of_the_generation_config_wins(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    assert check_supported(folder).eos_token_ids == (2, 9)


def test_content_id_follows_the_content(folder, tiny_model):
    before = check_supported(folder).content_id
    assert before == check_supported(tiny_model("llama-grouped-biases")).content_id
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert check_supported(folder).content_id != before


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("t5", "t5 is an encoder-decoder model"),
        ("bart", "bart is an encoder-decoder model"),
        ("mamba", "mamba has recurrent or hybrid state-space layers"),
        ("jamba", "jamba has recurrent or hybrid state-space layers"),
        ("rwkv", "rwkv has recurrent or hybrid state-space layers"),
        ("bamba", "bamba has recurrent or hybrid state-space layers"),
        ("falcon_h1", "falcon_h1 has recurrent or hybrid state-space layers"),
        ("qwen3_next", "qwen3_next has recurrent or hybrid state-space layers"),
        ("recurrent_gemma", "recurrent_gemma has recurrent or hybrid state-space layers"),
        ("bloom", "BloomForCausalLM doesn't use transformers' attention interface"),
        ("clip", "no causal language model for model type 'clip'"),
        ("no_such_type", "can't read model type 'no_such_type'"),
    ],
)
def test_refused_kinds(tmp_path, name, reason):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        check_supported(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "unknown rope type 'spiral'"),
        ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, "unknown rope type 'spiral'"),
        ({"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4}}, "unknown rope type 'mrope'"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "spiral", "rope_theta": 1e4}}},
            "unknown rope type 'spiral'",
        ),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantised \(gptq\)"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification is no text generation"),
        ({"model_type": "mistral3"}, "mistral3"),
    ],
)
def test_refused_settings(folder, changes, reason):
    change_config(folder, **changes)
    with pytest.raises(UnsupportedModel, match=reason):
        check_supported(folder)


def test_linear_attention_layers_are_refused(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model("qwen3-qk-norm-wide-heads"), tmp_path / "model")
    change_config(folder, layer_types=["full_attention", "linear_attention", "full_attention"])
    with pytest.raises(UnsupportedModel, match="linear_attention"):
        check_supported(folder)


def test_code_in_the_folder_is_not_run(folder):
    change_config(folder, model_type="own", auto_map={"AutoConfig": "configuration_own.OwnConfig"})
    (folder / "configuration_own.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UnsupportedModel, match="code of its own, which isn't run"):
        check_supported(folder)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_files_are_named(folder, missing):
    (folder / missing).unlink()
    with pytest.raises(IncompleteModel, match=missing.replace(".", r"\.")):
        check_supported(folder)


def test_a_draft_model_may_come_without_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    assert check_supported(folder, needs_tokenizer=False).vocab_size == 203


def test_a_missing_shard_is_named(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="150KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert check_supported(folder).num_parameters == sum(parameter.numel() for parameter in model.parameters())
    shards[1].unlink()
    with pytest.raises(IncompleteModel, match=shards[1].name):
        check_supported(folder)


def test_a_shard_cut_short_is_named(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(IncompleteModel, match=r"model\.safetensors is cut short"):
        check_supported(folder)
    path.write_bytes(b"\xff" * 50)
    with pytest.raises(IncompleteModel, match=r"model\.safetensors is damaged"):
        check_supported(folder)


def test_weights_that_lack_a_tensor_are_refused(folder, load_runner):
    """transformers would fill it with noise."""
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(IncompleteModel, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_runner(folder)


def test_weights_of_another_shape_are_refused(folder, load_runner):
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"][:32].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(IncompleteModel, match=r"model\.norm\.weight"):
        load_runner(folder)


def test_damaged_config(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(IncompleteModel, match=r"config\.json can't be read"):
        check_supported(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(IncompleteModel, match="names no model_type"):
        check_supported(folder)


def test_resolve(folder, tmp_path, monkeypatch):
    assert resolve_model(str(folder)) == folder
    with pytest.raises(ModelNotFound, match="no folder or file /nowhere/model"):
        resolve_model("/nowhere/model")
    with pytest.raises(ModelNotFound, match=r"no folder or file \./nowhere"):
        resolve_model("./nowhere")
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedModel, match=r"only \.gguf files"):
        resolve_model(str(tmp_path / "weights.bin"))


def test_an_unreachable_hub_is_said_so(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match=r"no folder nobody/nothing-of-this-name.*hub can't be reached"):
        resolve_model("nobody/nothing-of-this-name")


def test_longer_than_the_model_is_refused(folder, load_runner):
    with pytest.raises(UnsupportedModel, match="max_model_len 513 is outside 1 … 512"):
        load_runner(folder, max_model_len=513)


def test_an_absent_device_is_refused(folder, load_runner):
    with pytest.raises(UnsupportedModel, match="no CUDA GPU"):
        load_runner(folder, device="cuda:7")


def test_unknown_dtype(folder, load_runner):
    with pytest.raises(ValueError, match="'float8' is not one of float32, bfloat16"):
        load_runner(folder, dtype="float8")
