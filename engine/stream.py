"""Streams: where a step's work is queued, in order, and from where it is known that it has been done.

    CudaStream      work is called at once: what it launches is queued by CUDA, behind everything launched before
    ThreadStream    a thread of its own calls the work, one after the other: a CPU that behaves like a device, for tests
                    of running ahead and wherever a host should overlap with its engine

Whoever submits work to a stream must not touch what it reads or writes before a mark behind it has been reached; what
was submitted before it has been done by then.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[], None]


class Mark(Protocol):
    """A point in a stream."""

    @property
    def is_reached(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> None:
        """Return when all that was submitted before it is done. From any thread; raises what has gone wrong there."""
        ...


class Stream(Protocol):
    """Work in order. `submit` and `mark` are for one thread."""

    def submit(self, work: Work) -> None:
        """Have it done after everything that was submitted before."""
        ...

    def mark(self) -> Mark:
        """The point behind everything submitted so far."""
        ...


class CudaStream:
    """The current stream of the current CUDA device."""

    def submit(self, work: Work) -> None:
        """Raises what the work raises; errors of the device itself come with a mark."""
        work()

    def mark(self) -> Mark:
        # A waiting thread sleeps instead of burning a core that the event loop could use.
        event = torch.cuda.Event(blocking=True)
        event.record()
        return _CudaMark(event)


class _CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    @property
    def is_reached(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()


class ThreadStream:
    """See the module's text. What a piece of work raises, the next mark raises, and all other work is done."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, work: Work) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
            self._thread.start()
        self._work.put(work)

    def mark(self) -> Mark:
        mark = _ThreadMark()
        self.submit(lambda: mark.reach(self._take_error()))
        return mark

    def _take_error(self) -> BaseException | None:
        error, self._error = self._error, None
        return error

    def _run(self) -> None:
        while True:
            work = self._work.get()
            try:
                work()
            except BaseException as error:
                self._error = self._error or error


class _ThreadMark:
    def __init__(self) -> None:
        self._reached = threading.Event()
        self._error: BaseException | None = None

    def reach(self, error: BaseException | None) -> None:
        self._error = error
        self._reached.set()

    @property
    def is_reached(self) -> bool:
        return self._reached.is_set()

    def wait(self) -> None:
        self._reached.wait()
        if self._error is not None:
            raise self._error


def stream_of(device: torch.device) -> Stream:
    """The stream that steps on this device are launched on."""
    return CudaStream() if device.type == "cuda" else ThreadStream()
