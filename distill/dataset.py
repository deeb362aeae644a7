"""The answers that a draft is trained and measured on, as shards in a folder; what is there already is kept.

    held-out/shard-00000.safetensors     answers to held-out prompts, each at every temperature
    train/shard-00000.safetensors …      CONVERSATIONS_PER_SHARD conversations each
    data.json                            what decides all of it: target, seed, digests of the splits and of the prompts

A shard depends on its number and the seed alone, so that several processes can make disjoint parts of one folder.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

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


class OtherData(ValueError):
    """The folder holds answers of another target, seed or version of the prompts."""


def claim(folder: Path, plan: DataPlan) -> None:
    """Make the folder, or check that it is this plan's. Raises OtherData naming what differs."""
    folder.mkdir(parents=True, exist_ok=True)
    path, wanted = folder / "data.json", plan.description()
    if not path.exists():
        path.write_text(json.dumps(wanted, indent=1) + "\n")
        return
    found = json.loads(path.read_text())
    for name, value in wanted.items():
        if found.get(name) != value:
            raise OtherData(f"{path}: {name} is {found.get(name)!r} instead of {value!r}; use another --work folder")


def is_complete(folder: Path, plan: DataPlan, part: int = 0, parts: int = 1) -> bool:
    """Whether `generate` has nothing left to make."""
    if part == 0 and not shard_path(folder / HELD_OUT, 0).exists():
        return False
    wanted, index = plan.answer_tokens // parts, part
    while wanted > 0 and (path := shard_path(folder / TRAIN, index)).exists():
        wanted -= num_answer_tokens(path)
        index += parts
    return wanted <= 0


def generate(target: Target, folder: Path, plan: DataPlan, progress: Progress, part: int = 0, parts: int = 1) -> None:
    """Fill the folder; of several processes, each makes the shards part, part + parts, …"""
    if part == 0 and not shard_path(folder / HELD_OUT, 0).exists():
        (folder / HELD_OUT).mkdir(exist_ok=True)
        wanted = _numbered(jobs(HELD_OUT, plan.seed, 0, plan.held_out_prompts), 0)
        for index, records in _whole_shards(target, iter(wanted), len(wanted), progress, "held-out answers"):
            write_shard(shard_path(folder / HELD_OUT, index), records)
    (folder / TRAIN).mkdir(exist_ok=True)
    made = 0

    def missing() -> Iterator[tuple[int, int, Job]]:
        nonlocal made
        for index in count(part, parts):
            if made >= plan.answer_tokens // parts:
                return
            path = shard_path(folder / TRAIN, index)
            if path.exists():
                made += num_answer_tokens(path)
            else:
                yield from _numbered(jobs(TRAIN, plan.seed, index, CONVERSATIONS_PER_SHARD), index)

    def report(_: str, share: float | None) -> None:
        progress("answers of the target", min(1.0, made * parts / plan.answer_tokens))

    for index, records in _whole_shards(target, missing(), CONVERSATIONS_PER_SHARD, report, ""):
        write_shard(shard_path(folder / TRAIN, index), records)
        made += sum(record.num_answer_tokens for record in records)


def _numbered(wanted: list[Job], shard: int) -> list[tuple[int, int, Job]]:
    return [(shard, number, job) for number, job in enumerate(wanted)]


def _whole_shards(
    target: Target, wanted: Iterator[tuple[int, int, Job]], per_shard: int, progress: Progress, what: str
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
        progress(what, len(found[shard]) / per_shard)
        if len(found[shard]) == per_shard:
            records = found.pop(shard)
            yield shard, [one for _, one in sorted(records.items()) if one is not None]
