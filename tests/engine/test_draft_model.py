"""A distilled draft's folder and the engine that runs it: what was written is read, and every fault is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

from drafting.round_inputs import TokenRows, choices_of, packed
from engine.draft_folder import (
    CONFIG,
    HEAD_TOKEN_IDS,
    LENS,
    WEIGHTS,
    embedding_digest,
    is_draft_folder,
    read_draft,
    write_draft,
)
from engine.draft_model import DraftRunner, load_draft
from engine.errors import ModelError, UnsupportedModel
from engine.guessing import GuessingEngine, best_two
from engine.runner import ModelRunner
from engine.sampler import SampleRow, sample
from engine.sampling_params import SamplingParams
from tests.drafting.mirroring import mirror
from tests.engine.kernels.conftest import CPU_FLAGS
from tests.engine.models import VOCAB_SIZE, tiny_config
from tests.engine.noise_oracle import oracle_bits, oracle_gumbel

TARGET = "llama3-rope"
IDS = torch.arange(3, VOCAB_SIZE, 2)
OPTIONS: dict[str, Any] = {"device": "cpu", "num_blocks": 16, "threads": 1, "dtype": "float32"}


class Draft:
    """A draft of random layers for a tiny target, as tensors and as a folder."""

    def __init__(self, target: Path, folder: Path, name: str) -> None:
        torch.manual_seed(7)
        config = tiny_config(name, num_hidden_layers=2)
        self.model = AutoModel.from_config(config, dtype=torch.float32)
        self.weights = load_file(target / "model.safetensors")
        self.embedding = self.weights["model.embed_tokens.weight"]
        self.lens = torch.eye(64) + 0.1 * torch.randn(64, 64)
        self.folder = folder
        self.model.get_input_embeddings().weight.data = self.embedding
        tensors = {f"model.{key}": value for key, value in self.model.named_parameters() if "embed_tokens" not in key}
        write_draft(
            folder,
            {
                "target": {
                    "model_type": config.model_type,
                    "hidden_size": 64,
                    "vocab_size": VOCAB_SIZE,
                    "embedding_sha256": embedding_digest(self.embedding),
                },
                "decoder": config.to_dict(),
            },
            {**{key: value.detach() for key, value in tensors.items()}, LENS: self.lens, HEAD_TOKEN_IDS: IDS},
        )

    @torch.no_grad()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """By transformers, from the tensors as they are stored."""
        stored = read_draft(self.folder)
        names = {f"model.{key}": parameter for key, parameter in self.model.named_parameters()}
        for key, value in stored.tensors.items():
            if key in names:
                names[key].copy_(value)
        hidden = self.model(input_ids=torch.tensor([token_ids])).last_hidden_state[0]
        head = self.weights.get("lm_head.weight", self.embedding)[IDS]
        return hidden @ stored.tensors[LENS].T @ head.T


@pytest.fixture(scope="module", params=[TARGET, "llama-multi-query-tied", "qwen3-qk-norm-wide-heads"])
def made(
    request: pytest.FixtureRequest, tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Draft]:
    target = tiny_model(request.param)
    return target, Draft(target, tmp_path_factory.mktemp("draft"), request.param)


@pytest.fixture
def draft(tiny_model: Callable[[str], Path], tmp_path: Path) -> tuple[Path, Path]:
    """Target and draft folder, for a test to damage the latter."""
    target = tiny_model(TARGET)
    return target, Draft(target, tmp_path / "draft", TARGET).folder


def load(made: tuple[Path, Draft], kernels: str, **options: Any) -> DraftRunner:
    try:
        return load_draft(made[1].folder, made[0], kernels=kernels, **{**OPTIONS, **options})
    except UnsupportedModel as error:
        if "this CPU has no" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("kernels", ["torch", *CPU_FLAGS])
def test_the_engine_computes_the_draft(made: tuple[Path, Draft], sequences: Any, kernels: str) -> None:
    draft, runner = made[1], load(made, kernels)
    assert runner.info.vocab_size == VOCAB_SIZE
    token_ids = [5, 9, 200, 33, 17, 2, 90]
    logits = sequences(runner).run(("a", 0, token_ids))
    assert logits.shape == (len(token_ids), VOCAB_SIZE)
    expected = draft.logits(token_ids)
    if kernels == "torch":
        torch.testing.assert_close(logits[:, IDS], expected, atol=2e-3, rtol=2e-3)
    # What is multiplied is rounded to 8 bits, a dozen times on the way.
    assert float((logits[:, IDS] - expected).norm() / expected.norm()) < 0.06
    others = torch.ones(VOCAB_SIZE, dtype=torch.bool)
    others[IDS] = False
    assert bool((logits[:, others] == -torch.inf).all())


def test_steps_of_any_size_follow_each_other(made: tuple[Path, Draft], sequences: Any) -> None:
    target, draft = made
    run = sequences(load_draft(draft.folder, target, **OPTIONS)).run
    token_ids = [int(number) for number in np.random.default_rng(1).integers(0, VOCAB_SIZE, 40)]
    whole = run(("a", 0, token_ids))
    parts = [run(("b", 0, token_ids[:20])), run(("b", 20, token_ids[20:21]), ("c", 0, token_ids[:3]))[:1]]
    parts.append(run(("b", 21, token_ids[21:])))
    assert torch.equal(torch.cat(parts), whole)


def test_noise_is_that_of_the_targets_ids(made: tuple[Path, Draft], sequences: Any) -> None:
    target, draft = made
    logits = sequences(load_draft(draft.folder, target, **OPTIONS)).run(("a", 0, [5, 9, 33]))[-1:]
    chosen = set()
    for index in range(20):
        (token_id,) = sample(logits, [SampleRow(SamplingParams(temperature=5.0), 77, index, (), 3)]).token_ids
        scores = {
            int(v): float(logits[0, v] - logits[0].max()) / 5.0 + oracle_gumbel(oracle_bits(77, index, int(v)))
            for v in IDS
        }
        assert token_id == max(scores, key=lambda v: scores[v])
        chosen.add(token_id)
    assert len(chosen) > 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", ["torch", *CPU_FLAGS])
def test_guesses_are_the_best_two_of_its_logits(made: tuple[Path, Draft], kernels: str, dtype: str) -> None:
    """Prompts, then token by token in changing company; the other way goes by an engine's logits of all ids."""
    ours, theirs = load(made, kernels, dtype=dtype), load(made, kernels, dtype=dtype)
    assert isinstance(ours, GuessingEngine)
    assert ours.guesses_next == (kernels != "torch")
    mirrors = [mirror([7 + slot, 200, 5][: slot + 1] * 5, slot, temperature=0.9 * (slot % 2)) for slot in range(3)]
    rows = TokenRows(VOCAB_SIZE)
    for slot, one in enumerate(mirrors):
        one.block_ids = [slot, slot + 4, slot + 8]
    guessed = set()
    for step in range(20):
        some = mirrors if step % 3 != 1 else mirrors[step % 2 :: 2]
        feeding = [(one, one.known - one.computed) for one in some]
        batch, choices = packed(feeding, 16, VOCAB_SIZE), choices_of(some)
        expected = best_two(theirs.forward(batch), choices)
        if step > 3 and step % 4 and ours.guesses_next:
            found = ours.guess_next(rows.of([(one, 1) for one in some]))
        else:
            found = ours.guess(batch, choices)
        assert found == expected
        for one, guess in zip(some, found, strict=True):
            assert guess.token_id is not None
            one.computed = one.known
            one.guess.append(guess.token_id)
            guessed |= {guess.token_id, guess.runner_up}
    assert len(guessed) > 10
    assert guessed <= set(IDS.tolist())


