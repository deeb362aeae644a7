"""Trains a draft on a folder of answers; killed at any moment, it goes on where its last checkpoint was.

A step's batch follows from the seed, the epoch's number and the shards that were there when the epoch began, which
the checkpoint records: a run that was interrupted ends with the same weights as one that wasn't. Shards that appear
meanwhile are taken up by the next epoch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from distill.batches import TrainBatch, collate, collated, epoch
from distill.evaluation import Acceptance, evaluate
from distill.loss import Head, mixture_loss
from distill.network import Network
from distill.prompts import HELD_OUT, TRAIN
from distill.shards import Record, read_shards, shard_paths
from distill.target import Opened
from distill.vocabulary import coverage, frequent_token_ids

_LENS_BATCHES = 24
_FLOOR = 0.03
"""of the learning rate, at the end"""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What decides the draft, with the answers."""

    layers: int = 2
    head_tokens: int = 12288
    steps: int = 4600
    batch_tokens: int = 1024
    learning_rate: float = 1.5e-3
    warm_up_steps: int = 40
    weight_decay: float = 0.05
    mix: float = 0.6
    """share of the target's distribution in the goal; the rest is its likeliest token"""
    seed: int = 1
    checkpoint_steps: int = 250
    evaluation_steps: int = 500
    evaluation_records: int = 100
    """of the held-out ones, for evaluations on the way; the last one takes all"""


@dataclass(slots=True)
class Position:
    """Where training is."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    """within the epoch"""
    shards: list[str] = field(default_factory=list)
    """names of the epoch's files"""


class Report(Protocol):
    """Whoever watches."""

    def step(self, position: Position, loss: float, agreeing: float) -> None: ...

    def evaluated(self, position: Position, found: list[Acceptance]) -> None: ...

    def note(self, text: str) -> None: ...


class Trainer:
    """One run."""

    def __init__(self, opened: Opened, data: Path, work: Path, recipe: Recipe, device: torch.device) -> None:
        """`data` as `distill.dataset` fills it; checkpoints go to `work`."""
        self.recipe = recipe
        self._opened = opened
        self._data = data
        self._checkpoint = work / "checkpoint.pt"
        self._device = device
        torch.manual_seed(recipe.seed)
        self.network = Network(opened, recipe.layers).to(device)
        self.position = Position()
        self.token_ids = torch.zeros(0, dtype=torch.int64)
        self.history: list[dict[str, Any]] = []
        self._optimizer = torch.optim.AdamW(
            self.network.trained().values(),
            lr=recipe.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=recipe.weight_decay,
            fused=True,
        )
        self._records: list[Record] = []
        self._order: list[list[int]] = []

    @property
    def head(self) -> Head:
        """The frozen rows of the target's head."""
        spec = self._opened.spec
        return Head(self.network.full_head[self.token_ids].to(self._device), spec.logit_scale, spec.logit_softcap)

    @property
    def num_answer_tokens(self) -> int:
        """Of the last epoch."""
        return sum(record.num_answer_tokens for record in self._records)

    def run(self, report: Report) -> list[Acceptance]:
        """Train to the last step; the evaluation over all held-out answers."""
        if self._checkpoint.exists():
            self._resume()
            report.note(f"resumed at step {self.position.step}")
        else:
            self._start(report)
        head, held_out = self.head, self._held_out()
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
        """Write the checkpoint; the file is whole or as before."""
        partial = self._checkpoint.with_suffix(f".partial-{os.getpid()}")
        state = {
            "recipe": asdict(self.recipe),
            "position": asdict(self.position),
            "token_ids": self.token_ids,
            "network": self.network.trained(),
            "optimizer": self._optimizer.state_dict(),
            "history": self.history,
        }
        torch.save(state, partial)
        partial.rename(self._checkpoint)

    def _resume(self) -> None:
        state = torch.load(self._checkpoint, map_location=self._device, weights_only=True)
        found, wanted = state["recipe"], asdict(self.recipe)
        # How often it is looked at changes nothing in the draft.
        for name in ("layers", "head_tokens", "steps", "batch_tokens", "learning_rate", "mix", "seed"):
            if found[name] != wanted[name]:
                raise ValueError(
                    f"{self._checkpoint}: {name} is {found[name]} instead of {wanted[name]}; "
                    "go on with that, or remove the file to start anew"
                )
        self.position = Position(**state["position"])
        self.token_ids = state["token_ids"].cpu()
        self.history = state["history"]
        with torch.no_grad():
            for name, parameter in self.network.trained().items():
                parameter.copy_(state["network"][name])
        self._optimizer.load_state_dict(state["optimizer"])
        self._read([self._data / TRAIN / name for name in self.position.shards])

    def _start(self, report: Report) -> None:
        self._new_epoch()
        self.token_ids = frequent_token_ids(self._records, self._opened.spec.vocab_size, self.recipe.head_tokens)
        explained = self.network.fit_lens(collated(self._records, self._order[:_LENS_BATCHES], self._device))
        covered = coverage(self._held_out(), self.token_ids)
        report.note(
            f"{len(self._records)} conversations, {self.num_answer_tokens} answer tokens; "
            f"the head's {len(self.token_ids)} tokens "
            f"cover {covered:.1%} of held-out answers; the lens explains {explained:.1%}"
        )

    def _held_out(self) -> list[Record]:
        return read_shards(shard_paths(self._data / HELD_OUT))

    def _new_epoch(self) -> None:
        paths = shard_paths(self._data / TRAIN)
        self.position.batch = 0
        self.position.shards = [path.name for path in paths]
        self._read(paths)

    def _read(self, paths: list[Path]) -> None:
        self._records = read_shards(paths)
        self._order = epoch(self._records, self.recipe.batch_tokens, self.recipe.seed, self.position.epoch)

    def _batches(self) -> Iterator[TrainBatch]:
        """The rest of the run; `position` counts a batch as soon as it is asked for the next."""
        while self.position.step < self.recipe.steps:
            if self.position.batch == len(self._order):
                self.position.epoch += 1
                self._new_epoch()
            rows = self._order[self.position.batch]
            self.position.batch += 1
            self.position.step += 1
            yield collate([self._records[index] for index in rows], self._device)

    def _step(self, batch: TrainBatch, head: Head) -> tuple[float, float]:
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate(self.position.step)
        loss, agreeing = mixture_loss(self.network(batch), batch.features, head, self.recipe.mix)
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.trained().values(), 1.0)
        self._optimizer.step()
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
