"""The scheduler's streams, against scripted gateways and workers over real gRPC."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2
from tandem.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2

from scheduler.config import SchedulerConfig
from tests.scheduler.peers import Served, submit

EXPECTED = [100, 101, 102, 103, 104]


async def until(condition, timeout_s: float = 60.0) -> None:
    """Yield to the loop until a condition on in-process state holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (the state is in this very loop; a turn of it is all that is awaited)
            await asyncio.sleep(0)


def holder(served: Served, request_id: str) -> Any:
    """Whose the id is, as (gateway, handle)."""
    owner = served.cell.gateways.owners.find(request_id)
    return owner and owner.key


async def test_a_request_runs_to_its_end(served: Served) -> None:
    gateway, _ = await served.gateway(), await served.worker()
    await gateway.send(submits=[submit()])
    assert await gateway.finished(1) == EXPECTED
    assert not served.cell.core.requests
    assert len(served.cell.gateways.owners) == 0


async def test_steps_run_ahead_by_two(served: Served) -> None:
    gateway, worker = await served.gateway(), await served.worker(run=False)
    await gateway.send(submits=[submit()])
    first, second = await worker.next_step(), await worker.next_step()
    assert (first.number, second.number) == (1, 2)
    assert list(first.num_prefill_tokens) == [6]
    assert list(second.num_prefill_tokens) == [0], "a decode row, issued before the first token is known"
    assert served.cell.core.plan("w1") is None, "no third before the first is answered"
    await worker.answer(first)
    assert (await worker.next_step()).number == 3


async def test_results_of_another_epoch_are_dropped(served: Served) -> None:
    gateway, worker = await served.gateway(), await served.worker(run=False)
    await gateway.send(submits=[submit()])
    step = await worker.next_step()
    await worker.answer(step, epoch=worker.welcome.epoch + 1)
    await worker.answer(step, term=worker.welcome.term - 1)
    await worker.heartbeat()
    await until(lambda: served.cell.links["w1"].last_heard > 0)
    assert len(served.cell.core.workers["w1"].in_flight) == 2
    served.tasks.append(asyncio.create_task(worker.run()))
    worker.sequences.clear()
    await worker.answer(step)
    assert await gateway.finished(1) == EXPECTED


async def test_a_lost_worker_s_sequences_resume_on_another(served: Served) -> None:
    gateway, first = await served.gateway(), await served.worker("w1", run=False)
    await gateway.send(submits=[submit()])
    for _ in range(2):
        await first.answer(await first.next_step())
    outputs = await gateway.outputs_of(1, lambda output: 101 in output.token_ids)
    first.call.cancel()
    second = await served.worker("w2")
    rest = await gateway.outputs_of(1, lambda output: output.finish_reason)
    tokens = [token for output in outputs + rest for token in output.token_ids]
    assert tokens == EXPECTED
    assert rest[-1].resumptions == 1
    assert list(second.steps[0].admissions[0].token_ids)[6:] == [100, 101]
    assert second.steps[0].admissions[0].num_prompt_tokens == 6


async def test_a_new_attachment_of_the_same_worker_ends_the_old(served: Served) -> None:
    gateway, old = await served.gateway(), await served.worker("w1", run=False)
    await gateway.send(submits=[submit()])
    await old.next_step()
    new = await served.worker("w1")
    assert new.welcome.epoch > old.welcome.epoch
    assert await gateway.finished(1) == EXPECTED
    while (message := await old.call.read()) is not grpc.aio.EOF:
        assert message.HasField("step") or message.HasField("draft_workers")


async def test_a_result_that_does_not_match_its_step_costs_the_worker_its_place(served: Served) -> None:
    gateway, worker = await served.gateway(), await served.worker("w1", run=False)
    await gateway.send(submits=[submit()])
    await worker.answer(await worker.next_step(), number=7)
    await until(lambda: "w1" not in served.cell.links)
    await served.worker("w2")
    assert await gateway.finished(1) == EXPECTED


async def test_a_frozen_worker_is_left(served: Served) -> None:
    gateway, _ = await served.gateway(), await served.worker("w1", run=False)
    await gateway.send(submits=[submit()])
    await until(lambda: served.cell.core.num_running == 1)
    served.cell.tick(asyncio.get_running_loop().time() + 2.9)
    assert "w1" in served.cell.links
    served.cell.tick(asyncio.get_running_loop().time() + 3.1)
    assert "w1" not in served.cell.links
    await served.worker("w2")
    assert await gateway.finished(1) == EXPECTED


async def test_a_scheduler_that_stood_still_blames_nobody(served: Served) -> None:
    await served.worker("w1")
    served.cell.tick(asyncio.get_running_loop().time() + 60, paused=True)
    assert "w1" in served.cell.links


