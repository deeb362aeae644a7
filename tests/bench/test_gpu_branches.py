"""What only a GPU's branches call, on stand-ins of torch.cuda: that they are called, in order, and exist as they are
called. What they do, `make gpu-check` finds out on a GPU; it must not be a trivial error that it finds first.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton isn't installed (pip install triton==3.7.1)")

from bench.gpu_report import Report
from bench.gpu_run import BLOCK_SIZE, FULL, _facts, _fitting
from bench.gpu_timing import device_s
from engine.cuda_graphs import CudaRecorder
from engine.stream import CudaStream

GPU: Any = SimpleNamespace(type="cuda")


class FakeEvent:
    """Time goes by a millisecond with each event."""

    now = 0

    def __init__(self, **options: bool) -> None:
        inspect.signature(torch.cuda.Event.__new__).bind(object, **options)
        self.options = options
        self.at = 0
        self.waited = False

    def record(self) -> None:
        FakeEvent.now += 1
        self.at = FakeEvent.now

    def query(self) -> bool:
        return self.waited

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, end: FakeEvent) -> float:
        assert end.waited
        return float(end.at - self.at)


def test_times_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    runs: list[int] = []
    assert device_s(lambda: runs.append(1), GPU, tries=3) == pytest.approx(1e-3)
    assert len(runs) == 3 + 2  # the first ones warm up


def test_a_mark_of_a_gpu_lets_its_waiter_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    stream, done = CudaStream(), []
    stream.submit(lambda: done.append(1))
    mark = stream.mark()
    assert done == [1]
    assert not mark.is_reached
    mark.wait()
    assert mark.is_reached
    assert mark._event.options == {"blocking": True}


def test_a_graph_is_recorded_after_a_run_aside_and_restricts_its_own_thread_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []

    class Stream:
        def __init__(self, name: str = "aside") -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            calls.append(f"{self.name} waits for {other.name}")

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        calls.append(f"on {stream.name}")
        yield
        calls.append("back")

    real = inspect.signature(torch.cuda.graph)

    @contextmanager
    def graph(*arguments: Any, **options: Any) -> Iterator[None]:
        real.bind(*arguments, **options)
        calls.append(("recording", options))
        yield
        calls.append("recorded")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("current"))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "graph")
    monkeypatch.setattr(torch.cuda, "graph", graph)

    def function() -> torch.Tensor:
        calls.append("called")
        return torch.zeros(1)

    made, _ = CudaRecorder().record(function)
    assert made == "graph"
    recording = ("recording", {"pool": (0, 1), "capture_error_mode": "thread_local"})
    before = ["aside waits for current", "on aside", "called", "back", "current waits for aside"]
    assert calls == [*before, recording, "called", "recorded"]


@pytest.mark.parametrize(("gib", "all_layers"), [(139, True), (16, False), (7, False)])
def test_the_model_is_cut_to_the_memory(monkeypatch: pytest.MonkeyPatch, gib: int, all_layers: bool) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gib << 30, 139 << 30))
    report = Report()
    fitted = _fitting(FULL, GPU, report)
    assert (fitted.shape.num_layers == FULL.shape.num_layers) == all_layers
    assert ("cut to" in report.facts) == (not all_layers)
    assert fitted.shape.num_layers >= 1
    weights = 2 * (fitted.shape.matrix_elements + fitted.shape.vocab_size * fitted.shape.hidden_size)
    cache = 2 * fitted.shape.kv_elements_per_token * max(FULL.rows) * (FULL.context + BLOCK_SIZE)
    assert gib == 7 or weights + cache < gib << 30


def test_facts_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="A GPU", major=9, minor=0, total_memory=139 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert _facts(GPU, FULL.shape)["device"] == "A GPU (9.0, 139 GiB)"