def test_a_step_may_want_no_guess(made: tuple[Path, Draft]) -> None:
    runner, one = load_draft(made[1].folder, made[0], **OPTIONS), mirror([3, 4, 5, 6], block_ids=[0])
    assert runner.guess(packed([(one, 3)], 16, VOCAB_SIZE), choices_of([])) == []


def test_int8_rounds_each_row_by_its_own_scale(tmp_path: Path) -> None:
    matrix = torch.randn(6, 32) * torch.tensor([1e-3, 1e-2, 0.1, 1.0, 10.0, 0.0])[:, None]
    vector = torch.randn(9)
    config = {
        "target": {"model_type": "llama", "hidden_size": 32, "vocab_size": 50, "embedding_sha256": ""},
        "decoder": {},
    }
    write_draft(tmp_path, config, {"m": matrix, "v": vector, HEAD_TOKEN_IDS: torch.tensor([0, 49])})
    found = read_draft(tmp_path)
    assert torch.equal(found.tensors["v"], vector)
    assert bool(((found.tensors["m"] - matrix).abs() <= matrix.abs().amax(1, keepdim=True) / 253).all())
    assert found.tensors[HEAD_TOKEN_IDS].tolist() == [0, 49]
    assert is_draft_folder(tmp_path)
    assert load_file(tmp_path / WEIGHTS)["m"].dtype == torch.int8


