"""From a folder to a decoder: what of a checkpoint can be wrong, and steps as graphs."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.cuda_graphs import RepeatingRecorder
from engine.decoder_route import DecoderModel, decoder_spec, refusal
from engine.decoder_spec import DecoderSpec
from engine.decoder_weights import Checkpoint, WeightReader
from engine.errors import IncompleteModel
from engine.kernels.build import NoKernels
from engine.kernels.cpp_ops import CppOps
from engine.kernels.ops import PackedLinear
from engine.kernels.torch_ops import TorchOps
from engine.loading import check_supported
from engine.runner import ModelRunner, RunnerOptions
from tests.engine.conftest import Sequences

CPU = torch.device("cpu")


def spec_of(facts) -> DecoderSpec:
    spec = decoder_spec(facts, 512)
    assert isinstance(spec, DecoderSpec)
    return spec


@pytest.fixture
def folder(tiny_model, tmp_path):
    """A copy to damage."""
    return shutil.copytree(tiny_model("llama-grouped-biases"), tmp_path / "model")


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def read(folder) -> dict[str, object]:
    facts = check_supported(folder)
    return dict(WeightReader(spec_of(facts), Checkpoint(folder), TorchOps(CPU), torch.float32, CPU).items())


def test_weights_that_lack_a_tensor_are_refused(folder):
    change_weights(folder, lambda weights: weights.pop("model.layers.1.self_attn.v_proj.bias"))
    with pytest.raises(IncompleteModel, match=r"lack model\.layers\.1\.self_attn\.v_proj\.bias"):
        read(folder)


def test_weights_of_another_shape_are_refused(folder):
    change_weights(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(63)}))
    with pytest.raises(IncompleteModel, match=r"model\.norm\.weight is \[63\] instead of \[64\]"):
        read(folder)


def test_a_model_saved_without_its_head_is_read(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model("llama-multi-query-tied"), tmp_path / "model")
    before = read(folder)

    def strip(weights):
        for name in list(weights):
            weights[name.removeprefix("model.")] = weights.pop(name)

    change_weights(folder, strip)
    after = read(folder)
    assert before.keys() == after.keys()
    assert "embedding" not in after, "the head is packed once and embeds too"
    head, same = before["head"], after["head"]
    assert isinstance(head, PackedLinear)
    assert isinstance(same, PackedLinear)
    assert torch.equal(head.data, same.data)


def test_why_the_decoder_refuses(folder):
    facts = check_supported(folder)
    spec, ops = spec_of(facts), TorchOps(CPU)
    assert refusal(facts, spec, ops, torch.float32, 16) is None
    assert "a cache of 1 blocks of 0 tokens" in (refusal(facts, spec, ops, torch.float32, 0) or "")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    why = refusal(check_supported(folder), spec, ops, torch.float32, 16)
    assert why is not None
    assert "pytorch_model.bin isn't a safetensors file" in why


def test_steps_as_graphs_have_the_same_bits(tiny_model):
    facts = check_supported(tiny_model("llama-grouped-biases"))
    options = RunnerOptions(dtype="float32", num_blocks=40, max_sequences=6)

    def runner(recorder: RepeatingRecorder | None) -> ModelRunner:
        ops = TorchOps(CPU)
        model = DecoderModel(facts, spec_of(facts), ops, torch.float32, CPU, 512, max_sequences=6, recorder=recorder)
        return ModelRunner(model, facts, options)

    logits = []
    for recorder in (None, RepeatingRecorder()):
        state = Sequences(runner(recorder))
        prompts = [(f"s{index}", 0, list(range(5 + index, 20 + 3 * index))) for index in range(5)]
        found = [state.run(*prompts, logits="last")]
        for step in range(4):
            rows = [(name, len(tokens) + step, [7 * step + 3]) for name, _, tokens in prompts[step:]]
            found.append(state.run(*rows))
        logits.append(torch.cat(found))
    assert torch.equal(logits[0], logits[1])


def test_layers_are_coded_and_keep_their_bits(tiny_model):
    """The decoder reads less per step than the weights have bytes."""
    try:
        ops = CppOps()
    except NoKernels as error:
        pytest.skip(str(error))
    facts = check_supported(tiny_model("llama-grouped-biases"))
    spec, dtype = spec_of(facts), torch.bfloat16
    plain = dict(WeightReader(spec, Checkpoint(facts.folder), ops, dtype, CPU).items())
    logits, sizes = [], []
    for weights in (None, plain):
        model = DecoderModel(facts, spec, ops, dtype, CPU, 512, weights=weights)
        state = Sequences(ModelRunner(model, facts, RunnerOptions(num_blocks=40)))
        prompts = [(f"s{index}", 0, list(range(5 + index, 9 + 9 * index))) for index in range(5)]
        logits.append(torch.cat([state.run(*prompts), state.run(*((name, len(ids), [3]) for name, _, ids in prompts))]))
        packed = [weight for weight in model._decoder._weights.values() if isinstance(weight, PackedLinear)]
        sizes.append(sum(weight.data.nbytes for weight in packed[:-1]))
    assert torch.equal(logits[0], logits[1])
    assert sizes[0] < 0.8 * sizes[1]


def test_neither_transformers_models_nor_a_compiler_are_imported(tiny_model):
    """Each is a second and a hundred megabytes of a worker's start."""
    script = (
        "import sys; from engine.runner import ModelRunner\n"
        "ModelRunner.load(sys.argv[1], device='cpu', num_blocks=40, route='decoder', threads=1)\n"
        "print([name for name in ('transformers.modeling_utils', 'torch._dynamo') if name in sys.modules])"
    )
    folder = str(tiny_model("llama-grouped-biases"))
    ran = subprocess.run([sys.executable, "-c", script, folder], capture_output=True, text=True, check=False)
    assert ran.stdout.strip().endswith("[]"), ran.stdout + ran.stderr
