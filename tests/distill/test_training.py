"""A short training helps, an interrupted one ends like one that wasn't, and what comes out is what the engine runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distill.batches import collate
from distill.errors import Refused
from distill.evaluation import Acceptance
from distill.export import export
from distill.loss import mixture_loss
from distill.network import Network
from distill.prompts import HELD_OUT, TRAIN
from distill.shards import read_shards, shard_paths
from distill.target import Opened
from distill.training import Answers, Position, Recipe, Trainer
from engine.draft_folder import HEAD_TOKEN_IDS, read_draft

RECIPE = Recipe(
    layers=1,
    head_tokens=200,
    steps=24,
    batch_tokens=2048,
    learning_rate=3e-3,
    warm_up_steps=4,
    checkpoint_steps=6,
    evaluation_steps=100,
    evaluation_records=4,
)
CPU = torch.device("cpu")


class Watcher:
    """Remembers, and can pull the plug."""

    def __init__(self, last_step: int | None = None) -> None:
        self.last_step = last_step
        self.steps: list[int] = []
        self.notes: list[str] = []
        self.found: list[list[Acceptance]] = []

    def step(self, position: Position, loss: float, agreeing: float) -> None:
        self.steps.append(position.step)
        if position.step == self.last_step:
            raise InterruptedError

    def evaluated(self, position: Position, found: list[Acceptance]) -> None:
        self.found.append(found)

    def note(self, text: str) -> None:
        self.notes.append(text)


def answers(data: Path) -> Answers:
    return Answers(shard_paths(data / TRAIN), shard_paths(data / HELD_OUT))


def train(opened: Opened, data: Path, work: Path, recipe: Recipe = RECIPE) -> Trainer:
    work.mkdir(exist_ok=True)
    trainer = Trainer(opened, answers(data), work, recipe, CPU)
    trainer.run(Watcher())
    return trainer


def held_out_loss(trainer: Trainer, data: Path) -> float:
    batch = collate(read_shards(shard_paths(data / HELD_OUT)))
    with torch.no_grad():
        return float(mixture_loss(trainer.network(batch), batch.features, trainer.head, 0.6)[0])


@pytest.fixture(scope="module")
def trained(opened: Opened, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return train(opened, data, tmp_path_factory.mktemp("whole"))


def test_training_helps_on_held_out_answers(opened: Opened, data: Path, trained: Trainer, tmp_path: Path) -> None:
    lens_only = train(opened, data, tmp_path, replace(RECIPE, steps=1, learning_rate=1e-9))
    after = held_out_loss(trained, data), held_out_loss(lens_only, data)
    # The target's own first layer, as it is.
    lens_only.network = Network(opened, RECIPE.layers)
    before = held_out_loss(lens_only, data)
    assert after[0] < after[1] - 0.02, before
    assert after[1] < before - 0.3, after


def test_an_interrupted_run_ends_like_another(opened: Opened, data: Path, trained: Trainer, tmp_path: Path) -> None:
    for last_step, resumed in ((8, None), (20, 6)):
        watcher = Watcher(last_step)
        with pytest.raises(InterruptedError):
            Trainer(opened, answers(data), tmp_path, RECIPE, CPU).run(watcher)
        assert watcher.steps[0] == (1 if resumed is None else resumed + 1)
        assert any("resumed" in note for note in watcher.notes) == (resumed is not None)
    again = Trainer(opened, answers(data), tmp_path, RECIPE, CPU)
    again.run(Watcher())
    assert again.position.epoch > 0, "an epoch must have ended on the way"
    assert torch.equal(again.token_ids, trained.token_ids)
    for name, parameter in trained.network.trained().items():
        assert torch.equal(parameter, again.network.trained()[name]), name


def test_a_finished_run_is_only_evaluated_again(opened: Opened, data: Path, tmp_path: Path) -> None:
    recipe = replace(RECIPE, steps=6)
    train(opened, data, tmp_path, recipe)
    watcher = Watcher()
    Trainer(opened, answers(data), tmp_path, recipe, CPU).run(watcher)
    assert watcher.steps == []
    assert len(watcher.found) == 1


def test_a_checkpoint_of_another_recipe_is_refused(opened: Opened, data: Path, tmp_path: Path) -> None:
    train(opened, data, tmp_path, replace(RECIPE, steps=6))
    with pytest.raises(Refused, match=r"head_tokens: .* was begun with 200 instead of 100"):
        train(opened, data, tmp_path, replace(RECIPE, steps=6, head_tokens=100))
    fewer = Answers(answers(data).train[:-1], answers(data).held_out)
    with pytest.raises(Refused, match="answer_tokens: "):
        Trainer(opened, fewer, tmp_path, replace(RECIPE, steps=6), CPU).run(Watcher())
    # How often it is looked at changes nothing.
    train(opened, data, tmp_path, replace(RECIPE, steps=6, evaluation_steps=3))


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04 nonsense"])
def test_a_damaged_checkpoint_is_named(opened: Opened, data: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(content)
    with pytest.raises(Refused, match=r"work: .*checkpoint\.pt is damaged"):
        train(opened, data, tmp_path)


def test_it_goes_on_with_a_draft(opened: Opened, data: Path, trained: Trainer, tmp_path: Path) -> None:
    export(trained, opened, "tiny", {}, [], tmp_path / "base")
    base = read_draft(tmp_path / "base")
    recipe = replace(RECIPE, steps=1, learning_rate=1e-9, start_from="its digest")
    watcher = Watcher()
    again = Trainer(opened, answers(data), tmp_path, recipe, CPU, base)
    again.run(watcher)
    assert torch.equal(again.token_ids, trained.token_ids)
    assert held_out_loss(again, data) == pytest.approx(held_out_loss(trained, data), abs=0.01)
    assert "lens explains" not in " ".join(watcher.notes)
    (tmp_path / "smaller").mkdir()
    smaller = Trainer(opened, answers(data), tmp_path / "smaller", replace(recipe, head_tokens=60), CPU, base)
    smaller.run(Watcher())
    assert len(smaller.token_ids) == 60
    assert torch.isin(smaller.token_ids, trained.token_ids).all()
    with pytest.raises(Refused, match=r"start_from: .* was begun with its digest instead of another"):
        Trainer(opened, answers(data), tmp_path, replace(recipe, start_from="another"), CPU, base).run(Watcher())


def test_an_epoch_goes_through_every_window(opened: Opened, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distill.training._WINDOW_FILES", 1)
    trainer = Trainer(opened, answers(data), Path(), replace(RECIPE, steps=1000), CPU)
    trainer._read_window()
    seen: list[int] = []
    for batch in trainer._batches():
        if trainer.position.epoch == 1:
            break
        seen.append(len(batch.features))
    assert len(answers(data).train) > 1
    assert sum(seen) == trainer.num_answer_tokens


def test_the_target_itself_stays(opened: Opened, trained: Trainer) -> None:
    fresh = Trainer(opened, Answers([], []), Path(), RECIPE, CPU)
    before, after = (one.network.model.get_input_embeddings().weight for one in (fresh, trained))
    assert torch.equal(before, after)
    assert "model.embed_tokens.weight" not in trained.network.trained()


def test_the_folder_holds_what_was_trained(opened: Opened, trained: Trainer, tmp_path: Path) -> None:
    export(trained, opened, "tiny", {"seed": 1}, [], tmp_path)
    draft = read_draft(tmp_path)
    assert draft.target["name"] == "tiny"
    assert draft.config["recipe"]["steps"] == RECIPE.steps
    assert draft.decoder["num_hidden_layers"] == 1
    assert torch.equal(draft.tensors[HEAD_TOKEN_IDS], trained.token_ids)
    for name, parameter in trained.network.trained().items():
        limit = parameter.detach().abs().max() / 127 if parameter.dim() == 2 else 0.0
        assert float((draft.tensors[name] - parameter.detach()).abs().max()) <= limit, name
