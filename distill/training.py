"""Trains a draft on a folder of answers; killed at any moment, it goes on where its last checkpoint was.

An epoch goes through the answers in *windows* of a few files, shuffled inside: what is in memory stays small. A step's
batch follows from the seed, the numbers of epoch and window, and the answers, whose files the checkpoint names: a run
that was interrupted ends with the same weights as one that wasn't.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from distill import work_folder
from distill.batches import TrainBatch, collate, collated, epoch
from distill.errors import Refused
from distill.evaluation import Acceptance, evaluate
from distill.loss import Head, mixture_loss
from distill.network import Network
from distill.optimizer import Optimizer
from distill.shards import Record, num_answer_tokens, read_shard, read_shards
from distill.target import Opened
from distill.vocabulary import coverage, frequent_token_ids
from engine.draft_folder import HEAD_TOKEN_IDS, DraftFolder

_WINDOW_FILES = 8
_LENS_BATCHES = 24
_WATCHING = frozenset({"checkpoint_steps", "evaluation_steps", "evaluation_records"})
"""of a recipe, what changes nothing in the draft"""
_FLOOR = 0.03
"""of the learning rate, at the end"""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What decides the draft, with the answers."""

    layers: int = 2
    head_tokens: int = 12288
    steps: int = 1500
    batch_tokens: int = 3072
    learning_rate: float = 1.5e-3
    warm_up_steps: int = 40
    momentum: float = 0.95
    """of the matrices' gradients"""
    weight_decay: float = 0.05
    mix: float = 0.6
    """share of the target's distribution in the goal; the rest is its likeliest token"""
    seed: int = 1
    start_from: str = ""
    """digest of the draft that training starts from; empty: the target's own layers"""
    checkpoint_steps: int = 250
    evaluation_steps: int = 500
    evaluation_records: int = 100
    """of the held-out ones, for evaluations on the way; the last one takes all"""


@dataclass(slots=True)
class Position:
    """Where training is."""

    step: int = 0
    epoch: int = 0
    window: int = 0
    """within the epoch"""
    batch: int = 0
    """within the window"""


@dataclass(frozen=True, slots=True)
class Answers:
    """What a target said, as `distill.dataset` makes it: files."""

    train: Sequence[Path]
    held_out: Sequence[Path]


class Report(Protocol):
    """Whoever watches."""

    def step(self, position: Position, loss: float, agreeing: float) -> None: ...

    def evaluated(self, position: Position, found: list[Acceptance]) -> None: ...

    def note(self, text: str) -> None: ...


