"""Shared fixtures: an executor over the fake engine, driven by hand."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import Batch
from engine.fake import FakeEngine
from engine.noise import choice_seed, gumbel
from worker.executor import Drafting, Executor, NoDrafting
from worker.sequences import SequenceTable, limits_of
from worker.steps import Admission, SamplingParams, Step, StepOutcome

torch.set_num_threads(1)

Propose = Callable[[int, list[int], int], list[int]]


@dataclass
class ScriptedDrafting:
    """Drafts that a test makes up; remembers what the executor told."""

    propose: Propose
    followed: dict[int, list[int]] = field(default_factory=dict)
    forgotten: list[int] = field(default_factory=list)
    flushes: int = 0

    def tail(self, slot: int, tokens: list[int], limit: int) -> list[int]:
        return self.propose(slot, tokens, limit)

    def follow(self, sequence: Any, max_draft_tokens: int) -> None:
        self.followed[sequence.slot] = list(sequence.tokens)

    def forget(self, slot: int) -> None:
        self.followed.pop(slot, None)
        self.forgotten.append(slot)

    def flush(self) -> None:
        self.flushes += 1

    def wait(self, rows: Any, before: Any) -> None:
        return

    def learn(self, outcome: Any) -> None:
        return


@dataclass
class Rig:
    """An executor with the simplest possible scheduler: a block allocator that never takes back."""

    executor: Executor
    numbers: Any = field(default_factory=lambda: itertools.count(1))
    next_block: int = 0
    blocks: dict[int, int] = field(default_factory=dict)
    outcomes: list[StepOutcome] = field(default_factory=list)

    @property
    def limits(self) -> Any:
        return self.executor.sequences.limits

    def take_blocks(self, count: int) -> list[int]:
        ids = list(range(self.next_block, self.next_block + count))
        self.next_block += count
        assert self.next_block <= self.limits.num_blocks, "the test's pool is too small"
        return ids

    def admission(self, slot: int, tokens: list[int], *, blocks: int = 0, **changes: Any) -> Admission:
        values: dict[str, Any] = {
            "slot": slot,
            "sequence_id": 1000 + slot,
            "token_ids": tokens,
            "num_prompt_tokens": len(tokens),
            "choice": 0,
            "params": SamplingParams(temperature=0, max_tokens=16),
            "seed": 7 + slot,
            "block_ids": self.take_blocks(blocks),
            "num_computed_tokens": 0,
        }
        values.update(changes)
        self.blocks[slot] = len(values["block_ids"])
        return Admission(**values)

    def step(
        self,
        rows: Iterable[tuple[int, int, int]] = (),
        *,
        admissions: Iterable[Admission] = (),
        released: Iterable[int] = (),
        reserve: bool = True,
    ) -> StepOutcome:
        """Run one step; rows are (slot, num_prefill_tokens, max_draft_tokens), blocks are added as they need."""
        step = self.planned(rows, admissions=admissions, released=released, reserve=reserve)
        return self.taken(self.executor.run(step))

    def taken(self, outcome: StepOutcome) -> StepOutcome:
        """An outcome is the next one."""
        self.executor.sequences.check_integrity()
        self.outcomes.append(outcome)
        return outcome

    def planned(
        self,
        rows: Iterable[tuple[int, int, int]] = (),
        *,
        admissions: Iterable[Admission] = (),
        released: Iterable[int] = (),
        reserve: bool = True,
    ) -> Step:
        """The step that `step` would run."""
        admissions, rows = list(admissions), list(rows)
        new_counts, new_ids = [], []
        known = {a.slot: len(a.token_ids) for a in admissions}
        for slot, _, max_draft in rows:
            sequence = self.executor.sequences.get(slot)
            length = known.get(slot, sequence.known + sequence.awaited if sequence else 0)
            wanted = -(-(length + max_draft) // self.limits.block_size) if reserve else 0
            count = max(0, wanted - self.blocks.get(slot, 0))
            new_counts.append(count)
            new_ids += self.take_blocks(count)
            self.blocks[slot] = self.blocks.get(slot, 0) + count
        return Step(
            term=1,
            epoch=1,
            number=next(self.numbers),
            released_slots=list(released),
            admissions=admissions,
            slots=[row[0] for row in rows],
            num_prefill_tokens=[row[1] for row in rows],
            max_draft_tokens=[row[2] for row in rows],
            num_new_blocks=new_counts,
            new_block_ids=new_ids,
        )

    def output(self, slot: int) -> list[int]:
        sequence = self.executor.sequences.get(slot)
        assert sequence is not None
        return sequence.tokens[sequence.num_prompt :]

    def generate(self, slot: int, max_draft: int = 0, limit: int = 400) -> list[int]:
        """Decode until the sequence ends."""
        for _ in range(limit):
            sequence = self.executor.sequences.get(slot)
            assert sequence is not None
            if sequence.ended:
                return self.output(slot)
            self.step([(slot, 0, max_draft)])
        raise AssertionError("the sequence does not end")


@pytest.fixture
def make_rig() -> Callable[..., Rig]:
    def make(drafting: Drafting | None = None, engine: Any = None, **engine_options: Any) -> Rig:
        options = {"num_blocks": 256, "block_size": 4, "max_sequences": 16, "max_model_len": 256, **engine_options}
        chosen = engine or FakeEngine(**options)
        table = SequenceTable(limits_of(chosen.info), choice_seed)
        return Rig(Executor(chosen, table, drafting or NoDrafting()))

    return make


@pytest.fixture
def scripted_drafting() -> Callable[[Propose], ScriptedDrafting]:
    return ScriptedDrafting


def decode_plainly(prompt: list[int], seed: int, temperature: float, count: int) -> list[int]:
    """argmax(l / T + g) of one sequence, all of it recomputed in a fresh engine for every token."""
    return _plain_tokens(tuple(prompt), seed, temperature, count)[:]


@functools.cache
def _plain_tokens(prompt: tuple[int, ...], seed: int, temperature: float, count: int) -> list[int]:
    tokens = list(prompt)
    for index in range(count):
        length = len(tokens)
        engine = FakeEngine(num_blocks=64, block_size=4, max_sequences=1, max_model_len=256)
        logits = engine.forward(
            Batch(
                token_ids=np.array(tokens, np.int32),
                positions=np.arange(length, dtype=np.int32),
                slot_mapping=np.arange(length, dtype=np.int64),
                query_starts=np.array([0, length], np.int32),
                context_lens=np.array([length], np.int32),
                block_tables=np.arange(64, dtype=np.int32)[None],
                logit_indices=np.array([length - 1], np.int64),
            )
        )[0]
        scores = logits if temperature == 0 else logits / temperature + gumbel(seed, index, len(logits))
        tokens.append(int(scores.argmax()))
    return tokens[len(prompt) :]


def draft_knowing(truth: list[int], prompt: list[int], spoil: Callable[[list[int], int], list[int]]) -> Any:
    """A drafter that knows the future and has it spoilt."""

    def propose(slot: int, tokens: list[int], limit: int) -> list[int]:
        done = len(tokens) - len(prompt)
        return spoil(truth[done : done + limit], done)

    return propose


@pytest.fixture
def plain_tokens() -> Callable[..., list[int]]:
    """(prompt, seed, temperature, count) → the tokens of plain decoding, by an oracle that shares no code with it."""
    return decode_plainly


@pytest.fixture
def knowing() -> Callable[..., Propose]:
    """(truth, prompt, spoil) → a drafter that knows the future and has it spoilt."""
    return draft_knowing
