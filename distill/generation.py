"""Lets a target answer prompts: many conversations at once, by the decoder route.

A conversation owns a fixed run of KV blocks while it lasts; the blocks of what all of them begin with (a template's
system prompt) are computed once and shared. Every step advances all of them: those that have just begun or got a next
question catch up in one go, the others decode. An answer is a function of its prompt, temperature and seed, whatever
runs beside it.

Some conversations begin with a question that the target makes up itself, in the user's place at temperature 1: it has
seen more questions than any list holds.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch

from distill.dialogue import Dialogue
from distill.prompts import TRAIN, Conversation, conversations
from distill.shards import Answer, Record
from engine.batch import Batch, pad_tables
from engine.decoder_route import DecoderModel
from engine.sampler import SampleRow, sample
from engine.sampling_params import SamplingParams

BLOCK_SIZE = 16
MAX_PROMPT_TOKENS = 256
"""of one turn; longer ones are left out"""
MAX_QUESTION_TOKENS = 64
"""of a question that the target makes up"""
OWN_QUESTIONS_SHARE = 0.4
MORE_OWN_QUESTIONS_SHARE = 0.5
"""of every other shard, which is more varied"""
TRAIN_TEMPERATURES = (0.0, 0.0, 0.0, 0.0, 0.7, 0.7, 0.85, 1.0)
HELD_OUT_TEMPERATURES = (0.0, 0.7)
_MAX_STEP_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Job:
    """A conversation to hold."""

    turns: tuple[str, ...]
    """the user's; an empty one is made up by the target"""
    temperature: float
    seed: int


@dataclass(slots=True)
class _Live:
    job: Job
    slot: int
    tokens: list[int]
    turn: int = 0
    computed: int = 0
    first: int = 0
    """where the running answer or question begins"""
    asking: bool = False
    """the running tokens are a question"""
    answers: list[Answer] = field(default_factory=list)
    features: list[torch.Tensor] = field(default_factory=list)

    def record(self) -> Record | None:
        if not self.answers:
            return None
        end = self.answers[-1].end
        return Record(torch.tensor(self.tokens[:end], dtype=torch.int32), tuple(self.answers), torch.cat(self.features))


def jobs(split: str, seed: int, shard: int, count: int) -> list[Job]:
    """The conversations of one shard: prompts of a split, with temperatures and seeds.

    Shards with odd numbers have the families of more_tasks.txt.
    """
    source = random.Random(f"{split} {seed} {shard}")
    if split == TRAIN:
        more = shard % 2 == 1
        own = MORE_OWN_QUESTIONS_SHARE if more else OWN_QUESTIONS_SHARE
        listed = conversations(split, source.getrandbits(48), more=more)
        return [_job(one, source, own) for one in islice(listed, count)]
    listed = conversations(split, source.getrandbits(48))
    # Every held-out prompt is answered at each temperature.
    return [
        Job(one.turns, temperature, source.getrandbits(48))
        for one in islice(listed, count)
        for temperature in HELD_OUT_TEMPERATURES
    ]


def _job(one: Conversation, source: random.Random, own_questions_share: float) -> Job:
    turns = ("", *one.turns[1:]) if source.random() < own_questions_share else one.turns
    return Job(turns, source.choice(TRAIN_TEMPERATURES), source.getrandbits(48))


def longest_conversation(max_answer_tokens: int) -> int:
    """Positions that two turns take up at most."""
    return 2 * (MAX_PROMPT_TOKENS + max_answer_tokens) + MAX_QUESTION_TOKENS


