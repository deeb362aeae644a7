"""A folder of answers: the same whoever fills it, taken up where it was left, and refused where it isn't ours."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distill.dataset import DataPlan, OtherData, claim, generate, is_complete
from distill.generation import HELD_OUT_TEMPERATURES, Target
from distill.prompts import HELD_OUT, TRAIN
from distill.shards import num_answer_tokens, read_shard, shard_path, shard_paths
from distill.target import Opened, load_target


@pytest.fixture(scope="module")
def load(opened: Opened, plan: DataPlan) -> Callable[[], Target]:
    def loaded() -> Target:
        return load_target(
            opened, torch.device("cpu"), threads=1, batch_size=16, max_answer_tokens=plan.max_answer_tokens
        )

    return loaded


def silent(what: str, share: float | None) -> None:
    pass


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}


def test_there_is_enough(data: Path, plan: DataPlan) -> None:
    assert is_complete(data, plan)
    assert sum(num_answer_tokens(path) for path in shard_paths(data / TRAIN)) >= plan.answer_tokens
    held_out = read_shard(shard_path(data / HELD_OUT, 0))
    assert len(held_out) == plan.held_out_prompts * len(HELD_OUT_TEMPERATURES)


def test_an_interrupted_run_goes_on(data: Path, plan: DataPlan, load: Callable[[], Target], tmp_path: Path) -> None:
    folder = tmp_path / "answers"
    shutil.copytree(data, folder)
    first = shard_path(folder / TRAIN, 0)
    first.unlink()
    others = [path.stat().st_mtime_ns for path in shard_paths(folder / TRAIN)]
    assert not is_complete(folder, plan)
    generate(load(), folder, plan, silent)
    assert is_complete(folder, plan)
    assert contents(folder) == contents(data)
    assert [path.stat().st_mtime_ns for path in shard_paths(folder / TRAIN)[1:]] == others


def test_two_processes_make_what_one_makes(
    data: Path, plan: DataPlan, load: Callable[[], Target], tmp_path: Path
) -> None:
    claim(tmp_path, plan)
    for part in (1, 0):
        generate(load(), tmp_path, plan, silent, part, 2)
        assert is_complete(tmp_path, plan, part, 2)
    made, whole = contents(tmp_path), contents(data)
    shared = made.keys() & whole.keys()
    assert len(shared) >= len(whole)
    assert all(made[name] == whole[name] for name in shared)


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"target": "another"}, "target"), ({"seed": 2}, "seed"), ({"held_out_prompts": 7}, "held_out_prompts")],
)
def test_answers_of_another_plan_are_refused(data: Path, plan: DataPlan, changes: dict, field: str) -> None:
    claim(data, plan)
    with pytest.raises(OtherData, match=f"{field} is"):
        claim(data, replace(plan, **changes))


def test_more_answers_of_the_same_plan_are_welcome(data: Path, plan: DataPlan) -> None:
    claim(data, replace(plan, answer_tokens=10 * plan.answer_tokens))


def test_progress_is_told(plan: DataPlan, load: Callable[[], Target], tmp_path: Path) -> None:
    claim(tmp_path, plan)
    said: list[tuple[str, float | None]] = []
    generate(load(), tmp_path, plan, lambda what, share: said.append((what, share)))
    assert {what for what, _ in said} == {"held-out answers", "answers of the target"}
    shares = [share for what, share in said if what == "answers of the target" and share is not None]
    assert shares == sorted(shares)
    assert 0 < shares[-1] <= 1
