"""What a resubmission says of the crashes that a request was part of."""

from __future__ import annotations

from tandem.v1 import scheduler_pb2

from .calls import LENGTH, ask, collect, joined
from .conftest import Cell, Connection


def crash(scheduler: Connection, submit: scheduler_pb2.Submit, count: int, choice: int = 0) -> None:
    """The scheduler tells of a crash, without a token."""
    scheduler.say(scheduler_pb2.Output(handle=submit.handle, choice=choice, crashes=count))


async def resubmitted(cell: Cell, scheduler: Connection) -> tuple[Connection, scheduler_pb2.Submit]:
    """The scheduler dies; what its successor is given."""
    scheduler.drop()
    cell.scheduler.term += 1
    again = await cell.scheduler.connection()
    return again, await again.submit()


async def test_crashes_in_a_row_are_resubmitted_and_losing_schedulers_adds_none(cell: Cell) -> None:
    scheduler = await cell.scheduler.connection()
    call = cell.stub.GenerateStream(ask())
    submit = await scheduler.submit()
    assert submit.crashes == 0
    crash(scheduler, submit, 1)
    crash(scheduler, submit, 2)
    for _ in range(3):
        scheduler, submit = await resubmitted(cell, scheduler)
        assert submit.crashes == 2
    scheduler.emit(submit, b"ok", finish_reason=LENGTH)
    assert joined(await collect(call))[0] == "ok"


async def test_a_token_acquits_and_a_crash_after_it_counts_anew(cell: Cell) -> None:
    scheduler = await cell.scheduler.connection()
    call = cell.stub.GenerateStream(ask())
    submit = await scheduler.submit()
    crash(scheduler, submit, 2)
    scheduler.emit(submit, b"a")
    scheduler, submit = await resubmitted(cell, scheduler)
    assert submit.crashes == 0
    scheduler.emit(submit, b"b", 1, crashes=1)  # the token came first; both as one message
    scheduler, submit = await resubmitted(cell, scheduler)
    assert submit.crashes == 1
    scheduler.emit(submit, b"c", 2, finish_reason=LENGTH)
    assert joined(await collect(call))[0] == "abc"


async def test_the_worst_of_the_choices_that_still_run_counts(cell: Cell) -> None:
    scheduler = await cell.scheduler.connection()
    call = cell.stub.GenerateStream(ask(n=3))
    submit = await scheduler.submit()
    for choice, count in enumerate((1, 2, 3)):
        crash(scheduler, submit, count, choice)
    scheduler.emit(submit, b"", choice=2, finish_reason=LENGTH)  # without a token, which would have acquitted it
    scheduler, submit = await resubmitted(cell, scheduler)
    assert submit.crashes == 2
    for choice in (0, 1):
        scheduler.emit(submit, b"y", choice=choice, finish_reason=LENGTH)
    assert joined(await collect(call), 1)[0] == "y"