def test_a_model_is_no_draft(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    assert not is_draft_folder(tiny_model(TARGET))
    assert not is_draft_folder(tmp_path)
    with pytest.raises(ModelError, match="format"):
        read_draft(tiny_model(TARGET))


def change_config(folder: Path, *path: str, value: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    part = config
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    (folder / CONFIG).write_text(json.dumps(config))


def change_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / WEIGHTS)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / WEIGHTS)


FAULTS: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / CONFIG).unlink(), "has no config.json"),
    (lambda folder: (folder / CONFIG).write_text("{"), "config.json can't be read"),
    (lambda folder: (folder / WEIGHTS).unlink(), "has no draft.safetensors"),
    (lambda folder: (folder / WEIGHTS).write_bytes(b"xx"), "draft.safetensors can't be read"),
    (lambda folder: change_config(folder, "version", value=9), "version is 9"),
    (lambda folder: change_config(folder, "target", value=None), "target is missing"),
    (lambda folder: change_config(folder, "target", "hidden_size", value="x"), "target.hidden_size is missing"),
    (lambda folder: change_config(folder, "target", "hidden_size", value=32), "target.hidden_size is 32"),
    (lambda folder: change_config(folder, "target", "vocab_size", value=500), "target.vocab_size is 500"),
    (lambda folder: change_config(folder, "target", "model_type", value="qwen2"), "target.model_type is 'qwen2'"),
    (lambda folder: change_config(folder, "target", "embedding_sha256", value="00"), "target.embedding_sha256 differs"),
    (lambda folder: change_config(folder, "decoder", "num_hidden_layers", value=3), "lacks model.layers.2"),
    (lambda folder: change_config(folder, "decoder", "hidden_size", value=32), "decoder.hidden_size is 32"),
    (
        lambda folder: change_config(folder, "decoder", "intermediate_size", value=8),
        "gate_proj.weight is .* instead of",
    ),
    (lambda folder: change_config(folder, "decoder", "model_type", value="nonsense"), "decoder can't be read"),
    (lambda folder: change_weights(folder, **{LENS: None}), "lacks lens.weight"),
    (lambda folder: change_weights(folder, **{LENS: torch.eye(32)}), "lens.weight is .32, 32. instead of .64, 64."),
    (lambda folder: change_weights(folder, **{f"{LENS}.scale": None}), "lens.weight.scale is missing"),
    (lambda folder: change_weights(folder, head_token_ids=None), "head_token_ids is missing"),
    (lambda folder: change_weights(folder, head_token_ids=torch.tensor([5, 3])), "head_token_ids isn't ascending"),
    (lambda folder: change_weights(folder, head_token_ids=torch.tensor([5, 203])), "within 0 … 202"),
]


@pytest.mark.parametrize(("damage", "message"), FAULTS, ids=[message for _, message in FAULTS])
def test_faults_are_named(draft: tuple[Path, Path], damage: Callable[[Path], object], message: str) -> None:
    target, folder = draft
    damage(folder)
    with pytest.raises(ModelError, match=message):
        load_draft(folder, target, **OPTIONS)


def test_another_target_is_refused(draft: tuple[Path, Path], tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match=r"draft for another target: target\.embedding_sha256"):
        load_draft(draft[1], tiny_model("llama-grouped-biases"), **OPTIONS)


def test_the_fingerprint_says_so(draft: tuple[Path, Path]) -> None:
    runner: ModelRunner = load_draft(draft[1], draft[0], **OPTIONS)
    assert "distilled" in runner.info.fingerprint
    assert AutoConfig.from_pretrained(draft[0]).vocab_size == runner.info.vocab_size
