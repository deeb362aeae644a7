"""A stream's order, what its marks promise, and what becomes of errors."""

from __future__ import annotations

import threading

import pytest
import torch

from engine.stream import CudaStream, ThreadStream, stream_of

LIMIT_S = 30


def test_work_is_done_in_order_on_another_thread_and_a_mark_waits_for_what_came_before() -> None:
    stream, gate, done = ThreadStream(), threading.Event(), []

    def gated() -> None:
        assert gate.wait(LIMIT_S)
        done.append((1, threading.current_thread() is threading.main_thread()))

    stream.submit(gated)
    first = stream.mark()
    stream.submit(lambda: done.append((2, False)))
    second = stream.mark()
    assert not first.is_reached
    assert done == []
    gate.set()
    second.wait()
    assert first.is_reached
    assert done == [(1, False), (2, False)]


def test_an_error_is_told_at_the_next_mark_and_only_there() -> None:
    stream, done = ThreadStream(), []

    def fail() -> None:
        raise RuntimeError("a kernel failed")

    stream.submit(fail)
    stream.submit(lambda: done.append(1))
    mark = stream.mark()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a kernel failed"):
            mark.wait()
    stream.mark().wait()
    assert done == [1]


def test_each_device_has_its_own_kind() -> None:
    assert isinstance(stream_of(torch.device("cpu")), ThreadStream)
    assert isinstance(stream_of(torch.device("cuda")), CudaStream)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_marks_of_a_gpu() -> None:
    x = torch.ones(1 << 20, device="cuda")
    stream, host = CudaStream(), torch.zeros((), pin_memory=True)
    stream.submit(lambda: host.copy_(x.sum(), non_blocking=True))  # type: ignore[arg-type]
    mark = stream.mark()
    mark.wait()
    assert mark.is_reached
    assert host.item() == 1 << 20
