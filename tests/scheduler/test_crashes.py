"""Workers that die, hang or answer nonsense: who is told, what is counted, and what goes on elsewhere."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from google.rpc import code_pb2
from tandem.v1 import scheduler_pb2

from scheduler.config import SchedulerConfig
from scheduler.workers import SILENT_S, WorkerLink
from tests.scheduler.peers import Gateway, Served, Worker, submit
from tests.scheduler.test_service import EXPECTED, holder, until


@pytest.fixture
def settings() -> SchedulerConfig:
    """A lost gateway's requests stay until another one takes them over, however late this machine is."""
    return SchedulerConfig(port=0, session_grace_s=60)


async def crash(served: Served, gateway: Gateway, worker_id: str) -> int:
    """A worker takes a step and dies; the count that the gateway is told."""
    worker = await served.worker(worker_id, run=False)
    await worker.next_step()
    served.kill(worker)
    (output,) = await gateway.outputs_of(1, lambda output: output.crashes)
    assert not output.token_ids
    return int(output.crashes)


async def test_each_crash_is_told_at_once_and_a_token_ends_the_row(served: Served) -> None:
    gateway = await served.gateway()
    await gateway.send(submits=[submit(1)])
    assert [await crash(served, gateway, name) for name in ("w1", "w2")] == [1, 2]
    worker = await served.worker("w3", run=False)
    step = await worker.next_step()
    await worker.answer(step)
    assert (await gateway.outputs_of(1, lambda output: output.token_ids))[-1].crashes == 0
    served.kill(worker)
    assert (await gateway.outputs_of(1, lambda output: output.crashes))[-1].crashes == 1


async def test_a_worker_that_was_silent_before_its_stream_broke_was_cut_off(served: Served) -> None:
    """Pings that go unanswered end a connection before the heartbeat's time is over; nobody is to blame for that."""
    gateway = await served.gateway()
    await gateway.send(submits=[submit(1)])
    for name in ("w1", "w2", "w3"):
        worker = await served.worker(name, run=False)
        await worker.next_step()
        served.cell.links[name].last_heard -= SILENT_S
        worker.call.cancel()
        await until(lambda name=name: name not in served.cell.links)
    assert served.cell.core.crashes_of(("g1", 1)) == 0
    await served.worker("w4")
    assert await gateway.finished(1) == EXPECTED
    assert not any(output.crashes for response in gateway.responses for output in response.outputs)


async def test_what_was_under_way_when_a_link_was_cut_still_comes_before_the_break(served: Served) -> None:
    gateway = await served.gateway()
    await gateway.send(submits=[submit(1)])
    for name in ("w1", "w2", "w3"):
        worker = await served.worker(name, run=False)
        step = await worker.next_step()
        link = served.cell.links[name]
        silent_since = link.last_heard = link.last_heard - SILENT_S
        await worker.answer(step)
        await until(lambda link=link, since=silent_since: link.last_heard > since + SILENT_S)
        worker.call.cancel()
        await until(lambda name=name: name not in served.cell.links)
    assert served.cell.core.crashes_of(("g1", 1)) == 0
    assert not any(output.crashes for response in gateway.responses for output in response.outputs)


@pytest.mark.parametrize("leaving", [True, False])
async def test_only_a_worker_that_says_so_leaves(served: Served, leaving: bool) -> None:
    """An end that looks orderly may be a broken one: a reset stream can read as one that was closed."""
    gateway = await served.gateway()
    await gateway.send(submits=[submit(1)])
    worker = await served.worker("w1", run=False)
    await worker.next_step()
    if leaving:
        await worker.call.write(scheduler_pb2.AttachRequest(leaving=scheduler_pb2.WorkerLeaving()))
    served.heard_just_now(worker)
    await worker.call.done_writing()
    await until(lambda: "w1" not in served.cell.links)
    assert served.cell.core.crashes_of(("g1", 1)) == (0 if leaving else 1)


def test_a_break_long_after_a_silence_is_a_crash() -> None:
    link = WorkerLink("w1", "b", epoch=1, last_heard=10.0)
    link.hear(10.0 + SILENT_S - 0.01)
    assert not link.is_cut_off(link.last_heard)
    heard = link.last_heard + SILENT_S + 0.01
    link.hear(heard)
    link.hear(heard + 1.0)
    assert link.is_cut_off(heard + 1.9)
    link.hear(heard + 2.0)
    assert not link.is_cut_off(heard + 2.1)


async def test_a_count_comes_back_with_the_resubmission(served: Served) -> None:
    gateway = await served.gateway()
    await gateway.send(submits=[submit(1, attempt=1, crashes=2), submit(2)])
    worker = await served.worker("w1", run=False)
    step = await worker.next_step()
    assert len(step.slots) == 1, "a suspect has its steps to itself"
    served.kill(worker)
    error = await gateway.error(1)
    assert error.code == code_pb2.INTERNAL
    assert b"POISON" in error.details[0].value
    await served.worker("w2")
    assert await gateway.finished(2) == EXPECTED


@pytest.mark.parametrize("lost", [False, True])
async def test_a_count_survives_a_new_attempt_and_another_gateway(served: Served, lost: bool) -> None:
    gateway = await served.gateway()
    await gateway.send(submits=[submit(1)])
    assert await crash(served, gateway, "w1") == 1
    if lost:
        gateway.call.cancel()
        await until(lambda: "g1" not in served.cell.gateways.sessions)
        gateway = await served.gateway("g2")
    await gateway.send(submits=[submit(5, request_id="r1", attempt=1)])
    await until(lambda: holder(served, "r1") == ("g2" if lost else "g1", 5))
    assert served.cell.core.crashes_of(("g2" if lost else "g1", 5)) == 1


