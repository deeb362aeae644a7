"""The answers that a draft is trained and measured on, as shards in a folder; what is there already is kept.

    held-out/shard-00000.safetensors     answers to held-out prompts, each at every temperature
    train/shard-00000.safetensors …      CONVERSATIONS_PER_SHARD conversations each
    data.json                            what decides all of it: target, seed, digests of the splits and of the prompts

A shard depends on its number and the seed alone, so that several processes can make disjoint parts of one folder. The
first shards that hold enough are trained on: the same ones however often the making was interrupted, whoever made them
and whatever else lies there.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

from distill import work_folder
from distill.errors import Refused
from distill.generation import Job, Target, jobs
from distill.prompts import HELD_OUT, TRAIN, conversations, prompts_digest, split_digest
from distill.shards import Record, num_answer_tokens, shard_path, write_shard
from engine.progress import Progress

CONVERSATIONS_PER_SHARD = 64


@dataclass(frozen=True, slots=True)
class DataPlan:
    """What to generate."""

    target: str
    """content id of the target: answers of another one are of no use"""
    seed: int = 1
    answer_tokens: int = 1_500_000
    held_out_prompts: int = 120
    max_answer_tokens: int = 220
    shards: tuple[int, int] = (0, 1)
    """the first to take, and how far it is to the next"""

    def description(self) -> dict[str, Any]:
        """What data.json holds; equal descriptions mean that shards can be shared."""
        held_out = list(islice(conversations(HELD_OUT, self.seed), self.held_out_prompts))
        return {
            "target": self.target,
            "seed": self.seed,
            "held_out_prompts": self.held_out_prompts,
            "max_answer_tokens": self.max_answer_tokens,
            "train_split_sha256": split_digest(TRAIN),
            "held_out_split_sha256": split_digest(HELD_OUT),
            "held_out_prompts_sha256": prompts_digest(held_out),
        }


def claim(folder: Path, plan: DataPlan) -> None:
    """Make the folder, or check that it is this plan's. Raises Refused naming what differs."""
    folder.mkdir(parents=True, exist_ok=True)
    path, wanted = folder / "data.json", plan.description()
    if not path.exists():
        work_folder.replace(path, lambda partial: partial.write_text(json.dumps(wanted, indent=1) + "\n"))
        return
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise Refused("work", f"{path} is damaged ({error}); name another folder") from error
    for name, value in wanted.items():
        if found.get(name) != value:
            raise Refused("work", f"{path}: {name} is {found.get(name)!r} instead of {value!r}; name another folder")


def is_complete(folder: Path, plan: DataPlan, part: int = 0, parts: int = 1) -> bool:
    """Whether `generate` has nothing left to make."""
    held_out_missing = part == 0 and not shard_path(folder / HELD_OUT, 0).exists()
    return not held_out_missing and not _missing(folder, plan, part, parts)[0]


def train_shards(folder: Path, plan: DataPlan) -> list[Path]:
    """The first shards of a complete folder that hold enough answers."""
    paths, wanted = [], plan.answer_tokens
    for index in count(*plan.shards):
        path = shard_path(folder / TRAIN, index)
        if wanted <= 0 or not path.exists():
            break
        wanted -= num_answer_tokens(path)
        paths.append(path)
    return paths


def generate(target: Target, folder: Path, plan: DataPlan, progress: Progress, part: int = 0, parts: int = 1) -> None:
    """Fill the folder; of several processes, each makes the shards part, part + parts, …"""
    if part == 0 and not shard_path(folder / HELD_OUT, 0).exists():
        (folder / HELD_OUT).mkdir(exist_ok=True)
        wanted = _numbered(jobs(HELD_OUT, plan.seed, 0, plan.held_out_prompts), 0)
        ended = 0

        def held_out_ended(_: Record | None) -> None:
            nonlocal ended
            ended += 1
            progress("held-out answers", ended / len(wanted))

        for index, records in _whole_shards(target, iter(wanted), len(wanted), held_out_ended):
            write_shard(shard_path(folder / HELD_OUT, index), records)
    (folder / TRAIN).mkdir(exist_ok=True)
    while True:
        indices, made = _missing(folder, plan, part, parts)
        progress("answers of the target", min(1.0, made * parts / plan.answer_tokens) if indices else 1.0)
        if not indices:
            return

        def answer_ended(record: Record | None) -> None:
            nonlocal made
            made += 0 if record is None else record.num_answer_tokens
            progress("answers of the target", min(1.0, made * parts / plan.answer_tokens))

        numbered = (
            one for index in indices for one in _numbered(jobs(TRAIN, plan.seed, index, CONVERSATIONS_PER_SHARD), index)
        )
        for index, records in _whole_shards(target, numbered, CONVERSATIONS_PER_SHARD, answer_ended):
            write_shard(shard_path(folder / TRAIN, index), records)


def _missing(folder: Path, plan: DataPlan, part: int, parts: int) -> tuple[list[int], int]:
    """Numbers of the shards to make, as far as can be told before, and how many tokens the others hold.

    What is made is worth what the others are worth on average; so when all are there, a few may still be missing.
    """
    expected = CONVERSATIONS_PER_SHARD * plan.max_answer_tokens * 0.9
    wanted = plan.answer_tokens / parts
    missing: list[int] = []
    found = made = 0
    first, stride = plan.shards
    for index in count(first + part * stride, parts * stride):
        if made + len(missing) * (max(1.0, made / found) if found else expected) >= wanted:
            return missing, made
        path = shard_path(folder / TRAIN, index)
        if path.exists():
            made += num_answer_tokens(path)
            found += 1
        else:
            missing.append(index)
    raise AssertionError("count() ends")


def _numbered(wanted: list[Job], shard: int) -> list[tuple[int, int, Job]]:
    return [(shard, number, job) for number, job in enumerate(wanted)]


def _whole_shards(
    target: Target, wanted: Iterator[tuple[int, int, Job]], per_shard: int, ended: Callable[[Record | None], None]
) -> Iterator[tuple[int, list[Record]]]:
    """A shard's records in the order of its jobs, as soon as all are there; jobs of the next ones run meanwhile."""
    places: dict[int, tuple[int, int]] = {}
    """by id of a running job"""
    found: defaultdict[int, dict[int, Record | None]] = defaultdict(dict)

    def taken() -> Iterator[Job]:
        for shard, number, job in wanted:
            places[id(job)] = shard, number
            yield job

    for job, record in target.answers(taken()):
        shard, number = places.pop(id(job))
        found[shard][number] = record
        ended(record)
        if len(found[shard]) == per_shard:
            records = found.pop(shard)
            yield shard, [one for _, one in sorted(records.items()) if one is not None]