class Trainer:
    """One run."""

    def __init__(
        self,
        opened: Opened,
        answers: Answers,
        work: Path,
        recipe: Recipe,
        device: torch.device,
        base: DraftFolder | None = None,
    ) -> None:
        """Checkpoints go to `work`. `base`: the draft that `recipe.start_from` means."""
        self.recipe = recipe
        self._opened = opened
        self._answers = answers
        self._base = base
        self._checkpoint = work / "checkpoint.pt"
        self._device = device
        torch.manual_seed(recipe.seed)
        self.network = Network(opened, recipe.layers).to(device)
        self.position = Position()
        self.token_ids = torch.zeros(0, dtype=torch.int64)
        self.history: list[dict[str, Any]] = []
        self._optimizer = Optimizer(self.network.trained().values(), recipe.momentum, recipe.weight_decay)
        self._records: list[Record] = []
        self._order: list[list[int]] = []

    @property
    def head(self) -> Head:
        """The frozen rows of the target's head."""
        spec = self._opened.spec
        return Head(self.network.full_head[self.token_ids].to(self._device), spec.logit_scale, spec.logit_softcap)

    @property
    def num_answer_tokens(self) -> int:
        """Of one epoch."""
        return sum(num_answer_tokens(path) for path in self._answers.train)

    def run(self, report: Report) -> list[Acceptance]:
        """Train to the last step; the evaluation over all held-out answers."""
        if self._checkpoint.exists():
            self._resume()
            report.note(f"resumed at step {self.position.step}")
        else:
            self._start(report)
        head, held_out = self.head, read_shards(self._answers.held_out)
        if self.position.step == 0:
            self._evaluate(head, held_out[: self.recipe.evaluation_records], report)
        for batch in self._batches():
            loss, agreeing = self._step(batch, head)
            report.step(self.position, loss, agreeing)
            step, last = self.position.step, self.position.step == self.recipe.steps
            if step % self.recipe.evaluation_steps == 0 and not last:
                self._evaluate(head, held_out[: self.recipe.evaluation_records], report)
            if step % self.recipe.checkpoint_steps == 0 or last:
                self.save()
        return self._evaluate(head, held_out, report)

    def save(self) -> None:
        """Write the checkpoint."""
        state = {
            "recipe": asdict(self.recipe),
            "position": asdict(self.position),
            "shards": [path.name for path in self._answers.train],
            "token_ids": self.token_ids,
            "network": self.network.trained(),
            "optimizer": self._optimizer.state_dict(),
            "history": self.history,
        }
        work_folder.replace(self._checkpoint, lambda partial: torch.save(state, partial))

    def _resume(self) -> None:
        try:
            state = torch.load(self._checkpoint, map_location=self._device, weights_only=True)
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise Refused("work", f"{self._checkpoint} is damaged; remove it to train anew") from error
        found, wanted = state["recipe"], asdict(self.recipe)
        for name in wanted.keys() - _WATCHING:
            if found.get(name) != wanted[name]:
                raise Refused(
                    name,
                    f"{self._checkpoint} was begun with {found.get(name)} instead of {wanted[name]}; "
                    "go on with that, or remove the file to train anew",
                )
        if state.get("shards") != [path.name for path in self._answers.train]:
            raise Refused(
                "answer_tokens",
                f"{self._checkpoint} was begun with another number of answers; "
                "go on with that, or remove the file to train anew",
            )
        self.position = Position(**state["position"])
        self.token_ids = state["token_ids"].cpu()
        self.history = state["history"]
        with torch.no_grad():
            for name, parameter in self.network.trained().items():
                parameter.copy_(state["network"][name])
        self._optimizer.load_state_dict(state["optimizer"])
        self._read_window()

    def _start(self, report: Report) -> None:
        self._read_window()
        known = None if self._base is None else self._base.tensors[HEAD_TOKEN_IDS]
        records = (record for path in self._answers.train for record in read_shard(path))
        self.token_ids = frequent_token_ids(records, self._opened.spec.vocab_size, self.recipe.head_tokens, known)
        if self._base is None:
            explained = self.network.fit_lens(collated(self._records, self._order[:_LENS_BATCHES], self._device))
            report.note(f"the lens explains {explained:.1%} of the target's features")
        else:
            with torch.no_grad():
                for name, parameter in self.network.trained().items():
                    parameter.copy_(self._base.tensor(name, tuple(parameter.shape)))
        covered = coverage(read_shards(self._answers.held_out), self.token_ids)
        report.note(f"the head's {len(self.token_ids)} tokens cover {covered:.1%} of held-out answers")

    def _read_window(self) -> None:
        position, paths = self.position, self._answers.train
        first = position.window * _WINDOW_FILES
        self._records = read_shards(paths[first : first + _WINDOW_FILES])
        number = position.epoch * len(paths) + position.window
        self._order = epoch(self._records, self.recipe.batch_tokens, self.recipe.seed, number)

    def _batches(self) -> Iterator[TrainBatch]:
        """The rest of the run; `position` counts a batch as soon as it is asked for the next."""
        while self.position.step < self.recipe.steps:
            if self.position.batch == len(self._order):
                self._next_window()
            rows = self._order[self.position.batch]
            self.position.batch += 1
            self.position.step += 1
            yield collate([self._records[index] for index in rows], self._device)

    def _next_window(self) -> None:
        position = self.position
        position.batch = 0
        position.window += 1
        if position.window * _WINDOW_FILES >= len(self._answers.train):
            position.epoch += 1
            position.window = 0
        self._read_window()

    def _step(self, batch: TrainBatch, head: Head) -> tuple[float, float]:
        loss, agreeing = mixture_loss(self.network(batch), batch.features, head, self.recipe.mix)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.trained().values(), 1.0)
        self._optimizer.step(self._learning_rate(self.position.step))
        return float(loss.detach()), float(agreeing)

    def _learning_rate(self, step: int) -> float:
        """Warm-up, then half a cosine down to the floor."""
        recipe = self.recipe
        share = min(1.0, step / recipe.steps)
        cosine = _FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * share))
        return recipe.learning_rate * min(1.0, step / recipe.warm_up_steps) * cosine

    def _evaluate(self, head: Head, held_out: list[Record], report: Report) -> list[Acceptance]:
        found = evaluate(self.network, head, self.token_ids, held_out, device=self._device)
        self.history.append({"step": self.position.step, "found": [asdict(one) for one in found]})
        report.evaluated(self.position, found)
        return found
