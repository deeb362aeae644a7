"""What the scheduler knows of one attached worker: its pool, its slots, what runs and what is issued."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from scheduler.core.block_pool import BlockPool
from scheduler.core.prefix_cache import chain_seed
from scheduler.core.sequence import Sequence, State
from scheduler.core.speculation import Speculation
from scheduler.core.step import Admission, Step


@dataclass(frozen=True, slots=True)
class Resident:
    """What a worker still holds of a sequence from an earlier attachment."""

    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    num_computed: int
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker says of itself when it attaches."""

    model: str
    fingerprint: str
    num_blocks: int
    block_size: int
    max_sequences: int
    max_model_len: int
    vocab_size: int = 0
    residents: tuple[Resident, ...] = ()
    step_times: tuple[tuple[int, float], ...] = ()
    """(tokens, seconds) of plain steps, as measured when the worker started"""


@dataclass(slots=True, eq=False)
class WorkerState:
    """One attachment of one worker; a new attachment is a new object."""

    worker_id: str
    spec: WorkerSpec
    pool: BlockPool
    free_slots: list[int]
    running: list[Sequence] = field(default_factory=list)
    """in slots, who goes first first"""
    leaving: set[Sequence] = field(default_factory=set)
    """preempted or over, but issued steps still contain them"""
    in_flight: deque[Step] = field(default_factory=deque)
    released_slots: list[int] = field(default_factory=list)
    """for the next step to carry"""
    admissions: list[Admission] = field(default_factory=list)
    """for the next step to carry"""
    steps: int = 0
    """issued so far"""
    generated_tokens: int = 0
    prefill_backlog: int = 0
    """known tokens of running sequences that no issued step computes yet"""
    draining: bool = False
    drafting: bool = False
    speculation: Speculation = field(default_factory=Speculation)
    decode_rows: int = 0
    """issued so far"""
    draft_budget: int = 0
    """sum of their k"""
    drafting_s: float = 0.0
    """what its steps spent guessing drafts or waiting for them"""
    suspect: Sequence | None = None
    """the running sequence that steps must not share with any other; at most one"""
    shared_steps: int = 0
    """steps with rows that were not a suspect's, since the last suspect"""

    @classmethod
    def attach(cls, worker_id: str, spec: WorkerSpec) -> WorkerState:
        """A fresh attachment; full blocks that the worker still holds become cached."""
        pool = BlockPool(spec.num_blocks, spec.block_size)
        slots = list(range(spec.max_sequences - 1, -1, -1))
        worker = cls(worker_id, spec, pool, slots)
        worker.speculation.plain_times.begin_with(spec.step_times)
        # The worker keeps old sequences in its slots until told otherwise.
        worker.released_slots = list(range(spec.max_sequences)) if spec.residents else []
        adopted: dict[int, None] = {}
        for resident in spec.residents:
            worker._register(resident, adopted)
        pool.adopt(list(reversed(adopted)))
        return worker

    def _register(self, resident: Resident, adopted: dict[int, None]) -> None:
        """Name a resident's full blocks; those that took the name join `adopted`."""
        size = self.spec.block_size
        parent = chain_seed(self.spec.model, resident.cache_salt)
        num_full = min(resident.num_computed, len(resident.token_ids)) // size
        for index, block in enumerate(resident.block_ids[:num_full]):
            if not self.pool.is_free(block):
                break
            parent = self.pool.cache.register(block, parent, resident.token_ids[index * size : (index + 1) * size])
            if self.pool.cache.knows(block):
                adopted[block] = None

    @property
    def sequences(self) -> Iterator[Sequence]:
        """All that hold blocks here."""
        yield from self.running
        yield from self.leaving

    @property
    def expected_step_s(self) -> float:
        """T(n) of the oldest issued step; 0 where nothing is issued or known."""
        curve = self.speculation.plain_times.curve
        return curve.at(self.in_flight[0].num_tokens) if self.in_flight and curve else 0.0

    @property
    def takes_suspect(self) -> bool:
        """One suspect at a time, and between two of them a step for all the others, so that many starve nobody."""
        if self.suspect is not None or any(one.is_suspect for one in self.leaving):
            return False
        return self.shared_steps > 0 or not self.running

    def enter(self, sequence: Sequence) -> int:
        """Give a sequence a slot."""
        slot = self.free_slots.pop()
        insort(self.running, sequence, key=lambda one: one.order)
        if sequence.is_suspect:
            self.suspect = sequence
            self.shared_steps = 0
        return slot

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out of its slot; its blocks stay until `settle`."""
        self.running.remove(sequence)
        assert sequence.slot is not None
        self.free_slots.append(sequence.slot)
        self.prefill_backlog -= max(0, sequence.prefill_end - sequence.planned)
        never_sent = [one for one in self.admissions if one.sequence is sequence]
        if never_sent:
            self.admissions.remove(never_sent[0])
        else:
            self.released_slots.append(sequence.slot)
        sequence.slot = None
        self.leaving.add(sequence)
        if self.suspect is sequence:
            self.suspect = None

    def settle(self, sequence: Sequence) -> None:
        """No issued step contains the sequence any more: its blocks return."""
        self.leaving.discard(sequence)
        self.pool.release(reversed(sequence.blocks))
        sequence.forget_placement()

    def check_integrity(self) -> None:
        """Raise AssertionError unless slots, blocks and counts all add up."""
        self.pool.check_integrity([sequence.blocks for sequence in self.sequences])
        used = [sequence.slot for sequence in self.running if sequence.slot is not None]
        assert len(used) == len(self.running), "a running sequence has no slot"
        assert len(set(used)) == len(used), "a slot is used twice"
        assert sorted(used + self.free_slots) == list(range(self.spec.max_sequences)), "slots got lost"
        assert self.running == sorted(self.running, key=lambda one: one.order), "running is out of order"
        backlog = sum(max(0, one.prefill_end - one.planned) for one in self.running)
        assert backlog == self.prefill_backlog, f"prefill backlog {self.prefill_backlog}, counted {backlog}"
        suspects = [one for one in self.running if one.is_suspect]
        assert suspects == ([self.suspect] if self.suspect else []), f"{suspects} are suspects"
        for step in self.in_flight:
            assert len(step.sequences) == len(set(step.sequences)), "a sequence has two rows in one step"
        for sequence in self.sequences:
            self._check_sequence(sequence)
        for sequence in self.leaving:
            assert sequence.in_flight > 0, f"{sequence} lingers"
            assert sequence.state in (State.LEAVING, State.CLOSING), f"{sequence} should not be leaving"

    def _check_sequence(self, sequence: Sequence) -> None:
        size = self.spec.block_size
        rows = [(step, step.sequences.index(sequence)) for step in self.in_flight if sequence in step.sequences]
        assert len(rows) == sequence.in_flight, f"{sequence}: {sequence.in_flight} in flight, {len(rows)} found"
        reserved = sum(step.reserved[row] for step, row in rows)
        assert sequence.horizon == len(sequence.token_ids) + reserved, f"{sequence}: horizon {sequence.horizon}"
        if sequence.state is not State.CLOSING and sequence.computed < sequence.prefill_end:
            prefilling = sum(step.num_prefill[row] for step, row in rows)
            assert sequence.planned == sequence.computed + prefilling, f"{sequence}: planned {sequence.planned}"
        assert sequence.capacity == len(sequence.blocks) * size, f"{sequence}: capacity {sequence.capacity}"
        assert sequence.limit is not None
        assert len(sequence.token_ids) <= sequence.limit, f"{sequence}: beyond its limit"
        if sequence.state is State.RUNNING:
            assert min(sequence.horizon, sequence.limit) <= sequence.capacity, f"{sequence}: horizon over capacity"
        assert 0 <= sequence.computed < len(sequence.token_ids), f"{sequence}: computed {sequence.computed}"
        assert len(sequence.block_hashes) <= sequence.computed // size, f"{sequence}: names for blocks not computed"
