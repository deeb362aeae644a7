"""The step thread: order, depth, dropping, and how it ends."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from worker.executor import EngineBroken
from worker.stepping import MAX_QUEUED, StepThread, TooManySteps
from worker.steps import Step, StepOutcome


class GatedExecutor:
    """Each run waits for a permit."""

    ahead = None

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)
        self.takes_bell = False
        self.rings = True
        self.bells: list[int] = []
        self.entered: list[int] = []
        self.second = threading.Event()
        self.running = 0
        self.error: Exception | None = None

    def run(self, step: Step, before_forward: Callable[[], None], bell: Callable[[], int]) -> StepOutcome:
        self.running += 1
        assert self.running == 1
        self.entered.append(step.number)  # first: whoever is woken may look at it at once
        if self.takes_bell:
            self.bells.append(bell())
            if self.rings and self.bells[-1] >= 0:
                os.eventfd_write(self.bells[-1], 1)
        else:
            before_forward()
        if len(self.entered) == 2:
            self.second.set()
        assert self.permits.acquire(timeout=10)
        self.running -= 1
        if self.error is not None:
            raise self.error
        return StepOutcome(step.term, step.epoch, step.number, [], [], [], [], [], [])


@pytest.fixture
async def thread() -> Any:
    outcomes: asyncio.Queue[StepOutcome] = asyncio.Queue()
    made = StepThread(outcomes.put_nowait)
    executor = GatedExecutor()
    made.adopt(executor)  # type: ignore[arg-type]
    yield made, executor, outcomes
    executor.permits.release(100)
    made.stop()


async def next_number(outcomes: asyncio.Queue[StepOutcome]) -> int:
    return (await asyncio.wait_for(outcomes.get(), 10)).number


async def test_steps_run_one_after_the_other_and_no_more_than_two_are_taken(thread: Any) -> None:
    steps, executor, outcomes = thread
    for number in range(1, MAX_QUEUED + 1):
        steps.submit(Step(1, 1, number))
    with pytest.raises(TooManySteps):
        steps.submit(Step(1, 1, 3))
    executor.permits.release()
    assert await next_number(outcomes) == 1
    steps.submit(Step(1, 1, 3))
    executor.permits.release(2)
    assert [await next_number(outcomes) for _ in range(2)] == [2, 3]
    assert executor.entered == [1, 2, 3]
    assert steps.running_step_s() == 0


async def test_a_queued_step_begins_before_the_loop_looks_at_the_one_before(thread: Any) -> None:
    """The device doesn't wait for the loop thread, which is away from here to the assertions."""
    steps, executor, outcomes = thread
    executor.permits.release(1)
    steps.submit(Step(1, 1, 1))
    steps.submit(Step(1, 1, 2))
    assert executor.second.wait(10)
    assert executor.entered == [1, 2]
    assert outcomes.empty()
    executor.permits.release(1)
    assert [await next_number(outcomes) for _ in range(2)] == [1, 2]


async def test_the_engine_s_bell_tells_of_the_step_before(thread: Any) -> None:
    steps, executor, outcomes = thread
    executor.takes_bell = True
    steps.submit(Step(1, 1, 1))
    steps.submit(Step(1, 1, 2))
    executor.permits.release(1)
    assert await next_number(outcomes) == 1
    assert executor.entered == [1, 2]  # and the second one still waits
    assert executor.bells[0] == -1
    assert executor.bells[1] >= 0
    executor.permits.release(1)
    assert await next_number(outcomes) == 2


async def test_an_engine_that_forgets_to_ring_delays_and_loses_nothing(thread: Any) -> None:
    steps, executor, outcomes = thread
    executor.takes_bell, executor.rings = True, False
    steps.submit(Step(1, 1, 1))
    steps.submit(Step(1, 1, 2))
    executor.permits.release(1)
    assert await asyncio.to_thread(executor.second.wait, 10)
    assert outcomes.empty()
    executor.permits.release(1)
    assert [await next_number(outcomes) for _ in range(2)] == [1, 2]


async def test_what_was_rung_for_comes_before_what_is_called_next(thread: Any) -> None:
    """The loop is busy while the bell rings, and finds an answer of the step thread as well."""
    steps, executor, outcomes = thread
    executor.takes_bell = True
    steps.submit(Step(1, 1, 1))
    steps.submit(Step(1, 1, 2))
    called = asyncio.ensure_future(steps.call(lambda _: None))
    await asyncio.sleep(0)
    executor.permits.release(2)
    while steps._thread.is_alive() and not steps._jobs.empty():
        threading.Event().wait(0.001)
    called.add_done_callback(lambda _: outcomes.put_nowait(StepOutcome(1, 1, 99, [], [], [], [], [], [])))
    await asyncio.wait_for(called, 10)
    await asyncio.sleep(0)
    assert [outcomes.get_nowait().number for _ in range(3)] == [1, 2, 99]


async def test_settling_waits_for_the_running_step_and_drops_the_queued(thread: Any) -> None:
    steps, executor, outcomes = thread
    steps.submit(Step(1, 1, 1))
    while not executor.entered:  # noqa: ASYNC110  (another thread's)
        await asyncio.sleep(0.001)
    steps.submit(Step(1, 1, 2))
    settling = asyncio.ensure_future(steps.settle())
    done, _ = await asyncio.wait([settling], timeout=0.05)
    assert not done
    assert steps.running_step_s() > 0
    assert not steps.hung()
    executor.permits.release(10)
    await asyncio.wait_for(settling, 10)
    assert executor.entered == [1]
    assert outcomes.get_nowait().number == 1
    # Two more may be issued now: the dropped ones don't count.
    steps.submit(Step(1, 2, 1))
    steps.submit(Step(1, 2, 2))
    assert [await next_number(outcomes) for _ in range(2)] == [1, 2]


async def test_a_broken_engine_ends_the_thread_and_says_why(thread: Any) -> None:
    steps, executor, outcomes = thread
    executor.error = EngineBroken("it fails on everything")
    executor.permits.release()
    steps.submit(Step(1, 1, 1))
    assert isinstance(await asyncio.wait_for(steps.failed, 10), EngineBroken)
    assert outcomes.empty()


async def test_what_loading_raises_is_raised_and_the_thread_lives_on(thread: Any) -> None:
    steps, executor, _ = thread

    def fail() -> None:
        raise ValueError("no memory")

    with pytest.raises(ValueError, match="no memory"):
        await steps.load(fail)
    assert await steps.call(lambda held: held is executor)
    other = StepThread(lambda outcome: None)
    with pytest.raises(RuntimeError, match="adopted"):
        await other.call(lambda held: held)
    other.stop()


async def test_closing_waits_for_the_running_step_and_drops_the_next(thread: Any) -> None:
    steps, executor, _ = thread
    steps.submit(Step(1, 1, 1))
    steps.submit(Step(1, 1, 2))
    while not executor.entered:  # noqa: ASYNC110  (another thread's)
        await asyncio.sleep(0)
    closing = asyncio.create_task(steps.close(5))
    await asyncio.sleep(0)
    assert not closing.done()
    executor.permits.release(2)
    await asyncio.wait_for(closing, 5)
    assert not steps._thread.is_alive()
    assert executor.entered == [1]


async def test_closing_gives_up_on_a_step_that_hangs(thread: Any) -> None:
    steps, executor, _ = thread
    steps.submit(Step(1, 1, 1))
    await asyncio.wait_for(steps.close(0.01), 5)
    assert executor.running <= 1
