"""What a gateway had running before: it is never refused as if it were new, and never outlives its client."""

from __future__ import annotations

import asyncio

import pytest
from google.rpc import code_pb2
from tandem.v1 import scheduler_pb2

from scheduler.config import SchedulerConfig
from tests.scheduler.peers import Served, submit
from tests.scheduler.test_service import EXPECTED, holder, until


@pytest.mark.parametrize("settings", [SchedulerConfig(port=0, max_waiting=4)])
async def test_resubmissions_pass_a_full_queue(served: Served) -> None:
    """After a restart everything that ran or waited before waits at once, and nobody has a worker yet."""
    gateway = await served.gateway()
    await gateway.send(submits=[submit(handle, attempt=1) for handle in range(1, 11)])
    await until(lambda: len(served.cell.gateways.owners) == 10)
    await gateway.send(submits=[submit(11, attempt=0)])
    assert (await gateway.error(11)).code == code_pb2.RESOURCE_EXHAUSTED
    await served.worker()
    assert await gateway.finished(10) == EXPECTED
    refused = {output.handle for one in gateway.responses for output in one.outputs if output.HasField("error")}
    assert refused == {11}


async def test_a_resubmission_without_a_token_is_taken_in_while_draining(served: Served) -> None:
    gateway = await served.gateway()
    served.cell.drain()
    await gateway.send(submits=[submit(1, attempt=1), submit(2, attempt=0)])
    assert (await gateway.error(2)).code == code_pb2.UNAVAILABLE
    await served.worker()
    assert await gateway.finished(1) == EXPECTED


async def test_an_id_that_is_given_up_and_used_again_in_one_message_is_free(served: Served) -> None:
    gateway, _ = await served.gateway(), await served.worker()
    await gateway.send(submits=[submit(1, max_tokens=100)])
    await until(lambda: holder(served, "r1") == ("g1", 1))
    again = submit(2, request_id="r1", attempt=0)
    await gateway.send(submits=[again], cancels=[scheduler_pb2.Cancel(handle=1)])
    assert await gateway.finished(2) == EXPECTED


@pytest.mark.parametrize("new_first", [True, False])
async def test_what_a_gateway_does_not_resubmit_ends_after_the_grace(served: Served, new_first: bool) -> None:
    """A client left while the session was broken: the gateway can't tell, and says nothing of it in the new one."""
    old, _ = await served.gateway(), await served.worker(run=False)
    await old.send(submits=[submit(1), submit(2)])
    await until(lambda: len(served.cell.gateways.owners) == 2)
    if not new_first:
        old.call.cancel()
        await until(lambda: "g1" not in served.cell.gateways.sessions)
    new = await served.gateway()
    await new.send(submits=[submit(3, request_id="r1", attempt=1)])
    await until(lambda: holder(served, "r1") == ("g1", 3))
    await until(lambda: set(served.cell.core.requests) == {("g1", 3)})
    assert served.cell.gateways.owners.find("r2") is None


@pytest.mark.parametrize(("stood_still", "crashes"), [(True, 0), (False, 1)])
async def test_streams_that_broke_while_the_scheduler_stood_still_are_no_crashes(
    served: Served, stood_still: bool, crashes: int
) -> None:
    """Its peers gave up on it, not it on them: that says nothing about what they were computing."""
    gateway, worker = await served.gateway(), await served.worker("w1", run=False)
    await gateway.send(submits=[submit(1)])
    await worker.next_step()
    note_pause = served.cell._note_pause
    served.kill(worker)
    if stood_still:
        served.cell._note_pause = note_pause  # type: ignore[method-assign]
        served.cell._last_tick = asyncio.get_running_loop().time() - 10
    await until(lambda: "w1" not in served.cell.links)
    (request,) = served.cell.core.requests.values()
    assert [sequence.crashes for sequence in request.sequences.values()] == [crashes]
