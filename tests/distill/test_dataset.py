"""A folder of answers: the same whoever fills it, taken up where it was left, and refused where it isn't ours."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distill.dataset import DataPlan, claim, generate, is_complete, train_shards
from distill.errors import Refused
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
    generate(load(), tmp_path, plan, silent)
    names = [path.name for path in train_shards(data, plan)]
    assert [path.name for path in train_shards(tmp_path, plan)] == names
    made, whole = contents(tmp_path), contents(data)
    assert len(names) > 1
    assert whole.keys() <= made.keys()
    assert all(made[name] == content for name, content in whole.items())


def test_only_as_many_as_needed_are_trained_on(data: Path, plan: DataPlan, tmp_path: Path) -> None:
    """Whatever else lies there: else a draft would follow from how often the making was interrupted."""
    shutil.copytree(data, tmp_path / "answers")
    paths = train_shards(tmp_path / "answers", plan)
    held = [num_answer_tokens(path) for path in paths]
    assert sum(held) >= plan.answer_tokens > sum(held[:-1])
    shutil.copy(paths[0], shard_path(tmp_path / "answers" / TRAIN, len(paths) + 1))
    assert train_shards(tmp_path / "answers", plan) == paths
    assert train_shards(tmp_path / "answers", replace(plan, answer_tokens=held[0])) == paths[:1]


@pytest.mark.parametrize("stride", [2, 1])
def test_some_shards_only(data: Path, plan: DataPlan, load: Callable[[], Target], tmp_path: Path, stride: int) -> None:
    some = replace(plan, shards=(1, stride), answer_tokens=1500, held_out_prompts=1)
    claim(tmp_path, some)
    generate(load(), tmp_path, some, silent)
    assert is_complete(tmp_path, some)
    assert not is_complete(tmp_path, plan)
    paths = train_shards(tmp_path, some)
    assert [int(path.name[6:11]) for path in paths] == [1 + stride * number for number in range(len(paths))]
    assert not shard_path(tmp_path / TRAIN, 0).exists()
    assert paths[0].read_bytes() == shard_path(data / TRAIN, 1).read_bytes()


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"target": "another"}, "target"), ({"seed": 2}, "seed"), ({"held_out_prompts": 7}, "held_out_prompts")],
)
def test_answers_of_another_plan_are_refused(data: Path, plan: DataPlan, changes: dict, field: str) -> None:
    claim(data, plan)
    with pytest.raises(Refused, match=f"{field} is"):
        claim(data, replace(plan, **changes))


def test_more_answers_of_the_same_plan_are_welcome(data: Path, plan: DataPlan) -> None:
    claim(data, replace(plan, answer_tokens=10 * plan.answer_tokens))


def test_progress_is_told(plan: DataPlan, load: Callable[[], Target], tmp_path: Path) -> None:
    claim(tmp_path, plan)
    said: list[tuple[str, float | None]] = []
    generate(load(), tmp_path, plan, lambda what, share: said.append((what, share)))
    assert {what for what, _ in said} == {"held-out answers", "answers of the target"}
    for stage in ("held-out answers", "answers of the target"):
        shares = [share for what, share in said if what == stage and share is not None]
        assert shares == sorted(shares)
        assert shares[0] < 0.5
        assert shares[-1] == 1
        assert len(set(shares)) > 10


def test_damaged_files_are_named(data: Path, plan: DataPlan, tmp_path: Path) -> None:
    folder = tmp_path / "answers"
    shutil.copytree(data, folder)
    shard_path(folder / TRAIN, 0).write_bytes(b"nonsense")
    with pytest.raises(Refused, match=r"work: .*shard-00000\.safetensors is damaged"):
        is_complete(folder, plan)
    (folder / "data.json").write_text("{")
    with pytest.raises(Refused, match=r"work: .*data\.json is damaged"):
        claim(folder, plan)