def with_ids_beyond_the_vocabulary(result: Any) -> None:
    result.token_ids[0] = 1000


def with_an_error_that_says_success(result: Any) -> None:
    result.errors.add(row=0).status.code = 0


def with_an_error_of_no_row(result: Any) -> None:
    result.errors.add(row=7).status.code = code_pb2.INTERNAL


def with_other_rows(result: Any) -> None:
    result.num_tokens.append(0)


NONSENSE = [
    with_ids_beyond_the_vocabulary,
    with_an_error_that_says_success,
    with_an_error_of_no_row,
    with_other_rows,
]


@pytest.mark.parametrize("spoil", NONSENSE, ids=lambda function: function.__name__)
async def test_nonsense_costs_a_worker_its_place_and_its_requests_nothing(served: Served, spoil: Any) -> None:
    gateway, worker = await served.gateway(), await served.worker("w1", run=False)
    await gateway.send(submits=[submit(1)])
    await worker.answer(await worker.next_step(), spoil=spoil)
    told = await gateway.outputs_of(1, lambda output: output.crashes)
    assert not any(output.token_ids or output.HasField("error") for output in told)
    assert "w1" not in served.cell.links
    await served.worker("w2")
    assert await gateway.finished(1) == EXPECTED


async def test_a_bad_worker_that_comes_again_does_not_get_the_same_request_again(served: Served) -> None:
    """It looks idle and comes first by name; without the count against it, its request would fail as poison."""
    gateway = await served.gateway()
    bad = await served.worker("w1", run=False)
    await gateway.send(submits=[submit(1)])
    await bad.answer(await bad.next_step(), spoil=with_other_rows)
    await gateway.outputs_of(1, lambda output: output.crashes)
    # Both are there before anything is planned: this is one turn of the loop.
    served.cell.attach(hello("w1"))
    served.cell.attach(hello("w2"))
    await until(lambda: served.cell.core.num_running == 1)
    assert [len(served.cell.core.workers[name].running) for name in ("w1", "w2")] == [0, 1]


def hello(worker_id: str) -> Any:
    return scheduler_pb2.WorkerHello(
        worker_id=worker_id, boot_id="b", model="m", num_blocks=64, block_size=4, max_sequences=8, max_model_len=128
    )


async def running(served: Served) -> tuple[Gateway, Worker, float]:
    """A worker has two steps, and is never late with its heartbeats; the time of the first one."""
    gateway, worker = await served.gateway(), await served.worker("w1", run=False)
    await gateway.send(submits=[submit(1)])
    for _ in range(2):
        await worker.next_step()
    return gateway, worker, asyncio.get_running_loop().time()


def look(served: Served, at: float) -> bool:
    """Whether the worker still has its place, so long after."""
    if "w1" in served.cell.links:
        served.cell.links["w1"].last_heard = at
    served.cell.tick(at)
    return "w1" in served.cell.links


async def test_a_step_that_never_ends_counts_as_a_crash(served: Served) -> None:
    gateway, _, began = await running(served)
    assert look(served, began + 10), "a long step is no death"
    assert look(served, began + 29.5)
    assert not look(served, began + 31)
    assert (await gateway.outputs_of(1, lambda output: output.crashes))[-1].crashes == 1
    await served.worker("w2")
    assert await gateway.finished(1) == EXPECTED


async def test_time_begins_anew_with_each_result(served: Served) -> None:
    _, worker, began = await running(served)
    first, second = worker.steps
    await worker.answer(first)
    third = await worker.next_step()
    link = served.cell.links["w1"]
    link.progress.began(began + 25)  # as if the result had come then
    assert look(served, began + 40)
    for step in (second, third):
        await worker.answer(step)
    await until(lambda: served.cell.core.workers["w1"].steps == 5)


async def test_ten_times_the_expected_time_is_still_no_hang(served: Served) -> None:
    _, worker, began = await running(served)
    times = served.cell.core.workers["w1"].speculation.plain_times
    for _ in range(5):
        times.observe(6, 8.0)  # the size of the step that runs
    assert worker.steps[0].num_prefill_tokens == [6]
    assert look(served, began + 79)
    assert not look(served, began + 82)


async def test_idle_workers_never_hang(served: Served) -> None:
    gateway, _ = await served.gateway(), await served.worker("w1")
    await gateway.send(submits=[submit(1)])
    assert await gateway.finished(1) == EXPECTED
    await until(lambda: not served.cell.core.workers["w1"].in_flight)
    assert look(served, asyncio.get_running_loop().time() + 1e6)


@pytest.mark.parametrize("settings", [SchedulerConfig(port=0, hung_step_s=1.0)])
async def test_a_scheduler_that_stood_still_takes_no_step_for_hung(served: Served) -> None:
    _, _, began = await running(served)
    served.cell.tick(began + 60, paused=True)
    assert look(served, began + 60.5)
    assert not look(served, began + 62)


async def test_models_are_told_of_at_the_moment_a_worker_is_too_silent(served: Served) -> None:
    served_models: list[dict[str, bool]] = []
    served.cell.gateways.on_models = served_models.append
    streams = [await served.worker("w1", run=False), await served.worker("w2", run=False, hello={"model": "other"})]
    link = served.cell.links["w1"]
    now = asyncio.get_running_loop().time()
    link.last_heard = now - 2.9
    assert served.cell._until_next_look() <= 0.1 + 0.005
    link.last_heard = now - 3.01
    served.cell.tick(asyncio.get_running_loop().time())
    assert served_models[-1] == {"m": False, "other": True}
    assert len(streams) == 2, "an attachment lasts as long as somebody holds it"
