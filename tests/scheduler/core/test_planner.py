"""What a step contains: budget, reservation, shortage, suspects."""

from __future__ import annotations

import pytest

from scheduler.core.config import SpeculationMode
from scheduler.core.scheduler import Scheduler
from scheduler.core.sequence import State
from scheduler.core.step import Step
from tests.scheduler.core.builders import answer, request_spec, scheduler_of, step_once, worker_spec

FIXED = SpeculationMode.FIXED


def plan(scheduler: Scheduler) -> Step:
    scheduler.place("m")
    step = scheduler.plan("w0")
    assert step is not None
    scheduler.check_integrity()
    return step


def shape(step: Step) -> list[tuple[object, int, int, int]]:
    """(key, prefill, k, new blocks) of each row."""
    rows = zip(step.sequences, step.num_prefill, step.num_draft, step.new_blocks, strict=True)
    return [(one.request.spec.key, prefill, k, len(blocks)) for one, prefill, k, blocks in rows]


def apply(scheduler: Scheduler, step: Step, tokens: int | None = None) -> None:
    scheduler.apply("w0", answer(step, tokens))
    scheduler.check_integrity()


def test_nothing_to_do_is_no_step() -> None:
    assert scheduler_of().plan("w0") is None


def test_a_prompt_is_prefilled_in_chunks_and_only_the_last_samples() -> None:
    scheduler = scheduler_of(token_budget=5)
    scheduler.submit(request_spec("a", 12, max_tokens=4), 0.0)
    first, second = plan(scheduler), plan(scheduler)
    assert [shape(first), shape(second)] == [[("a", 5, 0, 0)], [("a", 5, 0, 0)]]
    assert first.reserved == second.reserved == [0]
    apply(scheduler, first)
    third = plan(scheduler)
    assert shape(third) == [("a", 2, 0, 0)]
    assert third.reserved == [1]


def test_decode_rows_come_first_and_prefill_gets_what_is_left() -> None:
    scheduler = scheduler_of(token_budget=6)
    scheduler.submit(request_spec("a", 4, max_tokens=8), 0.0)
    step_once(scheduler)
    scheduler.submit(request_spec("b", 10, max_tokens=8), 0.0)
    assert shape(plan(scheduler)) == [("a", 0, 0, 0), ("b", 5, 0, 0)]


def test_no_step_beyond_the_depth() -> None:
    scheduler = scheduler_of()
    scheduler.submit(request_spec("a", 4, max_tokens=8), 0.0)
    plan(scheduler)
    plan(scheduler)
    assert scheduler.plan("w0") is None


def test_a_row_is_not_issued_beyond_the_end_of_its_sequence() -> None:
    scheduler = scheduler_of()
    scheduler.submit(request_spec("a", 4, max_tokens=2), 0.0)
    plan(scheduler)
    plan(scheduler)
    assert scheduler.workers["w0"].running[0].sampling_in_flight == 2
    assert scheduler.plan("w0") is None


def test_running_ahead_reserves_for_the_worst_case() -> None:
    """Prompt 6 and k = 4: known 7, then 7 + 5 in flight, then 12 + 5, in blocks of 4."""
    scheduler = scheduler_of(worker_spec(num_blocks=16), speculation=FIXED, max_draft_tokens=4)
    scheduler.workers["w0"].drafting = True
    scheduler.submit(request_spec("a", 6, max_tokens=50), 0.0)
    step_once(scheduler)
    sequence = scheduler.workers["w0"].running[0]
    first = plan(scheduler)
    assert (shape(first), sequence.horizon, sequence.capacity) == ([("a", 0, 4, 1)], 12, 12)
    second = plan(scheduler)
    assert (shape(second), sequence.horizon, sequence.capacity) == ([("a", 0, 4, 2)], 17, 20)
    apply(scheduler, first, tokens=2)
    assert sequence.horizon == 14
    assert shape(plan(scheduler)) == [("a", 0, 4, 0)]


def test_blocks_are_never_reserved_past_the_limit() -> None:
    scheduler = scheduler_of(speculation=FIXED, max_draft_tokens=4)
    scheduler.workers["w0"].drafting = True
    scheduler.submit(request_spec("a", 6, max_tokens=2), 0.0)
    step_once(scheduler)
    plan(scheduler)
    assert scheduler.workers["w0"].running[0].capacity == 8


@pytest.mark.parametrize(("rows", "budget", "k"), [(1, 64, 4), (2, 6, 2), (2, 4, 1), (3, 4, 0)])
def test_drafts_shrink_as_rows_share_the_step(rows: int, budget: int, k: int) -> None:
    scheduler = scheduler_of(speculation=FIXED, max_draft_tokens=4, draft_token_budget=budget)
    scheduler.workers["w0"].drafting = True
    for key in range(rows):
        scheduler.submit(request_spec(key, 3, max_tokens=9), 0.0)
    step_once(scheduler)
    assert plan(scheduler).num_draft == [k] * rows


def test_a_request_may_forbid_or_bound_drafts() -> None:
    scheduler = scheduler_of(speculation=FIXED, max_draft_tokens=4)
    scheduler.workers["w0"].drafting = True
    for key, most in (("plain", 0), ("short", 2), ("any", None)):
        scheduler.submit(request_spec(key, 3, max_tokens=20, max_draft_tokens=most), 0.0)
    step_once(scheduler)
    assert [(key, k) for key, _, k, _ in shape(plan(scheduler))] == [("plain", 0), ("short", 2), ("any", 4)]


