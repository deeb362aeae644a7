"""Requests from submit to end, and workers that come and go."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.core.config import CoreConfig
from scheduler.core.scheduler import Scheduler
from scheduler.core.step import Refusal, RefusalKind
from tests.scheduler.core.builders import answer, choices, request_spec, scheduler_of, step_once, worker_spec


def refused(scheduler: Scheduler, *arguments: object, **fields: object) -> Refusal:
    before = len(scheduler.requests)
    with pytest.raises(Refusal) as caught:
        scheduler.submit(request_spec(*arguments, **fields), 0.0)  # type: ignore[arg-type]
    scheduler.check_integrity()
    assert len(scheduler.requests) == before
    return caught.value


@pytest.mark.parametrize(
    "field", ["token_budget", "depth", "max_waiting", "draft_token_budget", "max_draft_tokens", "watermark"]
)
def test_a_configuration_that_cannot_work_is_refused_by_name(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        Scheduler(replace(CoreConfig(), **{field: -1}))  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------- submit


def test_case_20_a_prompt_over_the_context_is_refused_and_the_next_is_served() -> None:
    scheduler = scheduler_of(worker_spec(max_model_len=64, num_blocks=64))
    refusal = refused(scheduler, "long", 65)
    assert (refusal.kind, refusal.field_name) == (RefusalKind.INVALID, "prompt")
    scheduler.submit(request_spec("hi", 1, max_tokens=4), 0.0)
    assert step_once(scheduler).sequences[0].request.spec.key == "hi"


def test_case_52_a_prompt_that_the_pool_never_holds_is_refused_and_the_next_is_served() -> None:
    scheduler = scheduler_of(worker_spec(num_blocks=8, block_size=16, max_model_len=512))
    assert refused(scheduler, "big", 200).field_name == "prompt"
    scheduler.submit(request_spec("hi", 1, max_tokens=4), 0.0)
    assert step_once(scheduler).sequences[0].request.spec.key == "hi"


def test_what_cannot_fit_is_found_out_when_the_first_worker_comes() -> None:
    scheduler = Scheduler(CoreConfig())
    scheduler.submit(request_spec("big", 200), 0.0)
    scheduler.submit(request_spec("hi", 1, max_tokens=4), 0.0)
    scheduler.attach("w0", worker_spec(), 0.0)
    (failure,) = scheduler.place("m")
    assert (failure.request.spec.key, failure.refusal.kind) == ("big", RefusalKind.INVALID)
    assert scheduler.num_running == 1


def test_case_63_the_queue_is_bounded_and_says_so_at_once() -> None:
    scheduler = Scheduler(CoreConfig(max_waiting=4))
    kinds = []
    for key in range(20):
        try:
            scheduler.submit(request_spec(key), 0.0)
        except Refusal as refusal:
            kinds.append(refusal.kind)
    assert kinds == [RefusalKind.QUEUE_FULL] * 16
    assert scheduler.num_waiting == 4


def test_held_choices_count_for_the_bound() -> None:
    scheduler = Scheduler(CoreConfig(max_waiting=4))
    scheduler.submit(request_spec("a", choices=choices(0, 0, 0)), 0.0)
    assert refused(scheduler, "b", choices=choices(0, 0)).kind is RefusalKind.QUEUE_FULL
    scheduler.submit(request_spec("c"), 0.0)
    scheduler.cancel("a")
    scheduler.submit(request_spec("b", choices=choices(0, 0, 0)), 0.0)


@pytest.mark.parametrize("fields", [{"resumed": True}, {"choices": choices(2)}, {"crashes": 1}])
def test_what_was_taken_in_before_is_refused_neither_for_the_queue_nor_for_small_workers(
    fields: dict[str, object],
) -> None:
    scheduler = scheduler_of(worker_spec(num_blocks=1), max_waiting=1)
    scheduler.submit(request_spec("a", 2, max_tokens=1), 0.0)
    scheduler.submit(request_spec("b", 40, max_tokens=9, **fields), 0.0)
    assert scheduler.place("m") == []
    assert scheduler.num_running == scheduler.num_waiting == 1


def test_a_live_key_is_not_taken_again_and_a_dead_one_may_be() -> None:
    scheduler = scheduler_of()
    scheduler.submit(request_spec("a", max_tokens=8), 0.0)
    scheduler.place("m")
    step = scheduler.plan("w0")
    with pytest.raises(ValueError, match="'a'"):
        scheduler.submit(request_spec("a"), 0.0)
    scheduler.cancel("a")
    scheduler.submit(request_spec("a", max_tokens=8), 0.0)
    assert step is not None
    scheduler.apply("w0", answer(step))
    assert set(scheduler.requests) == {"a"}
    scheduler.check_integrity()


def test_an_unset_max_tokens_is_clamped_to_what_every_worker_could_take_over() -> None:
    scheduler = scheduler_of(worker_spec(num_blocks=16), worker_spec(num_blocks=8))
    scheduler.submit(request_spec("a", 8), 0.0)
    scheduler.place("m")
    assert scheduler.requests["a"].sequences[0].limit == 32


def test_a_resumed_choice_that_fills_every_context_waits_instead_of_breaking_the_queue() -> None:
    scheduler = scheduler_of(worker_spec(num_blocks=4))
    scheduler.submit(request_spec("a", 10, choices=choices(6)), 0.0)
    scheduler.submit(request_spec("b", 2, max_tokens=2), 0.0)
    assert scheduler.place("m") == []
    assert [one.request.spec.key for one in scheduler.workers["w0"].running] == ["b"]


def test_case_22_requests_without_max_tokens_run_together() -> None:
    scheduler = scheduler_of(worker_spec(num_blocks=32, max_sequences=8, max_model_len=128))
    for key in range(8):
        scheduler.submit(request_spec(key, 5), 0.0)
    assert len(step_once(scheduler).sequences) == 8
    assert scheduler.workers["w0"].pool.num_referenced == 16


# ----------------------------------------------------------------------------------------------------- who may wait


def test_who_fits_no_worker_blocks_nobody_and_waits_its_time() -> None:
    """The large worker dies; what needs it waits for it, while the small one serves the rest."""
    scheduler = scheduler_of(worker_spec(num_blocks=8), worker_spec(num_blocks=16))
    scheduler.submit(request_spec("large", 40, max_tokens=9), 0.0)
    scheduler.place("m")
    assert scheduler.detach("w1", 10.0, crashed=False) == []
    scheduler.submit(request_spec("small", 4, max_tokens=4), 10.0)
    assert scheduler.place("m") == []
    assert [one.request.spec.key for one in scheduler.workers["w0"].running] == ["small"]
    assert scheduler.expire(10.0) == scheduler.expire(69.0) == []
    (failure,) = scheduler.expire(70.0)
    assert (failure.request.spec.key, failure.refusal.kind) == ("large", RefusalKind.NO_WORKER)


def test_who_waits_for_the_large_worker_leaves_the_small_one_to_others() -> None:
    scheduler = scheduler_of(worker_spec(num_blocks=4), worker_spec(num_blocks=16, max_sequences=1))
    scheduler.submit(request_spec("first", 40, max_tokens=9), 0.0)
    scheduler.submit(request_spec("second", 40, max_tokens=9), 0.0)
    scheduler.submit(request_spec("third", 4, max_tokens=4), 0.0)
    scheduler.place("m")
    assert [one.request.spec.key for one in scheduler.workers["w0"].running] == ["third"]
    assert [one.request.spec.key for one in scheduler.workers["w1"].running] == ["first"]


def test_smaller_ones_do_not_overtake_the_head_on_the_worker_it_waits_for() -> None:
    scheduler = scheduler_of(worker_spec(num_blocks=16))
    scheduler.submit(request_spec("running", 30, max_tokens=9), 0.0)
    step_once(scheduler)
    scheduler.submit(request_spec("large", 40, max_tokens=9), 0.0)
    scheduler.submit(request_spec("small", 2, max_tokens=2), 0.0)
    scheduler.place("m")
    assert [one.request.spec.key for one in scheduler.workers["w0"].running] == ["running"]


def test_the_time_to_wait_begins_anew_when_there_was_a_worker_meanwhile() -> None:
    scheduler = Scheduler(CoreConfig())
    scheduler.submit(request_spec("a", max_tokens=4), 0.0)
    scheduler.expire(0.0)
    scheduler.expire(50.0)
    scheduler.attach("w0", worker_spec(), 55.0)
    scheduler.expire(58.0)
    scheduler.detach("w0", 59.0, crashed=False)
    assert scheduler.expire(62.0) == scheduler.expire(121.0) == []
    assert len(scheduler.expire(122.0)) == 1


def test_what_ran_long_on_a_draining_worker_has_its_whole_time_to_wait() -> None:
    scheduler = scheduler_of()
    scheduler.submit(request_spec("a", max_tokens=8), 0.0)
    step_once(scheduler)
    scheduler.drain("w0")
    scheduler.detach("w0", 1000.0, crashed=False)
    assert scheduler.expire(1000.0) == []


def test_models_nobody_serves_or_asks_for_are_forgotten() -> None:
    scheduler = scheduler_of(capacity_wait_s=5.0)
    for key in range(50):
        scheduler.submit(request_spec(key, model=f"none{key}"), 0.0)
    scheduler.expire(0.0)
    assert len(scheduler.expire(5.0)) == 50
    scheduler.expire(5.1)
    assert set(scheduler.models) == {"m"}
    assert scheduler.place("none1") == []


def test_many_that_fit_nowhere_cost_nothing_and_come_back_with_the_next_worker() -> None:
    scheduler = scheduler_of(worker_spec(num_blocks=8), worker_spec(num_blocks=16), max_waiting=500)
    for key in range(100):
        scheduler.submit(request_spec(key, 40, max_tokens=9), 0.0)
    scheduler.detach("w1", 0.0, crashed=False)
    scheduler.place("m")
    pool = scheduler.models["m"]
    assert (len(pool.queue), len(pool.parked), pool.num_waiting) == (0, 100, 100)
    scheduler.check_integrity()
    scheduler.cancel(5)
    scheduler.attach("w2", worker_spec(num_blocks=16), 0.0)
    scheduler.place("m")
    assert [one.request.spec.key for one in scheduler.workers["w2"].running] == [0]
    assert (len(pool.queue), len(pool.parked)) == (98, 0)
    scheduler.check_integrity()


# ------------------------------------------------------------------------------------------------ cancel, deadlines


def test_case_50_a_deadline_is_kept_while_another_runs_and_nothing_is_prefilled() -> None:
    scheduler = scheduler_of(worker_spec(max_sequences=1))
    scheduler.submit(request_spec("long", 8, max_tokens=40), 0.0)
    step_once(scheduler)
    scheduler.submit(request_spec("late", 8, max_tokens=40, deadline=0.05), 0.0)
    assert scheduler.expire(0.049) == []
    (failure,) = scheduler.expire(0.05)
    assert (failure.request.spec.key, failure.refusal.kind) == ("late", RefusalKind.DEADLINE)
    assert scheduler.counters.prefill_tokens == 8
    assert scheduler.num_waiting == 0


def test_a_deadline_ends_running_and_held_choices_together() -> None:
    scheduler = scheduler_of(token_budget=4)
    scheduler.submit(request_spec("a", 9, max_tokens=4, choices=choices(0, 0, 0), deadline=1.0), 0.0)
    scheduler.place("m")
    step = scheduler.plan("w0")
    assert len(scheduler.expire(1.0)) == 1
    scheduler.check_integrity()
    assert not scheduler.requests
    assert scheduler.models["m"].num_held == 0
    assert step is not None
    scheduler.apply("w0", answer(step))
    assert scheduler.workers["w0"].pool.num_referenced == 0


def test_cancelling_the_first_choice_lets_the_held_ones_start() -> None:
    scheduler = scheduler_of()
    scheduler.submit(request_spec("a", 9, max_tokens=4, choices=choices(0, 0, 0)), 0.0)
    scheduler.cancel("a", 0)
    assert scheduler.num_waiting == 2
    scheduler.check_integrity()


def test_cancelling_a_held_choice_leaves_the_others_held() -> None:
    scheduler = scheduler_of()
    scheduler.submit(request_spec("a", 9, max_tokens=4, choices=choices(0, 0, 0)), 0.0)
    scheduler.cancel("a", 1)
    assert (scheduler.num_waiting, scheduler.models["m"].num_held) == (1, 1)
    step_once(scheduler)
    assert scheduler.num_waiting == 1
    scheduler.check_integrity()


@pytest.mark.parametrize(("key", "choice"), [("none", None), ("none", 0), ("a", 7)])
def test_cancelling_what_is_unknown_is_harmless(key: str, choice: int | None) -> None:
    scheduler = scheduler_of()
    scheduler.submit(request_spec("a"), 0.0)
    scheduler.cancel(key, choice)
    assert scheduler.num_waiting == 1
    assert scheduler.counters.requests_cancelled == 0


def test_a_cancelled_admission_that_was_never_sent_leaves_no_trace() -> None:
    scheduler = scheduler_of()
    scheduler.submit(request_spec("a"), 0.0)
    scheduler.place("m")
    scheduler.cancel("a")
    assert scheduler.plan("w0") is None
    assert scheduler.workers["w0"].pool.num_free == 16
    scheduler.check_integrity()


def test_case_47_blocks_of_a_cancelled_request_on_a_lost_worker_are_gone_with_it() -> None:
    scheduler = scheduler_of()
    scheduler.submit(request_spec("a", max_tokens=4), 0.0)
    scheduler.place("m")
    scheduler.plan("w0")
    scheduler.cancel("a")
    assert scheduler.detach("w0", 1.0, crashed=True) == []
    scheduler.attach("w0", worker_spec(), 2.0)
    assert scheduler.workers["w0"].pool.num_free == 16
    scheduler.check_integrity()
