"""What a target said, in files: answers, and the features that each of their tokens was chosen by.

    shard-00007.safetensors
        tokens         int32 [N]      conversations one after the other
        starts         int64 [C + 1]  where each begins
        spans          int64 [S, 3]   (conversation, first, end): tokens first … end - 1 of it are an answer
        seeds          int64 [S]      of the answer's noise; output index 0 is the token at `first`
        temperatures   float32 [S]
        features       A [F, hidden]  what the target's head saw for each token of each span, in this order

A file appears by one rename, so it is whole or absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from distill import work_folder
from distill.errors import Refused


@dataclass(frozen=True, slots=True)
class Answer:
    """A run of tokens that the target chose."""

    first: int
    """position of its first token in the conversation"""
    end: int
    seed: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Record:
    """One conversation as it took place."""

    tokens: torch.Tensor
    """int32 [n]"""
    answers: tuple[Answer, ...]
    features: torch.Tensor
    """[tokens of all answers, hidden]"""

    @property
    def num_answer_tokens(self) -> int:
        return len(self.features)

    def predicting(self) -> torch.Tensor:
        """int64: positions whose next token is an answer's, in the order of `features`."""
        return torch.cat([torch.arange(answer.first - 1, answer.end - 1) for answer in self.answers])


def shard_path(folder: Path, index: int) -> Path:
    """Where a shard lies."""
    return folder / f"shard-{index:05}.safetensors"


def shard_paths(folder: Path) -> list[Path]:
    """Those that are there, in order."""
    return sorted(folder.glob("shard-*.safetensors"))


def write_shard(path: Path, records: Sequence[Record]) -> None:
    """Replace the file."""
    lengths = torch.tensor([0, *(len(record.tokens) for record in records)])
    answers = [(index, answer) for index, record in enumerate(records) for answer in record.answers]
    tensors = {
        "tokens": torch.cat([record.tokens for record in records]).to(torch.int32),
        "starts": lengths.cumsum(0),
        "spans": torch.tensor([(index, answer.first, answer.end) for index, answer in answers]),
        "seeds": torch.tensor([answer.seed for _, answer in answers]),
        "temperatures": torch.tensor([answer.temperature for _, answer in answers], dtype=torch.float32),
        "features": torch.cat([record.features for record in records]).contiguous(),
    }
    work_folder.replace(path, lambda partial: save_file(tensors, partial))


def read_shard(path: Path) -> list[Record]:
    """The records of a file; their tensors are parts of larger ones. Raises Refused for one that is damaged."""
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise Refused("work", f"{path} is damaged ({error}); remove it, and it's made again") from error
    starts = tensors["starts"].tolist()
    answers: list[list[Answer]] = [[] for _ in starts[1:]]
    numbers = zip(tensors["spans"].tolist(), tensors["seeds"].tolist(), tensors["temperatures"].tolist(), strict=True)
    for (index, first, end), seed, temperature in numbers:
        # As float32 a temperature of 0.7 isn't 0.7.
        answers[index].append(Answer(first, end, seed, round(temperature, 4)))
    records, at = [], 0
    for index, own in enumerate(answers):
        count = sum(answer.end - answer.first for answer in own)
        tokens = tensors["tokens"][starts[index] : starts[index + 1]]
        records.append(Record(tokens, tuple(own), tensors["features"][at : at + count]))
        at += count
    return records


def num_answer_tokens(path: Path) -> int:
    """How many a file holds, without reading it."""
    try:
        with safe_open(path, framework="pt") as file:
            count: int = file.get_slice("features").get_shape()[0]
    except SafetensorError as error:
        raise Refused("work", f"{path} is damaged ({error}); remove it, and it's made again") from error
    return count


def read_shards(paths: Iterable[Path]) -> list[Record]:
    """All of them."""
    return [record for path in paths for record in read_shard(path)]
