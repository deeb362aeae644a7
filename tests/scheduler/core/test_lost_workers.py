"""Workers that die, are cut off or drain, and what becomes of what they ran."""

from __future__ import annotations

import pytest

from scheduler.core.scheduler import Scheduler
from scheduler.core.sequence import State
from scheduler.core.step import Failure, RefusalKind
from tests.scheduler.core.builders import answer, choices, request_spec, scheduler_of, step_once, worker_spec


def crashed(scheduler: Scheduler, times: int = 1) -> list[Failure]:
    """w0 takes what waits, is issued a step and dies; another takes its place."""
    failures: list[Failure] = []
    for _ in range(times):
        assert not failures
        scheduler.place("m")
        assert scheduler.plan("w0") is not None
        news = scheduler.detach("w0", 0.0, crashed=True)
        failures = [item for item in news if isinstance(item, Failure)]
        scheduler.check_integrity()
        scheduler.attach("w0", worker_spec(), 0.0)
    return failures


def test_a_lost_workers_sequences_go_to_the_head_of_the_queue_oldest_first() -> None:
    scheduler = scheduler_of(worker_spec(max_sequences=2))
    for key in ("a", "b", "c"):
        scheduler.submit(request_spec(key, max_tokens=8), 0.0)
    step_once(scheduler)
    scheduler.plan("w0")
    scheduler.detach("w0", 1.0, crashed=False)
    assert [(one.request.spec.key, one.num_output) for one in scheduler.models["m"].waiting] == [
        ("a", 1), ("b", 1), ("c", 0),
    ]  # fmt: skip
    assert [one.crashes for one in scheduler.models["m"].waiting] == [0, 0, 0]


def test_poison_fails_after_its_third_crash_alone() -> None:
    scheduler = scheduler_of()
    scheduler.submit(request_spec("poison", max_tokens=8), 0.0)
    assert crashed(scheduler, 2) == []
    (failure,) = crashed(scheduler)
    assert (failure.request.spec.key, failure.refusal.kind) == ("poison", RefusalKind.POISON)
    assert not scheduler.requests


def test_a_crash_count_travels_with_a_resubmission() -> None:
    scheduler = scheduler_of()
    scheduler.submit(request_spec("poison", max_tokens=8, crashes=2), 0.0)
    assert len(crashed(scheduler)) == 1


def test_a_new_token_between_crashes_acquits() -> None:
    scheduler = scheduler_of()
    scheduler.submit(request_spec("a", max_tokens=30), 0.0)
    for _ in range(6):
        assert crashed(scheduler, 2) == []
        step_once(scheduler)
    assert scheduler.requests["a"].sequences[0].num_output == 6


@pytest.mark.parametrize("how", ["cut", "drain", "replaced"])
def test_only_crashes_count(how: str) -> None:
    scheduler = scheduler_of()
    scheduler.submit(request_spec("a", max_tokens=30), 0.0)
    for _ in range(5):
        scheduler.place("m")
        scheduler.plan("w0")
        if how == "drain":
            scheduler.drain("w0")
        if how != "replaced":
            scheduler.detach("w0", 0.0, crashed=False)
        scheduler.attach("w0", worker_spec(), 0.0)
    assert scheduler.requests["a"].sequences[0].crashes == 0


def test_a_waiting_sequence_is_no_part_of_a_crash() -> None:
    scheduler = scheduler_of(worker_spec(max_sequences=1))
    scheduler.submit(request_spec("a", max_tokens=8), 0.0)
    scheduler.submit(request_spec("b", max_tokens=8), 0.0)
    crashed(scheduler)
    assert [one.crashes for one in scheduler.models["m"].waiting] == [1, 0]


def test_a_poisoned_choice_takes_its_siblings_along() -> None:
    """Choice 0 is a suspect and dies alone while choice 1, on the same worker, is in no step."""
    scheduler = scheduler_of()
    scheduler.submit(request_spec("a", 9, max_tokens=8, choices=choices(0, 0)), 0.0)
    sequences = list(scheduler.requests["a"].sequences.values())
    scheduler.release_held(scheduler.requests["a"])
    scheduler.place("m")
    sequences[0].crashes = 2
    scheduler.workers["w0"].suspect = sequences[0]
    assert scheduler.plan("w0") is not None
    (failure,) = scheduler.detach("w0", 0.0, crashed=True)
    assert isinstance(failure, Failure)
    assert failure.refusal.kind is RefusalKind.POISON
    assert not scheduler.requests
    assert {one.state for one in sequences} == {State.DONE}
    assert scheduler.num_waiting == 0
    scheduler.check_integrity()