async def test_cancelling_frees_everything(served: Served) -> None:
    gateway, worker = await served.gateway(), await served.worker(run=False)
    await gateway.send(submits=[submit(max_tokens=50)])
    steps = [await worker.next_step(), await worker.next_step()]
    await gateway.send(cancels=[scheduler_pb2.Cancel(handle=1)])
    await until(lambda: not served.cell.core.requests)
    assert served.cell.core.workers["w1"].pool.num_referenced > 0, "issued steps still contain it"
    for step in steps:
        await worker.answer(step)
    await until(lambda: served.cell.core.workers["w1"].pool.num_referenced == 0)


async def test_one_id_cannot_live_twice(served: Served) -> None:
    gateway, _ = await served.gateway(), await served.worker(run=False)
    other = await served.gateway("g2")
    await gateway.send(submits=[submit(1)])
    await until(lambda: served.cell.gateways.owners.find("r1"))
    await other.send(submits=[submit(7, request_id="r1")])
    assert (await other.error(7)).code == code_pb2.ALREADY_EXISTS
    assert holder(served, "r1") == ("g1", 1)


async def test_a_higher_attempt_supersedes_silently(served: Served) -> None:
    gateway, worker = await served.gateway(), await served.worker(run=False)
    await gateway.send(submits=[submit(1)])
    await worker.next_step()
    again = submit(2, request_id="r1", attempt=2)
    again.choices[0].token_ids.extend([100, 101])
    await gateway.send(submits=[again])
    served.tasks.append(asyncio.create_task(worker.run()))
    worker.sequences.clear()
    await worker.answer(worker.steps[0])
    outputs = await gateway.outputs_of(2, lambda output: output.finish_reason)
    assert [token for output in outputs for token in output.token_ids] == EXPECTED[2:]
    assert outputs[0].first_token_index == 2
    assert not any(output.HasField("error") for response in gateway.responses for output in response.outputs)


async def test_a_lost_gateway_s_requests_are_kept_for_the_grace_then_cancelled(served: Served) -> None:
    gateway, _ = await served.gateway(), await served.worker(run=False)
    await gateway.send(submits=[submit(1), submit(2)])
    await until(lambda: len(served.cell.gateways.owners) == 2)
    gateway.call.cancel()
    await until(lambda: "g1" not in served.cell.gateways.sessions)
    assert len(served.cell.gateways.owners) == 2
    other = await served.gateway("g2")
    await other.send(submits=[submit(9, request_id="r1", attempt=1)])
    await until(lambda: holder(served, "r1") == ("g2", 9))
    await until(lambda: len(served.cell.gateways.owners) == 1)
    assert served.cell.gateways.owners.find("r2") is None
    assert set(served.cell.core.requests) == {("g2", 9)}


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"prompt": 200}, code_pb2.INVALID_ARGUMENT, "prompt"),
        ({"prompt": 100, "max_tokens": 60}, code_pb2.INVALID_ARGUMENT, "stop.max_tokens"),
    ],
)
async def test_what_can_never_fit_is_refused_at_once(served: Served, fields, code, field) -> None:
    gateway, _ = await served.gateway(), await served.worker()
    await gateway.send(submits=[submit(1, **fields), submit(2)])
    error = await gateway.error(1)
    assert error.code == code
    assert field in str(error.details)
    assert await gateway.finished(2) == EXPECTED


async def test_a_deadline_passes_in_the_queue(served: Served) -> None:
    gateway = await served.gateway()
    await gateway.send(submits=[submit(1, remaining_s=0.05)])
    assert (await gateway.error(1)).code == code_pb2.DEADLINE_EXCEEDED


@pytest.mark.parametrize("settings", [SchedulerConfig(port=0, max_waiting=4)])
async def test_a_full_queue_refuses_with_retry_info(served: Served) -> None:
    gateway = await served.gateway()
    await gateway.send(submits=[submit(handle) for handle in range(1, 21)])
    error = await gateway.error(5)
    assert error.code == code_pb2.RESOURCE_EXHAUSTED
    assert any(detail.type_url.endswith("RetryInfo") for detail in error.details)
    await until(lambda: len(served.cell.gateways.owners) == 4)
    await served.worker()
    assert await gateway.finished(1) == EXPECTED


async def test_a_higher_term_seen_by_a_peer_makes_the_leader_acquire_anew(served: Served) -> None:
    term = served.cell.term
    worker = await served.worker("w1")
    gateway = await served.gateway("g1", highest_term=term + 1000)
    assert served.cell.term == term + 1001
    assert gateway.responses[0].welcome.term == term + 1001
    await until(lambda: "w1" not in served.cell.links)
    assert worker.welcome.term == term


async def test_models_are_told_when_workers_come_and_go(served: Served) -> None:
    gateway = await served.gateway()
    assert not (await gateway.read()).models.models
    worker = await served.worker("w1", hello={"fingerprint": "x"})
    model = (await gateway.read()).models.models[0]
    assert (model.name, model.workers, model.max_model_len, model.vocab_size) == ("m", 1, 128, 1000)
    assert (model.max_sequence_tokens, list(model.fingerprints)) == (256, ["x"])
    worker.call.cancel()
    assert (await gateway.read()).models.models[0].workers == 0


