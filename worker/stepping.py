"""The step thread: owns the engine, runs issued steps one after the other, and tells the event loop what came of them.

    submit(step) ──▶ queue (at most MAX_QUEUED) ──▶ Executor.run ──▶ on_outcome(outcome)
    loop thread                                     step thread      loop thread

Step n + 1 starts after n has ended, or is put on the device behind it. A step that has started always ends; queued ones
can be dropped. When the engine is beyond repair, or the code is wrong, the thread ends with its error in `failed`.

Where the next step is there already, an outcome is told at the moment that this step enters the engine: both threads
want the interpreter's lock, and the engine is where the step thread doesn't need it. Waking the loop lets go of the
lock, which the loop then keeps for as long as it has something to do; so an engine that can wakes it by itself, by an
event, when it no longer needs the lock (`engine.batch.DecodeRows.bell`).

    step thread    … settle n │ plan n + 1 │ forward n + 1 ─────────────────────▶
    loop thread                              │ outcome n → StepResult → gRPC

Where the engine runs ahead, steps are launched as they come and land when their tokens are there, which a thread of its
own waits for (worker/run_ahead.py); the step thread sleeps between. What is called between steps lands them all first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from cluster.health import Progress
from cluster.logs import event
from worker.executor import Executor
from worker.run_ahead import Launched, RunAhead
from worker.steps import Step, StepOutcome

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_QUEUED = 2
"""issued steps: one that runs and the next"""
CLOSE_TIMEOUT_S = 5.0


class TooManySteps(RuntimeError):
    """The scheduler issued more steps than the protocol allows."""


class StepThread:
    """See the module's text. All public methods are for the event loop's thread."""

    def __init__(self, on_outcome: Callable[[StepOutcome], None], hung_after_s: float = 30.0) -> None:
        """on_outcome is called on the event loop, in the order of the steps; `hung_after_s`: see `hung`."""
        self._loop = asyncio.get_running_loop()
        self._on_outcome = on_outcome
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._executor: Executor | None = None
        self._issued = 0
        self._generation = 0
        self._progress = Progress(hung_after_s)
        self._last_step_s = 0.0
        self._owed: tuple[StepOutcome, int] | None = None
        """what the loop wasn't told yet; the step thread's own"""
        self._told: deque[tuple[StepOutcome, int]] = deque()
        """what the loop will deliver when it is woken, with their generations"""
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if hasattr(os, "eventfd") else -1
        if self._bell >= 0:
            self._loop.add_reader(self._bell, self._rung)
        self._in_flight: deque[tuple[Launched, int]] = deque()
        """launched steps with their generations, oldest first; the step thread's own"""
        self._watched: queue.SimpleQueue[Launched | None] | None = None
        """what the watching thread waits for, one after the other; None before the first launch"""
        self.failed: asyncio.Future[BaseException] = self._loop.create_future()
        """resolves with what ended the thread, if anything but `stop` does"""
        self._thread = threading.Thread(target=self._run, name="step", daemon=True)
        self._thread.start()

    async def load(self, make: Callable[[], T]) -> T:
        """Build the engine on the step thread, which owns it from then on; its exception is raised here."""
        return await self._call(make)

    def adopt(self, executor: Executor) -> None:
        """Steps run on this one."""
        self._executor = executor

    def submit(self, step: Step) -> None:
        """Queue a step. Raises TooManySteps beyond the protocol's depth."""
        if self._issued >= MAX_QUEUED:
            raise TooManySteps(f"{self._issued} steps are issued and not finished")
        self._issued += 1
        generation = self._generation
        self._jobs.put(lambda: self._run_step(step, generation))

    def drop_queued(self) -> None:
        """Steps that have not started never will."""
        self._generation += 1

    async def settle(self) -> None:
        """Drop the queued steps and return when the running one has ended; its outcome is delivered before."""
        self.drop_queued()
        await self._call(lambda: None)
        self._issued = 0

    async def call(self, function: Callable[[Executor], Any]) -> Any:
        """Run a function on the step thread, between steps."""
        executor = self._executor
        if executor is None:
            raise RuntimeError("no executor was adopted")
        return await self._call(lambda: function(executor))

    def running_step_s(self) -> float:
        """Seconds that the running step has taken so far; 0 when idle."""
        return self._progress.running_s(time.monotonic())

    def hung(self, times: float = 1.0) -> bool:
        """Whether the running step takes more than `hung_after_s` and ten times the last one, or so many times that."""
        return self._progress.hung(time.monotonic(), self._last_step_s, times)

    def stop(self) -> None:
        """Let the thread end after what is queued."""
        self._jobs.put(None)

    async def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Drop what is queued, and wait until the running step and the thread have ended, or the time is over.

        An interpreter that ends while a thread is inside native code is aborted, and a drain in order ends as a crash.
        """
        self.drop_queued()
        self.stop()
        await asyncio.to_thread(self._thread.join, timeout_s)

    def _call(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        result: asyncio.Future[Any] = self._loop.create_future()

        def run() -> None:
            self._land_all()
            self._tell_owed()
            try:
                value = function()
            except BaseException as error:
                self._post(_resolve, result, None, error)
            else:
                self._post(_resolve, result, value, None)

        self._jobs.put(run)
        return result

    def _run(self) -> None:
        try:
            while True:
                if self._jobs.empty():
                    self._tell_owed()
                job = self._jobs.get()
                if job is None:
                    self._land_all()
                    self._tell_owed()
                    return
                job()
        except BaseException as error:
            self._tell_owed()
            event(logger, "the step thread ended", level=logging.ERROR, error=error)
            self._post(_resolve, self.failed, error, None)
        finally:
            if self._watched is not None:
                self._watched.put(None)
            self._post(self._close_bell)

    def _run_step(self, step: Step, generation: int) -> None:
        if generation != self._generation or self._executor is None:
            return
        ahead = self._executor.ahead
        if ahead is not None and ahead.can_launch(step):
            self._launch(ahead, step, generation)
            return
        self._land_all()
        self._progress.began(time.monotonic())
        try:
            outcome = self._executor.run(step, self._tell_owed, self._bell_of_owed)
        finally:
            self._progress.ended()
        self._last_step_s = outcome.duration_s
        self._tell_owed()  # a step that computed nothing, or didn't ring
        self._owed = outcome, generation

    def _launch(self, ahead: RunAhead, step: Step, generation: int) -> None:
        if not self._in_flight:
            self._progress.began(time.monotonic())
        launched = ahead.launch(step)
        self._tell_owed()
        self._in_flight.append((launched, generation))
        if self._watched is None:
            self._watched = queue.SimpleQueue()
            threading.Thread(target=self._watch, args=(self._watched,), name="tokens", daemon=True).start()
        self._watched.put(launched)

    def _watch(self, watched: queue.SimpleQueue[Launched | None]) -> None:
        """On a thread of its own: the step thread learns of each launched step's tokens as of any other job."""
        while (launched := watched.get()) is not None:
            launched.wait()
            self._jobs.put(partial(self._land, launched))

    def _land(self, launched: Launched) -> None:
        """Land the oldest step if it is this one: it may have landed already."""
        if self._in_flight and self._in_flight[0][0] is launched:
            self._land_oldest()

    def _land_all(self) -> None:
        while self._in_flight:
            self._land_oldest()

    def _land_oldest(self) -> None:
        _, generation = self._in_flight.popleft()
        assert self._executor is not None
        assert self._executor.ahead is not None
        try:
            outcome = self._executor.ahead.land()
        finally:
            self._progress.ended()
            if self._in_flight:
                self._progress.began(time.monotonic())
        self._last_step_s = outcome.duration_s
        self._told.append((outcome, generation))
        self._tell_owed()

    def _tell_owed(self) -> None:
        self._take_owed()
        if self._told:
            self._post(self._deliver)

    def _bell_of_owed(self) -> int:
        """The event by which the engine wakes the loop; -1: nothing is owed, or it is told already."""
        if self._bell < 0:
            self._tell_owed()
            return -1
        self._take_owed()
        return self._bell if self._told else -1

    def _take_owed(self) -> None:
        if self._owed is not None:
            self._told.append(self._owed)
            self._owed = None

    def _rung(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        self._deliver()

    def _deliver(self) -> None:
        while self._told:
            outcome, generation = self._told.popleft()
            if generation == self._generation:
                self._issued -= 1
            self._on_outcome(outcome)

    def _close_bell(self) -> None:
        """The thread has ended: nobody rings."""
        if self._bell >= 0:
            self._loop.remove_reader(self._bell)
            os.close(self._bell)
            self._bell = -1

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # The loop is closed: the process is about to end and nobody listens.
            return


def _resolve(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
