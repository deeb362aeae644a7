"""A worker as the step protocol describes it, without a model, and the oracle of what it must emit.

Written from protos/tandem/v1/scheduler.proto, not from the core: it gets a step as plain data, keeps its own tokens,
block tables and lengths, and has a memory in which every cell tells exactly which prefix its KV belongs to. Whatever it
computes, it first reads its whole context back through its own block table. A block that is stale, foreign, overwritten
or missing is found at the first read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler.core.step import Step, StepOutcome

VOCAB = 97
STOP, LENGTH = 1, 2
_MASK = (1 << 64) - 1


def mix(state: int, value: int) -> int:
    """One round of an integer hash; equal results mean equal histories, as far as a test will ever see."""
    state = ((state ^ (value + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9) & _MASK
    return state ^ (state >> 29)


def chain(tokens: list[int] | tuple[int, ...], start: int = 0) -> int:
    """What a cell remembers of its prefix, the cell's own token included."""
    for token in tokens:
        start = mix(start, token)
    return start


def next_token(context: int, seed: int, choice: int, output_index: int) -> int:
    """The token that follows a context: a function of context, seed, choice and output index alone."""
    return mix(mix(mix(context, seed), choice), output_index) % VOCAB


def expected_output(
    prompt: tuple[int, ...], seed: int, choice: int, stop: frozenset[int], max_tokens: int
) -> tuple[list[int], int]:
    """The oracle: what a choice's whole output is, and how it ends, whatever the scheduling."""
    context = chain(prompt)
    tokens: list[int] = []
    while True:
        token = next_token(context, seed, choice, len(tokens))
        tokens.append(token)
        if token in stop:
            return tokens, STOP
        if len(tokens) == max_tokens:
            return tokens, LENGTH
        context = mix(context, token)


class Cell(NamedTuple):
    """KV of one position."""

    position: int
    prefix: int
    salt: str


@dataclass(frozen=True)
class Params:
    """The part of a request that the core carries untouched."""

    stop: frozenset[int] = frozenset()


@dataclass(frozen=True)
class WireAdmission:
    """Admission, by value."""

    slot: int
    token_ids: tuple[int, ...]
    num_prompt: int
    choice: int
    stop: frozenset[int]
    max_tokens: int
    seed: int
    block_ids: tuple[int, ...]
    num_computed: int
    salt: str
    prompt_logprobs: bool
    key: object


@dataclass(frozen=True)
class WireStep:
    """Step, by value: nothing that the core changes later shows through."""

    number: int
    released: tuple[int, ...]
    admissions: tuple[WireAdmission, ...]
    rows: tuple[tuple[int, int, int, tuple[int, ...]], ...]
    """slot, tokens to prefill, draft budget, new blocks"""


def to_wire(step: Step) -> WireStep:
    """What the service would send of a step."""
    admissions = []
    for admission in step.admissions:
        sequence = admission.sequence
        spec = sequence.request.spec
        assert sequence.limit is not None
        assert isinstance(spec.params, Params)
        admissions.append(
            WireAdmission(
                admission.slot,
                admission.token_ids,
                len(spec.prompt_token_ids),
                sequence.choice,
                spec.params.stop,
                sequence.limit - len(spec.prompt_token_ids),
                spec.seed,
                admission.block_ids,
                admission.num_computed,
                spec.cache_salt,
                sequence.owes_prompt_logprobs,
                spec.key,
            )
        )
    rows = zip(step.slots, step.num_prefill, step.num_draft, map(tuple, step.new_blocks), strict=True)
    return WireStep(step.number, tuple(step.released_slots), tuple(admissions), tuple(rows))


@dataclass
class Slot:
    """One resident sequence."""

    admission: WireAdmission
    tokens: list[int]
    blocks: list[int]
    computed: int
    ended: bool = False


DraftPolicy = Callable[[int, int], tuple[int, int]]
"""(sequence's known tokens, budget k) → (how many to draft, how many of them are right)"""


def no_drafts(known: int, budget: int) -> tuple[int, int]:
    """A worker without a draft worker."""
    return 0, 0