@pytest.mark.parametrize("mode", [0, types_pb2.SPECULATION_MODE_NGRAM, types_pb2.SPECULATION_MODE_MODEL])
async def test_who_drafts_reaches_the_worker(served: Served, mode: Any) -> None:
    gateway, worker = await served.gateway(), await served.worker(run=False)
    asking = submit(1)
    asking.speculation.mode = mode
    await gateway.send(submits=[asking])
    assert (await worker.next_step()).admissions[0].speculation_mode == mode


async def test_workers_are_told_where_draft_workers_are(served: Served) -> None:
    worker = await served.worker("w1", run=False)
    call = scheduler_pb2_grpc.SchedulerServiceStub(served.channel).Announce()
    hello = scheduler_pb2.DraftWorkerHello(worker_id="d1", model="m", address="127.0.0.1:1", proposer="ngram")
    await call.write(scheduler_pb2.AnnounceRequest(hello=hello))
    assert (await call.read()).term == served.cell.term
    lists = [await worker.call.read(), await worker.call.read()]
    assert [list(message.draft_workers.addresses) for message in lists] == [[], ["127.0.0.1:1"]]
    assert all(message.draft_workers.max_draft_tokens == 7 for message in lists)
    call.cancel()
    assert list((await worker.call.read()).draft_workers.addresses) == []


@pytest.mark.parametrize("kind", ["gateway", "worker", "draft worker"])
async def test_peers_of_another_cell_are_refused_by_name(served: Served, kind: str) -> None:
    stub = scheduler_pb2_grpc.SchedulerServiceStub(served.channel)
    term = served.cell.term
    calls: dict[str, tuple[Any, Any]] = {
        "gateway": (stub.Session, scheduler_pb2.SessionRequest(hello={"gateway_id": "g", "cell": "b"})),
        "worker": (stub.Attach, scheduler_pb2.AttachRequest(hello={"worker_id": "w", "cell": "b"})),
        "draft worker": (stub.Announce, scheduler_pb2.AnnounceRequest(hello={"worker_id": "d", "cell": "b"})),
    }
    call, message = calls[kind]
    message.hello.highest_term = term + 5
    stream = call()
    await stream.write(message)
    assert await stream.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "hello.cell: this scheduler is of cell 'main', not 'b'" in await stream.details()
    assert served.cell.term == term, "another cell's terms are not ours"


async def test_streams_that_do_not_begin_with_hello_are_refused(served: Served) -> None:
    stub = scheduler_pb2_grpc.SchedulerServiceStub(served.channel)
    for call, message in (
        (stub.Session(), scheduler_pb2.SessionRequest()),
        (stub.Attach(), scheduler_pb2.AttachRequest(heartbeat=scheduler_pb2.Heartbeat())),
        (stub.Announce(), scheduler_pb2.AnnounceRequest()),
    ):
        await call.write(message)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("field", ["num_blocks", "block_size", "max_sequences", "max_model_len"])
async def test_a_hello_that_cannot_work_is_refused_by_name(served: Served, field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=f"hello.{field}"):
        await served.worker(hello={field: 0})


@pytest.mark.parametrize("field", ["num_blocks", "max_sequences"])
async def test_a_hello_too_large_to_keep_account_of_is_refused_by_name(served: Served, field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=f"hello.{field}"):
        await served.worker(hello={field: 2**32 - 1})


async def test_a_term_that_no_clock_gives_moves_nothing(served: Served) -> None:
    term = served.cell.term
    await served.gateway("g1", highest_term=2**64 - 1)
    await served.worker(hello={"highest_term": 2**63})
    assert served.cell.term == term


async def test_prompt_logprobs_are_computed_once_for_n_choices_and_never_from_cache(served: Served) -> None:
    gateway, worker = await served.gateway(), await served.worker()
    message = submit(1, prompt=9)
    message.params.prompt_logprobs = 1
    message.choices.add(index=1)
    await gateway.send(submits=[message])
    await gateway.outputs_of(1, lambda output: output.choice == 1 and output.finish_reason)
    admissions = [admission for step in worker.steps for admission in step.admissions]
    assert [admission.params.HasField("prompt_logprobs") for admission in admissions] == [True, False]
    assert [admission.num_computed_tokens for admission in admissions] == [0, 8]


async def test_a_gateway_that_does_not_read_gets_one_message_per_choice(served: Served) -> None:
    session = served.cell.open_session("slow")
    await served.worker()
    served.cell.gateways.submit(session, submit(1, max_tokens=40))
    await until(lambda: not served.cell.core.requests)
    response = session.next_message()
    assert response is not None
    assert [list(output.token_ids) for output in response.outputs] == [[100 + index for index in range(40)]]
