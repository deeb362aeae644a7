"""The tail table: what is told, which tails are used, and that everything is bounded."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from tandem.v1 import types_pb2

from cluster.draft_news import Close, Commit, Source, Tail
from draft_worker.convert import news_from_proto
from engine.prefix_hash import prefix_hash
from worker.convert import news_to_proto
from worker.followed import MAX_TAILS
from worker.sequences import Sequence
from worker.steps import SamplingParams
from worker.tails import MAX_IDLE_ROWS, MAX_OPENS_PER_DRAIN, MAX_PENDING_TOKENS, MAX_TOKENS_BEHIND, TailTable

PROMPT = [10, 11, 12, 13]


def sequence(slot: int = 0, tokens: list[int] | None = None) -> Sequence:
    return Sequence(
        slot=slot,
        sequence_id=1,
        tokens=list(tokens or PROMPT),
        num_prompt=4,
        computed=0,
        params=SamplingParams(temperature=0.5),
        choice_seed=77,
        cache_salt="",
    )


def tail_of(known: list[int], guess: list[int], generation: int = 1, **changes: Any) -> Tail:
    values = {"slot": 0, "generation": generation, "base": len(known), "prefix_hash": prefix_hash(known)}
    return Tail(**{**values, "token_ids": guess, **changes})


@pytest.fixture
def table() -> TailTable:
    made = TailTable()
    made.link()
    return made


def opened(table: TailTable) -> Sequence:
    followed = sequence()
    table.follow(followed, 4)
    table.drain()
    return followed


def test_who_is_to_guess_reaches_the_draft_worker(table: TailTable) -> None:
    for slot, mode in enumerate(types_pb2.SpeculationMode.values()):
        admitted = sequence(slot)
        admitted.draft_source = Source(mode)
        table.follow(admitted, 4)
    message = news_to_proto(table.drain())
    assert [opening.source for opening in news_from_proto(message).opens] == [
        Source.ANY,  # unspecified
        Source.ANY,  # off: never opened, as its budget is 0
        Source.ANY,
        Source.NGRAM,
        Source.MODEL,
        Source.COMBINED,
    ]


def test_a_salt_names_a_tenant_and_goes_nowhere_itself(table: TailTable) -> None:
    for slot, salt in enumerate(("", "secret", "secret", "other")):
        admitted = sequence(slot)
        admitted.cache_salt = salt
        table.follow(admitted, 4)
    message = news_to_proto(table.drain())
    nameless, first, same, other = (opening.tenant for opening in news_from_proto(message).opens)
    assert nameless == b""
    assert first == same != other != b""
    assert b"secret" not in message.SerializeToString()


def test_opening_then_commits(table: TailTable) -> None:
    followed = sequence()
    table.follow(followed, 4)
    followed.tokens += [20]
    table.follow(followed, 4)  # before anything was sent: the opening carries it
    [opening] = table.drain().opens
    assert (opening.token_ids, opening.num_prompt_tokens, opening.generation) == ([*PROMPT, 20], 4, 1)
    assert (opening.seed, opening.temperature, opening.max_draft_tokens) == (77, 0.5, 4)
    assert not table.drain()
    followed.tokens += [21, 22]
    table.follow(followed, 4)
    followed.tokens += [23]
    table.follow(followed, 4)  # pending commits concatenate
    out = table.drain()
    assert out.opens == []
    assert out.commits == [Commit(0, 1, 5, [21, 22, 23], prefix_hash(followed.tokens))]
    table.follow(followed, 4)
    assert not table.drain()


def test_nothing_is_told_without_a_link_or_a_budget() -> None:
    table = TailTable()
    table.follow(sequence(), 4)
    assert not table.drain()
    table.link()
    table.follow(sequence(), 0)
    assert not table.drain()


def test_a_usable_tail_shrinks_as_its_tokens_come_true(table: TailTable) -> None:
    followed = opened(table)
    assert table.tail(0, followed.tokens, 4) == []
    assert table.receive([tail_of(PROMPT, [20, 21, 22, 23, 24])]) == 1
    assert table.tail(0, followed.tokens, 3) == [20, 21, 22]
    assert table.tail(0, [*PROMPT, 20, 21], 8) == [22, 23, 24]
    assert table.tail(0, [*PROMPT, 20, 21, 22, 23, 24], 8) == []
    assert table.tail(0, [*PROMPT, 20, 99], 8) == []
    assert table.tail(1, followed.tokens, 8) == []


def test_a_late_tail_is_used_from_where_the_sequence_is_now(table: TailTable) -> None:
    followed = opened(table)
    followed.tokens += [20, 21]
    table.follow(followed, 4)
    assert table.receive([tail_of(PROMPT, [20, 21, 22])]) == 1
    assert table.tail(0, followed.tokens, 4) == [22]


@pytest.mark.parametrize(
    "changes",
    [{"generation": 2}, {"prefix_hash": 5}, {"base": 5}, {"base": 3}, {"slot": 3}, {"base": 2**32 - 1}],
)
def test_what_is_not_ours_is_dropped(table: TailTable, changes: dict[str, int]) -> None:
    followed = opened(table)
    assert table.receive([tail_of(PROMPT, [20], **changes)]) == 0
    assert table.tail(0, followed.tokens, 4) == []


def test_a_released_and_reused_slot_never_sees_the_old_tail(table: TailTable) -> None:
    opened(table)
    table.receive([tail_of(PROMPT, [20])])
    table.forget(0)
    assert table.tail(0, PROMPT, 4) == []
    assert table.drain().closes == [Close(0, 1)]
    table.follow(sequence(), 4)
    [opening] = table.drain().opens
    assert opening.generation == 2
    assert table.receive([tail_of(PROMPT, [20], generation=1)]) == 0
    assert table.receive([tail_of(PROMPT, [20], generation=2)]) == 1


def test_a_slot_closed_before_its_opening_was_sent_leaves_no_trace(table: TailTable) -> None:
    table.follow(sequence(), 4)
    table.forget(0)
    table.forget(0)
    assert not table.drain()


def test_reopening_replaces_without_a_close(table: TailTable) -> None:
    opened(table)
    table.forget(0)
    table.follow(sequence(), 4)
    out = table.drain()
    assert (out.closes, [opening.generation for opening in out.opens]) == ([], [2])


def test_a_larger_budget_opens_anew(table: TailTable) -> None:
    followed = opened(table)
    table.follow(followed, 8)
    [opening] = table.drain().opens
    assert (opening.max_draft_tokens, opening.generation) == (8, 2)
    table.follow(followed, 2)
    assert not table.drain()


def test_slots_open_for_the_longest_draft_and_a_rising_budget_opens_none_anew(table: TailTable) -> None:
    table.longest_draft = 6
    followed = sequence()
    table.follow(followed, 1)
    [opening] = table.drain().opens
    assert opening.max_draft_tokens == 6
    for budget in (2, 0, 6):
        table.follow(followed, budget)
        assert not table.drain()


def test_overflow_closes_and_the_next_row_opens_anew(table: TailTable) -> None:
    followed = opened(table)
    table.receive([tail_of(PROMPT, [1])])
    followed.tokens += list(range(MAX_PENDING_TOKENS + 1))
    table.follow(followed, 4)
    table.follow(followed, 4)
    [opening] = table.drain().opens
    assert opening.token_ids == followed.tokens


def test_a_slot_without_fresh_tails_opens_anew(table: TailTable) -> None:
    followed = opened(table)
    openings = 0
    for token in range(MAX_TOKENS_BEHIND + 2):
        followed.tokens.append(token)
        table.follow(followed, 4)
        openings += len(table.drain().opens)
    assert openings == 1
    heard = opened(table)
    for token in range(MAX_TOKENS_BEHIND * 2):
        heard.tokens.append(token)
        table.follow(heard, 4)
        assert not table.drain().opens
        table.receive([tail_of(heard.tokens, [], generation=table._followed[0].generation)])


def test_openings_per_drain_are_bounded(table: TailTable) -> None:
    for slot in range(3 * MAX_OPENS_PER_DRAIN):
        table.follow(sequence(slot), 4)
    assert len(table.drain().opens) == MAX_OPENS_PER_DRAIN
    for slot in range(3 * MAX_OPENS_PER_DRAIN):
        table.follow(sequence(slot), 4)
    assert [opening.slot for opening in table.drain().opens] == list(
        range(MAX_OPENS_PER_DRAIN, 2 * MAX_OPENS_PER_DRAIN)
    )


def test_a_slot_that_gets_no_budget_for_long_is_closed(table: TailTable) -> None:
    followed = opened(table)
    for _ in range(MAX_IDLE_ROWS):
        table.follow(followed, 0)
    assert not table.drain()
    table.follow(followed, 0)
    assert table.drain().closes == [Close(0, 1)]


def test_rows_that_may_not_draft_tell_nothing_beyond_the_first_and_one_commit_tells_all(table: TailTable) -> None:
    followed = opened(table)
    table.receive([tail_of(PROMPT, [20, 21, 22, 23, 24, 25])])
    told = []
    for token in (20, 21, 22, 23):
        followed.tokens.append(token)
        table.follow(followed, 0)
        told += [commit.token_ids for commit in table.drain().commits]
    assert told == [[20]]
    followed.tokens.append(24)
    table.follow(followed, 4)
    [commit] = table.drain().commits
    assert (commit.base, commit.token_ids) == (len(PROMPT) + 1, [21, 22, 23, 24])
    # The old tail agrees, but has been there for more steps than a dead draft worker's may serve.
    assert table.tail(0, followed.tokens, 4) == []
    assert table.receive([tail_of(followed.tokens, [30])]) == 1
    assert table.tail(0, followed.tokens, 4) == [30]


def test_a_lost_link_forgets_everything_but_generations(table: TailTable) -> None:
    followed = opened(table)
    table.receive([tail_of(PROMPT, [20])])
    table.unlink()
    assert table.tail(0, followed.tokens, 4) == []
    table.follow(followed, 4)
    assert not table.drain()
    table.link()
    table.follow(followed, 4)
    assert [opening.generation for opening in table.drain().opens] == [2]


def test_hashes_of_long_outputs_stay_bounded_and_right(table: TailTable) -> None:
    followed = opened(table)
    for token in range(1000):
        followed.tokens.append(token)
        table.follow(followed, 4)
        table.drain()
        assert table.receive([tail_of(followed.tokens, [5], generation=table._followed[0].generation)]) == 1
    assert len(table._followed[0].hashes) <= 256
    assert table.tail(0, followed.tokens, 4) == [5]


# ------------------------------------------------------------------------------------------------- several tails


def commit_of(table: TailTable, followed: Sequence, *token_ids: int) -> None:
    followed.tokens += token_ids
    table.follow(followed, 4)
    table.drain()


def test_a_branch_serves_where_the_likeliest_tail_was_wrong(table: TailTable) -> None:
    followed = opened(table)
    table.receive([tail_of(PROMPT, [1, 2, 3, 4, 5]), tail_of(PROMPT, [1, 9, 8, 7])])
    assert table.tail(0, followed.tokens, 4) == [1, 2, 3, 4]
    # Both agree with one token more: the first that came is the likelier one.
    assert table.tail(0, [*PROMPT, 1], 2) == [2, 3]
    table.receive([tail_of(PROMPT, [1, 2, 3, 4, 5]), tail_of(PROMPT, [1, 9, 8, 7])])
    commit_of(table, followed, 1, 9)
    table.receive([tail_of(followed.tokens[:-1], [77])])
    assert table.tail(0, followed.tokens, 4) == [8, 7]
    commit_of(table, followed, 8, 6)
    assert table.tail(0, followed.tokens, 4) == []


def test_a_newer_tail_counts_unless_an_older_one_reaches_further(table: TailTable) -> None:
    followed = opened(table)
    table.receive([tail_of(PROMPT, [1, 2, 3, 4, 5, 6])])
    commit_of(table, followed, 1)
    table.receive([tail_of(followed.tokens, [2, 8, 8])])
    assert table.tail(0, followed.tokens, 3) == [2, 8, 8]
    assert table.tail(0, followed.tokens, 5) == [2, 3, 4, 5, 6]


def test_tails_of_a_slot_are_bounded_and_longer_ones_replace_shorter(table: TailTable) -> None:
    followed = opened(table)
    for length in range(1, 6):
        table.receive([tail_of(PROMPT, list(range(length)))])
    kept = table._followed[0].tails
    assert [len(tail.token_ids) for tail in kept] == [5]
    table.receive([tail_of(PROMPT, [100 + index]) for index in range(50)])
    assert len(table._followed[0].tails) == MAX_TAILS
    assert table.tail(0, followed.tokens, 4) == [150 - MAX_TAILS]


def test_what_a_silent_draft_worker_once_guessed_serves_two_steps_at_most(table: TailTable) -> None:
    followed = opened(table)
    table.receive([tail_of(PROMPT, list(range(20)))])
    used = []
    for token_id in range(5):
        commit_of(table, followed, token_id)
        used.append(bool(table.tail(0, followed.tokens, 1)))
    assert used == [True, False, False, False, False]
    # A word, and that is believed.
    table.receive([tail_of(followed.tokens, [5, 6])])
    assert table.tail(0, followed.tokens, 4) == [5, 6]


def test_what_nobody_has_waited_for_tells_nothing() -> None:
    """The draft worker may have had no core while the target ran, whether or not its tail came in the end."""
    table = TailTable(clock=lambda: 10.0)
    table.link()
    followed = opened(table)
    table.receive([tail_of(PROMPT, [1])])
    commit_of(table, followed, 1)
    assert table.missing_since_s(0, followed.tokens) == 10.0
    table.receive([tail_of(followed.tokens, [2])])
    commit_of(table, followed, 3)
    assert not table.latencies
    table.begin_wait(0)
    table.begin_wait(7)
    commit_of(table, followed, 2)
    assert list(table.latencies) == [inf]
    commit_of(table, followed, 2)
    assert list(table.latencies) == [inf]


def test_nobody_waits_for_what_is_not_owed() -> None:
    """An empty tail says that none comes."""
    table = TailTable(clock=lambda: 10.0)
    table.link()
    followed = opened(table)
    table.begin_wait(0)
    table.receive([tail_of(PROMPT, [1])])
    assert not table.latencies, "the opening had to be read first, which takes as long as it is"
    commit_of(table, followed, 2)
    assert table.missing_since_s(0, followed.tokens) == 10.0
    table.begin_wait(0)
    table.receive([tail_of(followed.tokens, [])])
    assert table.missing_since_s(0, followed.tokens) is None, "declined"
    commit_of(table, followed, 3)
    assert not table.latencies, "an answer, if not one that a latency can be read off"
    assert table.missing_since_s(0, followed.tokens) == 10.0


def test_how_long_late_tails_take_is_known() -> None:
    now = [10.0]
    table = TailTable(clock=lambda: now[0])
    table.link()
    followed = opened(table)
    table.receive([tail_of(PROMPT, [1])])
    commit_of(table, followed, 1)
    assert table.missing_since_s(0, followed.tokens) == 10.0
    table.begin_wait(0)
    now[0] = 10.5
    table.receive([tail_of(followed.tokens, [1])])
    table.receive([tail_of(followed.tokens, [1, 2])])
    assert list(table.latencies) == [0.5]
    # There in time: nothing is measured.
    commit_of(table, followed, 1)
    table.receive([tail_of(followed.tokens, [2])])
    assert table.missing_since_s(0, followed.tokens) is None
    # Never: it counts as longer than any.
    commit_of(table, followed, 3)
    assert table.missing_since_s(0, followed.tokens) == 10.5
    table.begin_wait(0)
    commit_of(table, followed, 4)
    assert list(table.latencies) == [0.5, inf]
    # Nobody waits for a slot that isn't open, or for a draft worker that is silent.
    assert table.missing_since_s(0, followed.tokens) is None
    assert table.missing_since_s(7, followed.tokens) is None