@dataclass
class ModelWorker:
    """Slots, tables and KV memory of one worker process."""

    num_blocks: int
    block_size: int
    max_sequences: int
    max_model_len: int
    draft: DraftPolicy = no_drafts
    slots: dict[int, Slot] = field(default_factory=dict)
    memory: dict[int, Cell] = field(default_factory=dict)
    last_number: int = 0
    fresh: bool = True
    """nothing ran since attaching: slots that a former attachment filled may be released"""
    drafted: int = 0
    accepted: int = 0
    cost_us: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """what a step takes: at all, by the token, and more where it may draft; 0: durations are not told"""

    def attach(self) -> list[tuple[list[int], list[int], int, str]]:
        """Say Hello anew: (tokens, blocks, computed, salt) of what is still held. The memory stays."""
        residents = [
            (list(slot.tokens), slot.blocks[: -(-slot.computed // self.block_size)], slot.computed, slot.admission.salt)
            for slot in self.slots.values()
            if slot.computed
        ]
        self.slots.clear()
        self.last_number = 0
        self.fresh = True
        return residents

    def run(self, step: WireStep) -> StepOutcome:
        """Releases, then admissions, then rows. Asserts whatever the protocol promises a worker."""
        assert step.number == self.last_number + 1, f"step {step.number} after {self.last_number}"
        self.last_number = step.number
        assert len(set(step.released)) == len(step.released), "a slot is released twice"
        for slot in step.released:
            assert slot in self.slots or self.fresh, f"slot {slot} is released but empty"
            self.slots.pop(slot, None)
        self.fresh = False
        for admission in step.admissions:
            self._admit(admission)
        outcome = StepOutcome(step.number, [], [], [])
        seen: set[int] = set()
        drafts: list[tuple[int, int]] = []
        for row, (slot, num_prefill, budget, new_blocks) in enumerate(step.rows):
            assert slot not in seen, f"slot {slot} has two rows"
            seen.add(slot)
            assert slot in self.slots, f"slot {slot} has a row but no sequence"
            before = self.slots[slot].computed
            drafts.append(self._run_row(row, self.slots[slot], num_prefill, budget, new_blocks, outcome))
            drafted, accepted = drafts[-1]
            # Whatever was accepted is computed by now; the rest of the draft went through the model as well.
            outcome.num_model_tokens += self.slots[slot].computed - before + drafted - accepted
        if any(count for count, _ in drafts):
            outcome.num_drafted = [count for count, _ in drafts]
            outcome.num_accepted = [count for _, count in drafts]
        fixed, by_token, drafting = self.cost_us
        busy = drafting * any(budget for _, _, budget, _ in step.rows)
        outcome.duration_s = (fixed + by_token * outcome.num_model_tokens + busy) * 1e-6
        return outcome

    def _admit(self, admission: WireAdmission) -> None:
        assert admission.slot not in self.slots, f"slot {admission.slot} is taken"
        assert 0 <= admission.slot < self.max_sequences
        assert 0 <= admission.num_computed < len(admission.token_ids)
        assert admission.num_computed <= len(admission.block_ids) * self.block_size
        assert admission.num_prompt + admission.max_tokens <= self.max_model_len
        assert len(admission.token_ids) - admission.num_prompt < admission.max_tokens, "nothing is left to emit"
        slot = Slot(admission, list(admission.token_ids), [], admission.num_computed)
        self._append_blocks(slot, admission.block_ids)
        self.slots[admission.slot] = slot

    def _append_blocks(self, slot: Slot, blocks: tuple[int, ...]) -> None:
        slot.blocks += blocks
        assert len(set(slot.blocks)) == len(slot.blocks), "a block stands twice in a table"
        assert all(0 <= block < self.num_blocks for block in slot.blocks)

    def _run_row(
        self, row: int, slot: Slot, num_prefill: int, budget: int, new_blocks: tuple[int, ...], outcome: StepOutcome
    ) -> tuple[int, int]:
        """One row; returns (drafted, accepted)."""
        self._append_blocks(slot, new_blocks)
        drafted = accepted = 0
        emitted: list[int] = []
        finish = 0
        if not slot.ended:
            known = len(slot.tokens)
            wanted = num_prefill or known - slot.computed
            assert slot.computed + wanted <= known, "more is to be prefilled than is known"
            assert num_prefill or wanted == 1, f"a decode row would compute {wanted} tokens"
            context = self._read(slot)
            start = slot.computed
            for position in range(start, start + wanted):
                context = mix(context, slot.tokens[position])
                self._write(slot, position, context)
            slot.computed += wanted
            if slot.admission.prompt_logprobs:
                self._add_prompt_logprobs(row, slot, start, outcome)
            if slot.computed == known:
                emitted, finish, drafted, accepted = self._sample(slot, context, budget)
        outcome.num_tokens.append(len(emitted))
        outcome.token_ids += emitted
        outcome.finish.append(finish)
        return drafted, accepted

    def _sample(self, slot: Slot, context: int, budget: int) -> tuple[list[int], int, int, int]:
        """Sample, verify a draft, and move on: (emitted, finish, drafted, accepted)."""
        admission = slot.admission
        known = len(slot.tokens)
        tokens_left = admission.max_tokens - (known - admission.num_prompt)
        room = min(budget, len(slot.blocks) * self.block_size - known, tokens_left - 1)
        count, right = self.draft(known, room) if room > 0 else (0, 0)
        emitted: list[int] = []
        finish = accepted = 0
        for index in range(count + 1):
            token = next_token(context, admission.seed, admission.choice, known - admission.num_prompt + index)
            emitted.append(token)
            if token in admission.stop:
                finish = STOP
            elif len(emitted) == tokens_left:
                finish = LENGTH
            guess = token if index < right else (token + 1) % VOCAB
            if index == count:
                break
            # The guess's KV is written before anybody knows whether it is right.
            self._write(slot, known + index, mix(context, guess))
            if guess != token or finish:
                accepted += guess == token
                self._spoil(slot, known + index + 1, known + count)
                break
            accepted += 1
            context = mix(context, guess)
        slot.tokens += emitted
        slot.computed = len(slot.tokens) - 1
        slot.ended = finish != 0
        self.drafted += count
        self.accepted += accepted
        return emitted, finish, count, accepted

    def _spoil(self, slot: Slot, start: int, end: int) -> None:
        """The KV of guesses behind a wrong one is written as well, and is worth nothing."""
        for position in range(start, end):
            self._write(slot, position, -1)

    def _read(self, slot: Slot) -> int:
        """Read the context back, cell by cell, against the sequence's own tokens; returns its chain."""
        context, size = 0, self.block_size
        for position in range(slot.computed):
            context = mix(context, slot.tokens[position])
            cell = self.memory.get(slot.blocks[position // size] * size + position % size)
            assert cell == (position, context, slot.admission.salt), (
                f"{slot.admission.key!r}: position {position} of {slot.computed} reads {cell}"
            )
        return context

    def _write(self, slot: Slot, position: int, prefix: int) -> None:
        size = self.block_size
        assert position // size < len(slot.blocks), f"position {position} has no block"
        self.memory[slot.blocks[position // size] * size + position % size] = Cell(
            position, prefix, slot.admission.salt
        )

    def _add_prompt_logprobs(self, row: int, slot: Slot, start: int, outcome: StepOutcome) -> None:
        """Entries of prompt positions start + 1 to computed, and of position 0 with the first chunk."""
        first = start + 1 if start else 0
        last = min(slot.computed, slot.admission.num_prompt - 1)
        if first <= last:
            entries: list[object] = [prompt_logprob(slot.tokens, position) for position in range(first, last + 1)]
            outcome.prompt_logprobs[row] = (first, entries)


def prompt_logprob(tokens: list[int] | tuple[int, ...], position: int) -> tuple[int, int]:
    """What stands for the log-probability of a prompt token: its position and all that comes before it."""
    return position, chain(tokens[:position])
