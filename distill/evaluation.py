"""How many of a draft's tokens a target would accept, found out without running the target again.

A held-out answer is the target's own, so the draft sees it as it would in service: as long as its guesses are
accepted, what it has guessed is the answer. One pass over the answer gives the guess at every position; blocks of k are
then played through one by one. At T > 0 a guess is argmax(log q / T + g) with the noise of the answer's own seed and
output index, as a draft worker makes it.

    alone         the model guesses every block
    with lookup   where the last tokens occurred before, what followed there is guessed; the model where they didn't
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from distill.batches import TrainBatch, collated
from distill.loss import Head
from distill.shards import Answer, Record
from engine import noise

LOOKUP_TOKENS = (5, 3, 2)
"""the last so many tokens are looked up, the longest match first"""
_POSITIONS = 5
_BATCH_TOKENS = 2048

Outputs = Callable[[TrainBatch], torch.Tensor]
"""a batch → bfloat16 [predicting tokens, hidden]"""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """At one temperature, over all its answers."""

    temperature: float
    num_tokens: int
    top_1: float
    """share of positions where the guess is right"""
    by_position: tuple[float, ...]
    """share of blocks whose token at 1, 2, … is right, given that those before were"""
    alone: dict[int, float]
    """k → mean tokens accepted per step"""
    with_lookup: dict[int, float]


@dataclass(frozen=True, slots=True)
class _Played:
    """One answer."""

    right: list[bool]
    """whether the model's guess is the token, by position"""
    looked_up: list[int]
    """how many tokens a lookup there would get right; -1: it finds nothing"""


@torch.inference_mode()
def evaluate(
    outputs: Outputs,
    head: Head,
    token_ids: torch.Tensor,
    records: Sequence[Record],
    *,
    max_draft_tokens: Sequence[int] = (1, 2, 3, 4, 8),
    device: torch.device | str = "cpu",
) -> list[Acceptance]:
    """One entry per temperature; `token_ids` are the target's ids of the head's rows."""
    # Products of bfloat16 are rounded to bfloat16 here, unlike in an engine; winners would be ties.
    exact = replace(head, weight=head.weight.float())
    longest = max(max_draft_tokens)
    played: dict[float, list[_Played]] = {}
    order = sorted(range(len(records)), key=lambda index: len(records[index].tokens))
    batches = list(_batches([records[index] for index in order], order))
    for rows, batch in zip(batches, collated(records, batches, device), strict=True):
        out = outputs(batch)
        at = 0
        for index in rows:
            record = records[index]
            tokens = record.tokens.tolist()
            for answer in record.answers:
                count = answer.end - answer.first
                guesses = _guesses(exact.logits(out[at : at + count].float()), token_ids, answer)
                right = (guesses.cpu() == record.tokens[answer.first : answer.end]).tolist()
                looked_up = _lookups(tokens, answer, longest)
                played.setdefault(answer.temperature, []).append(_Played(right, looked_up))
                at += count
    return [_acceptance(temperature, some, max_draft_tokens) for temperature, some in sorted(played.items())]


def _batches(records: Sequence[Record], order: Sequence[int]) -> Iterator[list[int]]:
    rows: list[int] = []
    for index, record in zip(order, records, strict=True):
        if rows and len(record.tokens) * (len(rows) + 1) > _BATCH_TOKENS:
            yield rows
            rows = []
        rows.append(index)
    if rows:
        yield rows


def _guesses(logits: torch.Tensor, token_ids: torch.Tensor, answer: Answer) -> torch.Tensor:
    """The target's ids, one per row."""
    token_ids = token_ids.to(logits.device)
    if answer.temperature > 0:
        logits = logits / answer.temperature
        keys = noise.row_keys([answer.seed] * len(logits), range(len(logits)))
        pairs = torch.from_numpy(keys).to(logits.device)
        for row in range(len(logits)):
            logits[row] += noise.gumbel_from_bits(noise.uniform_bits(pairs[row, 0], pairs[row, 1], token_ids))
    return token_ids[logits.argmax(-1)]


def _lookups(tokens: Sequence[int], answer: Answer, longest: int) -> list[int]:
    """For each position of an answer, how many of the tokens found there are right."""
    ends: dict[tuple[int, ...], int] = {}
    """the tokens of a match → the position after its last occurrence"""
    found = []
    for position in range(1, answer.end):
        if position >= answer.first:
            found.append(_looked_up(tokens, position, ends, min(longest, answer.end - position)))
        for length in LOOKUP_TOKENS:
            if position >= length:
                ends[tuple(tokens[position - length : position])] = position
    return found


def _looked_up(tokens: Sequence[int], position: int, ends: dict[tuple[int, ...], int], longest: int) -> int:
    """A copy may run on into what it copied itself."""
    for length in LOOKUP_TOKENS:
        earlier = ends.get(tuple(tokens[max(0, position - length) : position]))
        if earlier is not None:
            right = 0
            while right < longest and tokens[earlier + right] == tokens[position + right]:
                right += 1
            return right
    return -1


def _acceptance(temperature: float, played: Sequence[_Played], max_draft_tokens: Sequence[int]) -> Acceptance:
    num_tokens = sum(len(one.right) for one in played)
    return Acceptance(
        temperature=temperature,
        num_tokens=num_tokens,
        top_1=sum(sum(one.right) for one in played) / num_tokens,
        by_position=_by_position(played),
        alone={k: _accepted_per_step(played, k, lookup=False) for k in max_draft_tokens},
        with_lookup={k: _accepted_per_step(played, k, lookup=True) for k in max_draft_tokens},
    )


def _by_position(played: Sequence[_Played]) -> tuple[float, ...]:
    reached, right = [0] * _POSITIONS, [0] * _POSITIONS
    for one in played:
        for start in range(len(one.right) - _POSITIONS + 1):
            for position in range(_POSITIONS):
                reached[position] += 1
                if not one.right[start + position]:
                    break
                right[position] += 1
    return tuple(hits / max(tries, 1) for hits, tries in zip(right, reached, strict=True))


def _accepted_per_step(played: Sequence[_Played], k: int, *, lookup: bool) -> float:
    steps = accepted = 0
    for one in played:
        position = 0
        while position < len(one.right):
            looked_up = one.looked_up[position] if lookup else -1
            run = min(k, looked_up) if looked_up >= 0 else _run(one.right, position, k)
            steps += 1
            accepted += run
            position += run + 1
    return accepted / steps


def _run(right: Sequence[bool], position: int, k: int) -> int:
    count = 0
    while count < k and position + count < len(right) and right[position + count]:
        count += 1
    return count