class Target:
    """A target that answers. Not thread-safe."""

    def __init__(
        self,
        model: DecoderModel,
        dialogue: Dialogue,
        eos_token_ids: Sequence[int],
        *,
        max_answer_tokens: int = 220,
        batch_size: int = 48,
    ) -> None:
        """`model` has no KV pool yet."""
        self._model = model
        self._dialogue = dialogue
        self._eos = frozenset(eos_token_ids)
        self._max_answer = max_answer_tokens
        self._max_len = longest_conversation(max_answer_tokens)
        self._shared_tokens = self._shared_start()
        self._num_shared = len(self._shared_tokens) // BLOCK_SIZE
        self._per_slot = -(-self._max_len // BLOCK_SIZE)
        self._batch_size = batch_size
        model.allocate(self._num_shared + batch_size * self._per_slot, BLOCK_SIZE)
        self.num_tokens = 0
        """generated so far"""
        if self._num_shared:
            start = _Live(Job((), 0.0, 0), 0, self._shared_tokens[: self._num_shared * BLOCK_SIZE])
            self._forward([(start, len(start.tokens))])

    def answers(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Record | None]]:
        """Each conversation when it has ended; None: its prompt is too long. Jobs are taken when there is room."""
        waiting = iter(jobs)
        free = list(range(self._batch_size))
        live: list[_Live] = []
        while True:
            while free and (job := next(waiting, None)) is not None:
                begun = self._begin(job, free[-1])
                if begun is None:
                    yield job, None
                else:
                    free.pop()
                    live.append(begun)
            if not live:
                return
            for one in self._step(live):
                live.remove(one)
                free.append(one.slot)
                yield one.job, one.record()

    def _shared_start(self) -> list[int]:
        first, second = self._dialogue.first("1"), self._dialogue.first("What?")
        count = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)
        own = self._dialogue.before_user()[:count]
        return first[:count] if own == first[:count] else []

    def _begin(self, job: Job, slot: int) -> _Live | None:
        asking = job.turns[0] == "" and self._dialogue.has_template
        tokens = self._dialogue.before_user() if asking else self._dialogue.first(job.turns[0])
        if len(tokens) > MAX_PROMPT_TOKENS:
            return None
        shared = self._num_shared * BLOCK_SIZE
        same = tokens[:shared] == self._shared_tokens[:shared] and len(tokens) > shared
        return _Live(job, slot, tokens, computed=shared if same else 0, first=len(tokens), asking=asking)

    def _step(self, live: Sequence[_Live]) -> list[_Live]:
        """One forward pass; those that ended."""
        rows, left = [], _MAX_STEP_TOKENS
        for one in sorted(live, key=lambda one: len(one.tokens) - one.computed):
            count = min(len(one.tokens) - one.computed, left)
            if count:
                rows.append((one, count))
                left -= count
        choosing = [one for one, count in rows if one.computed + count == len(one.tokens)]
        logits, features = self._forward(rows)
        chosen = sample(logits, [_sample_row(one) for one in choosing]).token_ids
        features = features.cpu().clone()
        ended = []
        for at, (one, token_id) in enumerate(zip(choosing, chosen, strict=True)):
            if token_id is None or not self._take(one, token_id, features[at : at + 1]):
                ended.append(one)
        self.num_tokens += len(choosing)
        return ended

    def _take(self, one: _Live, token_id: int, features: torch.Tensor) -> bool:
        """Whether the conversation goes on."""
        one.tokens.append(token_id)
        is_end = token_id in self._eos
        length = len(one.tokens) - one.first
        if one.asking:
            if is_end or length == MAX_QUESTION_TOKENS:
                if is_end:
                    one.tokens.pop()
                one.tokens += self._dialogue.after_user()
                one.first, one.asking = len(one.tokens), False
            return True
        one.features.append(features)
        if not is_end and length < self._max_answer:
            return True
        one.answers.append(Answer(one.first, len(one.tokens), one.job.seed + one.turn, one.job.temperature))
        one.turn += 1
        if one.turn == len(one.job.turns):
            return False
        question = self._dialogue.next(one.job.turns[one.turn], ended=is_end)
        if len(question) > MAX_PROMPT_TOKENS:
            return False
        one.tokens += question
        one.first = len(one.tokens)
        return True

    @torch.inference_mode()
    def _forward(self, rows: Sequence[tuple[_Live, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        token_ids: list[int] = []
        positions, slots, tables, wanted = [], [], [], []
        for one, count in rows:
            token_ids += one.tokens[one.computed : one.computed + count]
            at = np.arange(one.computed, one.computed + count)
            own = self._num_shared + one.slot * self._per_slot
            table = np.concatenate((np.arange(self._num_shared), np.arange(own, own + self._per_slot)))
            positions.append(at)
            slots.append(table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE)
            one.computed += count
            tables.append(table[: -(-one.computed // BLOCK_SIZE)].astype(np.int32))
            if one.computed == len(one.tokens):
                wanted.append(len(token_ids) - 1)
        counts = [count for _, count in rows]
        return self._model.forward_with_features(
            Batch(
                token_ids=np.array(token_ids, np.int32),
                positions=np.concatenate(positions).astype(np.int32),
                slot_mapping=np.concatenate(slots).astype(np.int64),
                query_starts=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
                context_lens=np.array([one.computed for one, _ in rows], np.int32),
                block_tables=pad_tables(tables),
                logit_indices=np.array(wanted, np.int64),
            )
        )


def _sample_row(one: _Live) -> SampleRow:
    temperature = 1.0 if one.asking else one.job.temperature
    params = SamplingParams(temperature=temperature, top_p=0.95 if one.asking else 1.0)
    seed = one.job.seed - 1 if one.asking else one.job.seed + one.turn
    return SampleRow(params, seed, len(one.tokens) - one.first, (), one.first)
