"""Requests of one gateway among several cells, with sessions that go up and down when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.state import MemoryState, SchedulerEntry
from gateway.cells import Cells, merged
from gateway.convert import ModelNews
from gateway.requests import LiveRequest, RequestSpec, RequestTable

MOVE_AFTER_S = 0.05


def news(name: str = "m", workers: int = 1, **changes: Any) -> ModelNews:
    values = {"max_model_len": 100, "vocab_size": 260, "max_sequence_tokens": 1000, "fingerprints": ("f",), **changes}
    return ModelNews(name, workers, **values)


class FakeSession:
    """Takes notes."""

    def __init__(self, cell: str, on_models: Callable[[Sequence[ModelNews]], None], on_change: Callable[[], None]):
        self.cell, self.on_models, self.on_change = cell, on_models, on_change
        self.up = self.draining = self.closed = self.draining_told = False
        self.submitted: list[LiveRequest] = []
        self.cancelled: list[LiveRequest] = []

    def set(self, up: bool, workers: int = 1, draining: bool = False) -> None:
        self.up, self.draining = up, draining
        if up:
            self.on_models([news(workers=workers)])
        self.on_change()

    def submit(self, request: LiveRequest) -> None:
        self.submitted.append(request)
        request.sent = self.up

    def cancel(self, request: LiveRequest) -> None:
        self.cancelled.append(request)

    def begin_drain(self) -> None:
        self.draining_told = True

    def start(self) -> None:
        pass

    async def close(self) -> None:
        self.closed = True


class Bench:
    """Cells on scripted sessions."""

    def __init__(self) -> None:
        self.state = MemoryState()
        self.table = RequestTable()
        self.models: list[ModelNews] = []
        self.changes = 0
        self.cells = Cells(self.state, self._open, self.table, self._on_models, self._on_change, MOVE_AFTER_S)  # type: ignore[arg-type]
        self._count = 0

    def _open(self, cell: str, on_models: Any, on_change: Any) -> FakeSession:
        return FakeSession(cell, on_models, on_change)

    def _on_models(self, models: Sequence[ModelNews]) -> None:
        self.models = list(models)

    def _on_change(self) -> None:
        self.changes += 1

    def __getitem__(self, cell: str) -> FakeSession:
        return self.cells.sessions[cell]  # type: ignore[return-value]

    def find(self, *names: str) -> None:
        self.cells._keep(set(names))

    def request(self, first: int = 1) -> LiveRequest:
        self._count += 1
        sampling: Any = SimpleNamespace(top_logprobs=None)
        spec = RequestSpec(f"r{self._count}", "m", [first, 2, 3], sampling, 7, 0, "c", "", 0, None, None)
        choice: Any = SimpleNamespace(finish=None, new_submit=lambda resumed: None)
        live = LiveRequest(spec, [choice], 0.0)
        self.table.reserve(spec.request_id)
        self.table.add(live)
        self.cells.submit(live)
        return live


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.cells.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


async def test_cells_are_found_in_the_state(bench: Bench) -> None:
    for cell in ("a", "b"):
        await bench.state.register(SchedulerEntry(f"s-{cell}", f"{cell}:1", cell, 1), ttl_s=60)
    bench.cells.start()
    await until(lambda: set(bench.cells.sessions) == {"a", "b"})
    waiting = asyncio.ensure_future(bench.cells.wait_up(10))
    assert not bench.cells.up
    bench["b"].set(up=True)
    assert await waiting
    assert not await Bench().cells.wait_up(0.01)


async def test_all_cells_together_look_like_one(bench: Bench) -> None:
    bench.find("a", "b")
    bench["a"].set(up=True, workers=2)
    bench["b"].set(up=True, workers=3)
    assert [model.workers for model in bench.models] == [5]
    bench["a"].set(up=True, workers=2, draining=True)
    assert not bench.cells.draining
    bench["b"].set(up=True, workers=3, draining=True)
    assert bench.cells.draining
    bench["a"].set(up=False)
    assert [model.workers for model in bench.models] == [3]


def test_models_of_several_cells() -> None:
    one = {"m": news(fingerprints=("f",)), "n": news("n", 4)}
    other = {"m": news(workers=2, max_model_len=50, max_sequence_tokens=2000, fingerprints=("e", "f"))}
    found = {model.name: model for model in merged([one, other])}
    assert found["m"] == news(workers=3, max_sequence_tokens=2000, fingerprints=("e", "f"))
    assert found["n"] == news("n", 4)


async def test_a_new_request_goes_to_a_cell_that_serves_its_model(bench: Bench) -> None:
    bench.find("a", "b", "c")
    bench["a"].set(up=True, workers=0)
    bench["b"].set(up=True)
    assert {bench.request(index).cell for index in range(30)} == {"b"}
    bench["b"].set(up=True, draining=True)
    assert {bench.request(index).cell for index in range(30)} == {"a"}, "it waits there for a worker"
    bench["a"].set(up=False)
    assert {bench.request(index).cell for index in range(30)} == {"b"}, "which says what a draining cell says"


async def test_equal_beginnings_meet_and_load_is_counted_down(bench: Bench) -> None:
    bench.find("a", "b")
    for cell in "ab":
        bench[cell].set(up=True)
    first = [bench.request(5) for _ in range(4)]
    assert len({live.cell for live in first}) == 1
    everything = [*first, *(bench.request(5) for _ in range(60))]
    counts = {cell: sum(live.cell == cell for live in everything) for cell in "ab"}
    assert max(counts.values()) <= 41, "the bound: 1.25 of 32, and one"
    for live in everything:
        bench.cells.cancel(live)
        bench.cells.cancel(live)
    assert dict(bench.cells._live) == {"a": 0, "b": 0}
    assert len(bench["a"].cancelled) + len(bench["b"].cancelled) == len(everything)


async def test_a_lost_cells_requests_move_and_nobody_elses(bench: Bench) -> None:
    bench.find("a", "b")
    for cell in "ab":
        bench[cell].set(up=True)
    everything = [bench.request(index) for index in range(40)]
    lost = [live for live in everything if live.cell == "a"]
    staying = [live for live in everything if live.cell == "b"]
    assert lost
    assert staying
    bench["a"].set(up=False)
    await until(lambda: all(live.cell == "b" for live in lost))
    assert {live.attempt for live in lost} == {1}
    assert {live.attempt for live in staying} == {0}
    assert bench["b"].submitted[-len(lost) :] == lost
    assert bench.cells._live == {"a": 0, "b": 40}


async def test_a_cell_that_is_back_in_time_loses_nothing(bench: Bench) -> None:
    bench.find("a", "b")
    bench["a"].set(up=True)
    live = bench.request()
    bench["b"].set(up=True)
    bench["a"].set(up=False)
    bench["a"].set(up=True)
    assert not bench.cells._timers.get("a")
    bench.cells._move("a")
    assert (live.cell, live.attempt) == ("a", 0)


async def test_requests_without_any_cell_wait_for_the_first_that_comes(bench: Bench) -> None:
    bench.find("a", "b")
    bench["a"].set(up=True)
    live = bench.request()
    bench["a"].set(up=False)
    bench.cells._move("a")
    assert live.cell == "a"
    bench["b"].set(up=True)
    await until(lambda: live.cell == "b")


async def test_without_a_known_cell_a_request_is_refused(bench: Bench) -> None:
    live = bench.request()
    assert live.error is not None
    assert live.error.reason == "NO_SCHEDULER"


async def test_cells_that_are_gone_are_forgotten(bench: Bench) -> None:
    bench.find("a", "b")
    bench["a"].set(up=True)
    live = bench.request()
    gone, kept = bench["b"], bench["a"]
    bench.find()
    assert list(bench.cells.sessions) == ["a"], "it is up, whatever the state says"
    await until(lambda: gone.closed)
    kept.set(up=False)
    bench.find()
    assert list(bench.cells.sessions) == ["a"], "it has a request"
    bench.cells.cancel(live)
    bench.find()
    assert not bench.cells.sessions
    await until(lambda: kept.closed)
    bench.find(*(f"cell-{index}" for index in range(100)))
    assert len(bench.cells.sessions) == 64


async def test_cells_beyond_the_bound_are_left_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.cells.MAX_CELLS", 2)
    bench.find("c", "b", "a")
    assert set(bench.cells.sessions) == {"a", "b"}


async def test_every_cell_is_told_that_the_gateway_ends(bench: Bench) -> None:
    bench.find("a")
    bench.cells.begin_drain()
    bench.find("a", "b")
    assert [bench[cell].draining_told for cell in ("a", "b")] == [True, True]
