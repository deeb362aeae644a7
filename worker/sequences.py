"""The slot table: which sequences the worker holds, how long they are and where their KV lies.

Lengths are the worker's own: the scheduler issues decode rows before it knows what the previous step emitted. For every
sequence, between two steps,

    0 ≤ computed < known ≤ max_model_len          the last known token is never computed
    known = prompt + output                       computed = known − 1 after any sampling

A sequence ends by its own finish or by a failure and stays in its slot, inert, until the scheduler releases it. An
admission that can't be right (an id outside the vocabulary, a block outside the pool) enters as a failed sequence, so
that its first row can say why; nothing here raises for one bad sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from cluster.draft_news import Source
from engine import noise
from engine.batch import EngineInfo
from engine.token_counts import TokenCounts
from worker.steps import Admission, Finish, Resident, SamplingParams


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine can hold; lengths in tokens."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    max_sequences: int


def limits_of(info: EngineInfo) -> Limits:
    """The limits of an engine."""
    return Limits(info.vocab_size, info.max_model_len, info.num_blocks, info.block_size, info.max_sequences)


@dataclass(slots=True)
class Sequence:
    """One resident sequence."""

    slot: int
    sequence_id: int
    tokens: list[int]
    """all known ones; the sampler reads it, only `emit` appends"""
    num_prompt: int
    computed: int
    """tokens whose KV is valid"""
    params: SamplingParams
    choice_seed: int
    cache_salt: str
    draft_source: Source = Source.ANY
    num_blocks: int = 0
    finish: Finish = Finish.NOT
    failed: bool = False
    """set with ended; its KV is not to be trusted"""
    untold_failure: str = ""
    """why it failed, until its next row says so"""
    ended: bool = False
    untold_finish: bool = False
    """it was admitted with no token left to emit, which its first row says"""
    awaited: int = 0
    """tokens that launched steps choose for it and that aren't known here yet; see worker/run_ahead.py"""
    launched: int = 0
    """tokens whose KV is valid once everything that is launched has run; counts where it is more than `computed`"""
    signed_seed: int = field(init=False)
    """choice_seed as a signed number of 64 bits"""
    longest: int = field(init=False)
    """known tokens at which it ends"""
    _counts: TokenCounts | None = None

    def __post_init__(self) -> None:
        self.signed_seed = noise.signed(self.choice_seed)
        self.longest = self.num_prompt + self.params.max_tokens

    @property
    def known(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def tokens_left(self) -> int:
        """Tokens it may still emit."""
        return self.longest - len(self.tokens)

    def counts(self) -> TokenCounts | None:
        """What penalties ask of the known tokens; None where none is wanted."""
        if not self.params.penalises:
            return None
        if self._counts is None:
            self._counts = TokenCounts()
        self._counts.catch_up(self.tokens, self.num_prompt)
        return self._counts

    def emit(self, token_ids: list[int], finish: Finish) -> None:
        """Append a verified run; the KV before its last token is valid."""
        self.tokens.extend(token_ids)
        self.computed = len(self.tokens) - 1
        if finish is not Finish.NOT:
            self.finish = finish
            self.ended = True

    def fail(self, message: str) -> None:
        """End without a token more."""
        self.untold_failure = message
        self.ended = self.failed = True


@dataclass(slots=True)
class SequenceTable:
    """All slots. One thread owns it."""

    limits: Limits
    choice_seed: Callable[[int, int], int]
    """(request seed, choice) → the choice's own seed"""
    block_tables: np.ndarray = field(init=False)
    """int32 [max_sequences, blocks]; row s is valid up to its sequence's num_blocks"""
    _held: dict[int, Sequence] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        # Widened on demand: most sequences are far shorter than the model's longest.
        self.block_tables = np.zeros((self.limits.max_sequences, 8), np.int32)

    def __len__(self) -> int:
        return len(self._held)

    def get(self, slot: int) -> Sequence | None:
        """The sequence in a slot, ended ones included."""
        return self._held.get(slot)

    def slots(self) -> list[int]:
        """The occupied ones."""
        return list(self._held)

    def release(self, slot: int) -> None:
        """Forget a slot; releasing an empty one is harmless."""
        self._held.pop(slot, None)

    def clear(self) -> None:
        """Forget everything: a new leader admits anew."""
        self._held.clear()

    def admit(self, admission: Admission) -> Sequence:
        """Take a sequence into its slot, replacing what stood there; an invalid one enters as failed."""
        problem = admission.invalid or self._problem(admission)
        sequence = Sequence(
            slot=admission.slot,
            sequence_id=admission.sequence_id,
            tokens=list(admission.token_ids),
            num_prompt=admission.num_prompt_tokens,
            computed=admission.num_computed_tokens,
            params=admission.params,
            choice_seed=self.choice_seed(admission.seed, admission.choice),
            cache_salt=admission.cache_salt,
            draft_source=admission.draft_source,
        )
        sequence.longest = min(sequence.longest, self.limits.max_model_len)
        self._held[admission.slot] = sequence
        if problem:
            sequence.fail(problem)
            return sequence
        self.append_blocks(sequence, admission.block_ids)
        if sequence.tokens_left < 1:
            # Readmitted after its last token was emitted but before that was known: nothing is left to compute.
            sequence.finish = Finish.LENGTH
            sequence.ended = sequence.untold_finish = True
        return sequence

    def append_blocks(self, sequence: Sequence, block_ids: Seq[int]) -> None:
        """Lengthen a block table. An id outside the pool fails the sequence instead of touching foreign memory."""
        if not len(block_ids):
            return
        if min(block_ids) < 0 or max(block_ids) >= self.limits.num_blocks:
            sequence.fail("a block outside the worker's pool was assigned")
            return
        end = sequence.num_blocks + len(block_ids)
        if end > self.block_tables.shape[1]:
            wider = np.zeros((self.block_tables.shape[0], max(end, 2 * self.block_tables.shape[1])), np.int32)
            wider[:, : self.block_tables.shape[1]] = self.block_tables
            self.block_tables = wider
        self.block_tables[sequence.slot, sequence.num_blocks : end] = block_ids
        sequence.num_blocks = end

    def capacity(self, sequence: Sequence) -> int:
        """Tokens whose KV its blocks can hold."""
        return sequence.num_blocks * self.limits.block_size

    def residents(self) -> list[Resident]:
        """What is held and has valid KV, ended sequences included, for a new leader's prefix cache."""
        block_size = self.limits.block_size
        found = []
        for sequence in self._held.values():
            num_blocks = -(-sequence.computed // block_size)
            if num_blocks and not sequence.failed:
                ids = self.block_tables[sequence.slot, :num_blocks].tolist()
                found.append(Resident(list(sequence.tokens), ids, sequence.computed, sequence.cache_salt))
        return found

    def check_integrity(self) -> None:
        """Raise AssertionError where a sequence breaks the invariants above."""
        for slot, sequence in self._held.items():
            assert sequence.slot == slot
            if sequence.failed:
                continue
            assert 0 < sequence.num_prompt <= sequence.known <= self.limits.max_model_len, sequence
            assert 0 <= sequence.computed < sequence.known, sequence
            assert sequence.computed <= self.capacity(sequence), sequence
            assert sequence.num_output <= max(sequence.params.max_tokens, 0), sequence
            assert sequence.awaited >= 0, sequence

    def _problem(self, admission: Admission) -> str:
        limits = self.limits
        known = len(admission.token_ids)
        if not 0 <= admission.slot < limits.max_sequences:
            return "a slot outside the worker's table was assigned"
        if not 0 < admission.num_prompt_tokens <= known:
            return "the prompt is empty or longer than what is known"
        if known > limits.max_model_len:
            return f"{known} tokens exceed the model's {limits.max_model_len}"
        ids = np.asarray(admission.token_ids, np.int64)
        if ids.min() < 0 or ids.max() >= limits.vocab_size:
            return f"a token id is outside the vocabulary of {limits.vocab_size}"
        if not 0 <= admission.num_computed_tokens < known:
            return "all tokens are said to be computed"
        if admission.num_computed_tokens > len(admission.block_ids) * limits.block_size:
            return "fewer blocks than computed tokens were assigned"
        return ""
