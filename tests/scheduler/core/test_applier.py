"""Results: matched with their own plan, refused when they can't be of it, and what they change."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.core.config import CoreConfig, SpeculationMode
from scheduler.core.scheduler import Scheduler
from scheduler.core.sequence import State
from scheduler.core.step import Failure, Finish, ProtocolViolation, RefusalKind, Step, StepOutcome, Update
from tests.scheduler.core.builders import answer, choices, request_spec, scheduler_of, step_once


def ready(*keys: str, prompt: int = 4, **fields: Any) -> tuple[Scheduler, Step]:
    """A scheduler whose first step, the whole prefill of each request, is issued."""
    scheduler = scheduler_of(speculation=SpeculationMode.FIXED)
    for key in keys:
        scheduler.submit(request_spec(key, prompt, max_tokens=fields.get("max_tokens", 8)), 0.0)
    scheduler.place("m")
    step = scheduler.plan("w0")
    assert step is not None
    return scheduler, step


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (StepOutcome(2, [1, 1], [5, 6], [0, 0]), "1 was next"),
        (StepOutcome(0, [1, 1], [5, 6], [0, 0]), "1 was next"),
        (StepOutcome(1, [1], [5], [0]), "other rows"),
        (StepOutcome(1, [1, 1], [5, 6], [0]), "other rows"),
        (StepOutcome(1, [1, 1], [5], [0, 0]), "add up"),
        (StepOutcome(1, [2, 1], [5, 6, 7], [0, 0]), "reserved"),
        (StepOutcome(1, [-1, 1], [], [0, 0]), "reserved"),
        (StepOutcome(1, [0, 1], [5], [0, 0]), "no token where one was due"),
        (StepOutcome(1, [0, 1], [5], [Finish.STOP, 0]), "stopped by a token"),
        (StepOutcome(1, [1, 1], [5, 6], [77, 0]), "unknown reason"),
        (StepOutcome(1, [1, 1], [5, 6], [0, 0], num_drafted=[1], num_accepted=[1]), "drafts"),
        (StepOutcome(1, [1, 1], [5, 6], [0, 0], num_drafted=[1, 1]), "drafts"),
    ],
)
def test_a_result_that_cannot_be_of_the_step_changes_nothing(outcome: StepOutcome, message: str) -> None:
    scheduler, step = ready("a", "b")
    with pytest.raises(ProtocolViolation, match=message):
        scheduler.apply("w0", outcome)
    scheduler.check_integrity()
    assert len(scheduler.apply("w0", answer(step))) == 2


def test_an_answer_to_nothing_is_refused() -> None:
    scheduler = scheduler_of()
    with pytest.raises(ProtocolViolation, match="none is issued"):
        scheduler.apply("w0", StepOutcome(1, [], [], []))


def test_a_sequence_never_goes_beyond_its_limit() -> None:
    scheduler, step = ready("a", max_tokens=1)
    with pytest.raises(ProtocolViolation, match="limit"):
        scheduler.apply("w0", answer(step))
    (update,) = scheduler.apply("w0", answer(step, finish=[Finish.LENGTH]))
    assert isinstance(update, Update)
    assert update.finish == Finish.LENGTH
    assert not scheduler.requests


def test_news_carry_the_output_index() -> None:
    scheduler, step = ready("a")
    (first,) = scheduler.apply("w0", StepOutcome(1, [1], [7], [0]))
    step = step_once(scheduler)
    assert first == (step.sequences[0], 0, [7], 0, None, 0, ())
    step_once(scheduler)
    sequence = step.sequences[0]
    assert sequence.num_output == 3
    assert sequence.computed == len(sequence.token_ids) - 1


def test_a_resumed_choice_goes_on_where_it_was() -> None:
    scheduler = scheduler_of()
    scheduler.submit(request_spec("a", 4, max_tokens=8, choices=choices(3)), 0.0)
    scheduler.place("m")
    step = scheduler.plan("w0")
    assert step is not None
    assert step.admissions[0].token_ids[4:] == (0, 1, 2)
    assert step.num_prefill == [7]
    (update,) = scheduler.apply("w0", answer(step))
    assert isinstance(update, Update)
    assert update.first_index == 3


def test_a_verified_run_counts_whole_and_rejected_drafts_not_at_all() -> None:
    scheduler, step = ready("a")
    scheduler.workers["w0"].drafting = True
    scheduler.apply("w0", answer(step))
    drafted = scheduler.plan("w0")
    assert drafted is not None
    assert drafted.reserved == [1 + CoreConfig().max_draft_tokens]
    outcome = StepOutcome(2, [3], [11, 12, 13], [0], num_drafted=[4], num_accepted=[2])
    scheduler.apply("w0", outcome)
    scheduler.check_integrity()
    sequence = drafted.sequences[0]
    assert sequence.token_ids[-3:] == [11, 12, 13]
    assert (sequence.computed, sequence.horizon) == (7, 8)
    assert (sequence.drafted, sequence.accepted) == (4, 2)
    assert (scheduler.counters.drafted_tokens, scheduler.counters.accepted_tokens) == (4, 2)


def test_a_row_of_a_sequence_that_ended_in_the_step_before_is_nothing() -> None:
    scheduler, first = ready("a")
    second = scheduler.plan("w0")
    assert second is not None
    scheduler.apply("w0", answer(first, finish=[Finish.STOP]))
    sequence = second.sequences[0]
    assert sequence.state is State.CLOSING
    assert scheduler.workers["w0"].pool.num_referenced > 0, "the second step may still write"
    assert scheduler.apply("w0", StepOutcome(2, [0], [], [0])) == []
    assert sequence.state is State.DONE
    assert scheduler.workers["w0"].pool.num_referenced == 0
    scheduler.check_integrity()


def test_what_a_cancelled_row_emitted_is_ignored() -> None:
    scheduler, step = ready("a", "b")
    scheduler.cancel("a")
    updates = scheduler.apply("w0", answer(step))
    assert [update.sequence.request.spec.key for update in updates if isinstance(update, Update)] == ["b"]
    assert scheduler.counters.generated_tokens == 1
    scheduler.check_integrity()


def test_a_failed_row_ends_its_request_and_touches_no_other() -> None:
    scheduler, _ = ready("a", "b")
    failure, update = scheduler.apply("w0", StepOutcome(1, [0, 1], [9], [0, 0], errors={0: "bad"}))
    assert isinstance(failure, Failure)
    assert (failure.request.spec.key, failure.refusal.kind, failure.refusal.detail) == (
        "a", RefusalKind.WORKER_ERROR, "bad",
    )  # fmt: skip
    assert isinstance(update, Update)
    assert update.token_ids == [9]
    assert set(scheduler.requests) == {"b"}
    scheduler.check_integrity()


def test_a_failed_row_counts_once_even_if_it_claims_to_have_finished() -> None:
    scheduler, _ = ready("a")
    scheduler.apply("w0", StepOutcome(1, [0], [], [Finish.LENGTH], errors={0: "bad"}))
    assert (scheduler.counters.requests_failed, scheduler.counters.requests_finished) == (1, 0)


def test_a_failed_row_ends_all_choices_of_its_request() -> None:
    scheduler = scheduler_of()
    scheduler.submit(request_spec("a", 4, max_tokens=8, choices=choices(0, 0, 0)), 0.0)
    scheduler.place("m")
    step = scheduler.plan("w0")
    assert step is not None
    news = scheduler.apply("w0", StepOutcome(1, [0], [], [0], errors={0: "bad"}))
    assert len(news) == 1
    assert not scheduler.requests
    assert scheduler.num_waiting == 0
    scheduler.check_integrity()


def test_an_end_without_a_token_is_told() -> None:
    """A worker that finds nothing left to emit says so with LENGTH alone."""
    scheduler, _ = ready("a")
    (update,) = scheduler.apply("w0", StepOutcome(1, [0], [], [Finish.LENGTH]))
    assert isinstance(update, Update)
    assert (update.token_ids, update.finish) == ([], Finish.LENGTH)
    assert not scheduler.requests


def test_logprobs_travel_with_their_row() -> None:
    scheduler, step = ready("a", "b")
    updates = scheduler.apply("w0", answer(step, logprobs={1: "p"}))
    assert [update.logprobs for update in updates if isinstance(update, Update)] == [None, "p"]


def test_the_other_choices_start_when_the_prompts_full_blocks_are_known() -> None:
    scheduler = scheduler_of(token_budget=4)
    scheduler.submit(request_spec("a", 10, max_tokens=8, choices=choices(0, 0, 0)), 0.0)
    step_once(scheduler)
    assert scheduler.num_waiting == 0
    step_once(scheduler)  # 8 of 10 tokens: both full blocks
    assert scheduler.num_waiting == 2
    scheduler.place("m")
    assert [one.computed for one in scheduler.workers["w0"].running] == [8, 8, 8]


def test_a_new_token_clears_the_count_of_crashes() -> None:
    scheduler = scheduler_of()
    scheduler.submit(request_spec("a", 4, max_tokens=8, crashes=2), 0.0)
    step = step_once(scheduler)
    assert step.sequences[0].crashes == 0
    assert scheduler.workers["w0"].suspect is None