def test_the_token_budget_bounds_drafts_too() -> None:
    scheduler = scheduler_of(speculation=FIXED, max_draft_tokens=4, token_budget=7)
    scheduler.workers["w0"].drafting = True
    for key in range(3):
        scheduler.submit(request_spec(key, 2, max_tokens=20), 0.0)
    step_once(scheduler)
    step = plan(scheduler)
    assert step.num_draft == [4, 1]
    assert step.num_tokens == 7


def all_taken(scheduler: Scheduler) -> None:
    """Somebody else holds every block that is left."""
    pool = scheduler.workers["w0"].pool
    pool.allocate(pool.num_available)


def test_when_short_drafts_go_first_then_running_ahead_then_the_sequence() -> None:
    """Prompt 6 in 2 blocks of 4: known 7, then 8 fit, and there is no third block."""
    scheduler = scheduler_of(speculation=FIXED, max_draft_tokens=4)
    scheduler.workers["w0"].drafting = True
    scheduler.submit(request_spec("a", 6, max_tokens=20), 0.0)
    step_once(scheduler)
    all_taken(scheduler)
    plain = scheduler.plan("w0")
    assert plain is not None
    assert shape(plain) == [("a", 0, 0, 0)]
    assert scheduler.plan("w0") is None
    assert scheduler.counters.preemptions == 0
    scheduler.apply("w0", answer(plain))
    release = scheduler.plan("w0")
    assert release is not None
    assert (release.sequences, release.released_slots) == ([], [0])
    assert scheduler.counters.preemptions == 1
    assert scheduler.num_waiting == 1


def test_preemption_takes_the_lowest_priority_and_newest() -> None:
    scheduler = scheduler_of(worker_spec(num_blocks=9, block_size=4), watermark=0.0)
    for key, priority in (("old", 0), ("new", 0), ("low", -1)):
        scheduler.submit(request_spec(key, 6, max_tokens=20, priority=priority), 0.0)
    preempted: list[object] = []
    while len(preempted) < 2:
        before = set(scheduler.workers["w0"].running)
        scheduler.place("m")
        before |= set(scheduler.workers["w0"].running)
        step = scheduler.plan("w0")
        if step is not None:
            apply(scheduler, step)
        gone = before - set(scheduler.workers["w0"].running)
        preempted += [one.request.spec.key for one in gone]
    assert preempted[0] == "low"
    assert "old" not in preempted


def test_a_victim_that_was_issued_gives_its_blocks_back_with_its_result() -> None:
    scheduler = scheduler_of()
    scheduler.submit(request_spec("a", 6, max_tokens=20), 0.0)
    scheduler.submit(request_spec("b", 4, max_tokens=20), 0.0)
    step_once(scheduler)  # a: 7 known, b: 5 known, 2 blocks of 4 each
    all_taken(scheduler)
    both, ahead = scheduler.plan("w0"), scheduler.plan("w0")
    assert both is not None
    assert ahead is not None
    assert [shape(both), shape(ahead)] == [[("a", 0, 0, 0), ("b", 0, 0, 0)], [("b", 0, 0, 0)]]
    scheduler.apply("w0", answer(both))
    victim = scheduler.workers["w0"].running[-1]
    assert scheduler.plan("w0") is None
    assert (victim.state, len(victim.blocks), victim.num_output) == (State.LEAVING, 2, 2)
    scheduler.apply("w0", answer(ahead))
    assert (victim.state, victim.blocks, victim.num_output) == (State.WAITING, [], 3)
    step = scheduler.plan("w0")
    assert step is not None
    assert (shape(step), step.released_slots) == ([("a", 0, 0, 1)], [1])


def test_releases_alone_are_a_step_only_when_nothing_is_in_flight() -> None:
    scheduler = scheduler_of()
    scheduler.submit(request_spec("a", 4, max_tokens=8), 0.0)
    first = plan(scheduler)
    scheduler.cancel("a")
    assert scheduler.plan("w0") is None
    apply(scheduler, first, tokens=0)
    release = scheduler.plan("w0")
    assert release is not None
    assert (release.released_slots, release.sequences, release.number) == ([0], [], 2)
    apply(scheduler, release)
    assert scheduler.plan("w0") is None


def test_a_suspect_has_its_steps_to_itself_until_its_next_token() -> None:
    scheduler = scheduler_of(token_budget=8)
    scheduler.submit(request_spec("a", 3, max_tokens=9), 0.0)
    step_once(scheduler)
    in_flight = plan(scheduler)
    scheduler.submit(request_spec("s", 12, max_tokens=9, crashes=2), 0.0)
    scheduler.place("m")
    assert scheduler.plan("w0") is None, "the suspect waits for what is in flight"
    apply(scheduler, in_flight)
    chunk = plan(scheduler)
    assert shape(chunk) == [("s", 8, 0, 0)]
    assert scheduler.plan("w0") is None
    apply(scheduler, chunk)
    last = plan(scheduler)
    assert shape(last) == [("s", 4, 0, 0)]
    apply(scheduler, last)
    assert [key for key, *_ in shape(plan(scheduler))] == ["a", "s"]
