"""From a target's folder to a draft's: answers, training, evaluation, export. Every stage goes on where it was left."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from distill import work_folder
from distill.dataset import DataPlan, claim, generate, is_complete, train_shards
from distill.errors import Refused
from distill.evaluation import Acceptance
from distill.export import export
from distill.generation import longest_conversation
from distill.network import draft_settings
from distill.prompts import HELD_OUT
from distill.shards import shard_paths
from distill.target import Opened, load_target, open_target
from distill.training import Answers, Recipe, Report, Trainer
from engine.decoder_weights import Checkpoint
from engine.draft_folder import HEAD_TOKEN_IDS, WEIGHTS, DraftFolder, embedding_digest, is_draft_folder, read_draft
from engine.errors import ModelError, UnsupportedModel
from engine.kernels.threads import default_threads
from engine.progress import Progress
from engine.runner import resolve_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to make."""

    target: Path
    """the target's folder"""
    name: str
    """what the target is called in the draft's config.json"""
    out: Path
    work: Path
    """answers and checkpoints"""
    recipe: Recipe = field(default_factory=Recipe)
    answer_tokens: int = 1_500_000
    held_out_prompts: int = 120
    max_answer_tokens: int = 220
    batch_size: int = 64
    start_from: Path | None = None
    """a draft to start from instead of the target's layers"""
    shards: tuple[int, int] = (0, 1)
    """of the answers: the first shard, and how far it is to the next"""
    device: str = "auto"
    threads: int | None = None
    part: int = 0
    parts: int = 1
    """of several processes that generate into one folder; only a plan of one part trains"""


def distill(plan: Plan, progress: Progress, report: Report) -> list[Acceptance]:
    """Make the draft; its acceptance on held-out answers, empty for a process that only generates.

    Raises Refused for a setting that can't be used, before anything is generated where that can be told; ModelError for
    a target that can't be distilled.
    """
    opened, device = open_target(plan.target), _device(plan.device)
    _check(plan, opened)
    recipe, base = _start(plan, opened)
    with work_folder.claimed(plan.work, plan.part, plan.parts):
        data = plan.work / "data"
        answers = _answers(plan, opened, device, data, progress)
        if plan.parts > 1:
            return []
        if device.type == "cpu":
            torch.set_num_threads(plan.threads or default_threads())
        trainer = Trainer(opened, answers, plan.work, recipe, device, base)
        found = trainer.run(report)
        described = json.loads((data / "data.json").read_text()) | {
            "shards": "{}/{}".format(*plan.shards),
            "answer_tokens": trainer.num_answer_tokens,
        }
        export(trainer, opened, plan.name, described, found, plan.out)
    return found


def _device(name: str) -> torch.device:
    try:
        return resolve_device(name)
    except UnsupportedModel as error:
        raise Refused("device", str(error)) from error


def _check(plan: Plan, opened: Opened) -> None:
    """What would come to light after hours otherwise."""
    draft_settings(opened, plan.recipe.layers)
    positions = opened.facts.max_model_len
    if longest_conversation(plan.max_answer_tokens) > positions:
        raise Refused(
            "max_answer_tokens",
            f"two questions and answers of {plan.max_answer_tokens} tokens take up to "
            f"{longest_conversation(plan.max_answer_tokens)} positions; the target has {positions}",
        )
    if plan.parts == 1:
        _check_out(plan.out)


def _start(plan: Plan, opened: Opened) -> tuple[Recipe, DraftFolder | None]:
    """A draft that is given decides the layers, and which tokens the head may have."""
    if plan.start_from is None:
        return replace(plan.recipe, head_tokens=min(plan.recipe.head_tokens, opened.spec.vocab_size)), None
    try:
        base = read_draft(plan.start_from)
        spec = opened.spec
        shape = (spec.vocab_size, spec.hidden_size)
        embedding = Checkpoint(opened.folder).tensor(f"{spec.names.embedding}.weight", shape)
        if base.target["embedding_sha256"] != embedding_digest(embedding):
            raise UnsupportedModel(f"{plan.start_from} is a draft for another target")
    except ModelError as error:
        raise Refused("start_from", str(error)) from error
    if plan.out.samefile(plan.start_from):
        raise Refused("out", f"{plan.out} is what is started from; name another folder")
    layers, head_tokens = base.decoder["num_hidden_layers"], len(base.tensors[HEAD_TOKEN_IDS])
    wanted, usual = plan.recipe, Recipe()
    if wanted.layers not in (usual.layers, layers):
        raise Refused("layers", f"{plan.start_from} has {layers}")
    if wanted.head_tokens > head_tokens and wanted.head_tokens != usual.head_tokens:
        raise Refused("head_tokens", f"{plan.start_from} has {head_tokens}, of which fewer can be kept")
    recipe = replace(
        wanted,
        layers=layers,
        head_tokens=min(wanted.head_tokens, head_tokens),
        start_from=hashlib.sha256((plan.start_from / WEIGHTS).read_bytes()).hexdigest(),
    )
    return recipe, base


def _check_out(out: Path) -> None:
    if (out / "config.json").exists() and not is_draft_folder(out):
        raise Refused("out", f"{out} holds something that is no draft; name a new folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused("out", f"{out} can't be a folder: {error.strerror}") from error
    if not os.access(out, os.W_OK):
        raise Refused("out", f"{out} can't be written")


def _answers(plan: Plan, opened: Opened, device: torch.device, data: Path, progress: Progress) -> Answers:
    """Those that training needs; they are made if they aren't there."""
    data_plan = DataPlan(
        opened.facts.content_id,
        seed=plan.recipe.seed,
        answer_tokens=plan.answer_tokens,
        held_out_prompts=plan.held_out_prompts,
        max_answer_tokens=plan.max_answer_tokens,
        shards=plan.shards,
    )
    claim(data, data_plan)
    if not is_complete(data, data_plan, plan.part, plan.parts):
        target = load_target(
            opened,
            device,
            threads=plan.threads,
            batch_size=plan.batch_size,
            max_answer_tokens=plan.max_answer_tokens,
            progress=progress,
        )
        generate(target, data, data_plan, progress, plan.part, plan.parts)
    return Answers(train_shards(data, data_plan), shard_paths(data / HELD_OUT))
