"""From a target's folder to a draft's: answers, training, evaluation, export. Every stage goes on where it was left."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch

from distill.dataset import DataPlan, claim, generate, is_complete
from distill.evaluation import Acceptance
from distill.export import export
from distill.target import load_target, open_target
from distill.training import Recipe, Report, Trainer
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
    device: str = "auto"
    threads: int | None = None
    part: int = 0
    parts: int = 1
    """of several processes that generate into one folder; only a plan of one part trains"""


def distill(plan: Plan, progress: Progress, report: Report) -> list[Acceptance]:
    """Make the draft; its acceptance on held-out answers, empty for a process that only generates.

    Raises a ModelError for a target that can't be distilled, ValueError for a work folder of another plan.
    """
    opened, device = open_target(plan.target), resolve_device(plan.device)
    data_plan = DataPlan(
        opened.facts.content_id,
        seed=plan.recipe.seed,
        answer_tokens=plan.answer_tokens,
        held_out_prompts=plan.held_out_prompts,
        max_answer_tokens=plan.max_answer_tokens,
    )
    data = plan.work / "data"
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
        del target
    if plan.parts > 1:
        return []
    if device.type == "cpu":
        torch.set_num_threads(plan.threads or default_threads())
    trainer = Trainer(opened, data, plan.work, plan.recipe, device)
    found = trainer.run(report)
    described = json.loads((data / "data.json").read_text()) | {"answer_tokens": trainer.num_answer_tokens}
    export(trainer, opened, plan.name, described, found, plan.out)
    return found