def test_two_suspects_never_share_a_worker() -> None:
    scheduler = scheduler_of(worker_spec(), worker_spec())
    for key in range(3):
        scheduler.submit(request_spec(key, max_tokens=8, crashes=2), 0.0)
    scheduler.place("m")
    assert [len(worker.running) for worker in scheduler.workers.values()] == [1, 1]
    assert scheduler.num_waiting == 1


# ----------------------------------------------------------------------------------------------------------- drain


def test_a_drain_moves_what_another_worker_could_take_and_leaves_the_rest() -> None:
    scheduler = scheduler_of(worker_spec(num_blocks=16), worker_spec(num_blocks=6))
    scheduler.submit(request_spec("large", 30, max_tokens=20), 0.0)
    scheduler.submit(request_spec("small", 4, max_tokens=8), 0.0)
    scheduler.workers["w1"].free_slots.clear()
    scheduler.place("m")
    scheduler.workers["w1"].free_slots.extend(range(3, -1, -1))
    step = scheduler.plan("w0")
    assert step is not None
    scheduler.drain("w0")
    assert not scheduler.is_drained("w0")
    assert [one.state for one in step.sequences] == [State.RUNNING, State.LEAVING]
    scheduler.apply("w0", answer(step))
    scheduler.place("m")
    (moved,) = scheduler.workers["w1"].running
    assert (moved.request.spec.key, moved.num_output, moved.resumptions) == ("small", 1, 1)
    scheduler.check_integrity()


def test_a_worker_is_drained_only_after_its_last_issued_step() -> None:
    scheduler = scheduler_of(worker_spec(), worker_spec())
    scheduler.submit(request_spec("a", 4, max_tokens=8), 0.0)
    scheduler.place("m")
    step = scheduler.plan("w0")
    scheduler.drain("w0")
    assert not scheduler.is_drained("w0")
    assert step is not None
    scheduler.apply("w0", answer(step))
    assert scheduler.is_drained("w0")
    assert not scheduler.is_drained("w1")


def test_crossing_a_fingerprint_is_counted() -> None:
    scheduler = scheduler_of(worker_spec(fingerprint="x"))
    scheduler.submit(request_spec("a", 4, max_tokens=8), 0.0)
    step_once(scheduler)
    scheduler.attach("w1", worker_spec(fingerprint="y"), 0.0)
    scheduler.detach("w0", 0.0, crashed=False)
    step_once(scheduler, "w1")
    counters = scheduler.totals()
    assert (counters["fingerprint_crossings"], counters["resumptions"]) == (1, 1)


def test_many_suspects_leave_every_other_step_to_the_rest() -> None:
    scheduler = scheduler_of(worker_spec(max_sequences=16, num_blocks=64))
    scheduler.submit(request_spec("calm", 4, max_tokens=30), 0.0)
    step_once(scheduler)
    for key in range(3):
        scheduler.submit(request_spec(key, 4, max_tokens=30, crashes=2), 0.0)
    rows = [[one.request.spec.key for one in step_once(scheduler).sequences] for _ in range(6)]
    assert rows == [[0], ["calm", 0], [1], ["calm", 0, 1], [2], ["calm", 0, 1, 2]]


def test_a_suspect_that_was_taken_out_is_not_alone_when_others_were_issued_after_it() -> None:
    scheduler = scheduler_of(worker_spec(num_blocks=16))
    scheduler.submit(request_spec("suspect", 4, max_tokens=8, crashes=2), 0.0)
    scheduler.submit(request_spec("large", 30, max_tokens=20), 0.0)
    scheduler.place("m")
    assert scheduler.plan("w0") is not None
    scheduler.attach("w1", worker_spec(num_blocks=6), 0.0)
    scheduler.drain("w0")  # the suspect could go to w1; large stays and is issued
    assert scheduler.plan("w0") is not None
    news = scheduler.detach("w0", 0.0, crashed=True)
    assert not any(isinstance(item, Failure) for item in news)
    assert [(one.request.spec.key, one.crashes) for one in scheduler.models["m"].waiting] == [
        ("suspect", 3), ("large", 1),
    ]  # fmt: skip
    scheduler.check_integrity()
