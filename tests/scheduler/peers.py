"""Scripted gateways and workers that speak to it over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from tandem.v1 import admin_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc

from cluster.state import MemoryState
from scheduler.leadership import Leadership
from scheduler.loop import Cell


async def leading(cell: Cell) -> Leadership:
    """Make a scheduler on its own lead its cell."""
    leadership = Leadership(cell, MemoryState(), cell_name="main", scheduler_id="s1", address="s1:1", ttl_s=1.5)
    await leadership.start()
    return leadership


def spell_out(response: Any) -> None:
    """Plain outputs as outputs, so that a test need not know in which form a token came."""
    plain = response.plain_outputs
    for handle, index, token_id in zip(plain.handles, plain.token_indices, plain.token_ids, strict=True):
        response.outputs.add(handle=handle, first_token_index=index, token_ids=[token_id])
    response.ClearField("plain_outputs")


@dataclass
class Gateway:
    """A scripted gateway's end of a session."""

    call: Any
    responses: list[Any] = field(default_factory=list)

    async def send(self, **fields: Any) -> None:
        await self.call.write(scheduler_pb2.SessionRequest(**fields))

    async def read(self) -> Any:
        response = await asyncio.wait_for(self.call.read(), 60)
        assert response is not grpc.aio.EOF, "the session ended"
        spell_out(response)
        self.responses.append(response)
        return response

    async def outputs_of(self, handle: int, until: Any) -> list[Any]:
        """Collect outputs of a request until `until(output)`."""
        outputs = []
        while True:
            for output in (await self.read()).outputs:
                if output.handle == handle:
                    outputs.append(output)
                    if until(output):
                        return outputs

    async def finished(self, handle: int) -> list[int]:
        """All tokens of a single-choice request."""
        outputs = await self.outputs_of(handle, lambda output: output.finish_reason or output.HasField("error"))
        assert not outputs[-1].HasField("error"), outputs[-1].error
        tokens: list[int] = []
        for output in outputs:
            assert output.first_token_index == len(tokens)
            tokens += output.token_ids
        return tokens

    async def error(self, handle: int) -> Any:
        return (await self.outputs_of(handle, lambda output: output.HasField("error")))[-1].error


@dataclass
class Worker:
    """A scripted worker: token i of an output is i + 100, so that gaps and repeats show."""

    call: Any
    welcome: Any
    sequences: dict[int, Any] = field(default_factory=dict)
    steps: list[Any] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)

    async def next_step(self) -> Any:
        while True:
            message = await asyncio.wait_for(self.call.read(), 5)
            assert message is not grpc.aio.EOF, "the attachment ended"
            if message.HasField("step"):
                self.steps.append(message.step)
                return message.step
            self.others.append(message)

    async def answer(self, step: Any, spoil: Callable[[Any], None] = lambda result: None, **changes: Any) -> None:
        """Run the step as the protocol says and send its result, after `spoil` had it."""
        for slot in step.released_slots:
            self.sequences.pop(slot, None)
        for admission in step.admissions:
            self.sequences[admission.slot] = [
                list(admission.token_ids),
                admission.num_computed_tokens,
                admission,
                False,
            ]
        result = scheduler_pb2.StepResult(
            term=step.term, epoch=step.epoch, number=step.number, slots=step.slots, duration_s=0.001
        )
        for slot, prefill in zip(step.slots, step.num_prefill_tokens, strict=True):
            state = self.sequences.get(slot)
            emitted = 0
            finish: Any = 0
            if state is not None and not state[3]:
                tokens, computed, admission, _ = state
                computed = min(len(tokens), computed + prefill) if prefill else len(tokens)
                if computed == len(tokens):
                    output = len(tokens) - admission.num_prompt_tokens
                    tokens.append(output + 100)
                    result.token_ids.append(output + 100)
                    emitted = 1
                    finish = 2 if output + 1 == admission.params.max_tokens else 0
                state[1], state[3] = computed, bool(finish)
            result.num_tokens.append(emitted)
            result.finish_reasons.append(finish)
            result.num_drafted_tokens.append(0)
            result.num_accepted_tokens.append(0)
        for name, value in changes.items():
            setattr(result, name, value)
        spoil(result)
        await self.call.write(scheduler_pb2.AttachRequest(result=result))

    async def run(self) -> None:
        """Answer every step until cancelled or cut off."""
        with contextlib.suppress(grpc.RpcError, AssertionError, asyncio.CancelledError):
            while True:
                await self.answer(await self.next_step())

    async def heartbeat(self, **fields: Any) -> None:
        await self.call.write(scheduler_pb2.AttachRequest(heartbeat=scheduler_pb2.Heartbeat(**fields)))


@dataclass
class Served:
    """A running scheduler."""

    cell: Cell
    address: str
    channel: Any
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def admin(self) -> Any:
        return admin_pb2_grpc.AdminServiceStub(self.channel)

    async def gateway(self, gateway_id: str = "g1", highest_term: int = 0) -> Gateway:
        call = scheduler_pb2_grpc.SchedulerServiceStub(self.channel).Session()
        gateway = Gateway(call)
        hello = scheduler_pb2.SessionHello(gateway_id=gateway_id, highest_term=highest_term)
        await gateway.send(hello=hello)
        assert (await gateway.read()).welcome.term == self.cell.term
        return gateway

    async def worker(self, worker_id: str = "w1", run: bool = True, hello: dict[str, Any] | None = None) -> Worker:
        call = scheduler_pb2_grpc.SchedulerServiceStub(self.channel).Attach()
        facts: dict[str, Any] = {
            "model": "m",
            "fingerprint": "f",
            "num_blocks": 64,
            "block_size": 4,
            "max_sequences": 8,
        }
        facts |= {"max_model_len": 128, "vocab_size": 1000, **(hello or {})}
        message = scheduler_pb2.WorkerHello(worker_id=worker_id, boot_id="b", **facts)
        await call.write(scheduler_pb2.AttachRequest(hello=message))
        response = await asyncio.wait_for(call.read(), 5)
        assert response is not grpc.aio.EOF, await call.details()
        worker = Worker(call, response.welcome)
        if run:
            self.tasks.append(asyncio.create_task(worker.run()))
        return worker

    def kill(self, worker: Worker) -> None:
        """Break its stream as a death does."""
        self.heard_just_now(worker)
        worker.call.cancel()

    def heard_just_now(self, worker: Worker) -> None:
        """No silence before whatever comes now, nor a pause of ours, however late this machine is."""
        (link,) = (one for one in self.cell.links.values() if one.epoch == worker.welcome.epoch)
        link.last_heard, link._silent_until = math.inf, -math.inf
        self.cell._blameless_until = 0.0
        self.cell._note_pause = lambda now: False  # type: ignore[method-assign]


def submit(handle: int = 1, prompt: int = 6, max_tokens: int | None = 5, **fields: Any) -> Any:
    """A Submit for model m."""
    message = scheduler_pb2.Submit(handle=handle, request_id=f"r{handle}", model="m")
    message.prompt_token_ids.extend(range(10, 10 + prompt))
    message.choices.add(index=0)
    if max_tokens is not None:
        message.params.max_tokens = max_tokens
    for name, value in fields.items():
        setattr(message, name, value)
    return message
