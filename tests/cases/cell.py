"""A whole cell in one process: gateway, scheduler, worker and, if wanted, a draft worker, each behind its own port.

Nothing is replaced but the model: `ForcedEngine` is the fake engine, save that it can be told which tokens to like best
after a prompt, that it counts, and that a test can hold it. What clients get travels all of the way, over real gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from tandem.v1 import draft_pb2_grpc, generation_pb2, generation_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc

from cli.fake_model import SPECIAL_TOKENS, byte_symbols, write_fake_model
from cluster.channel import connect
from cluster.leaders import Leaders
from cluster.server import bind, create_server
from draft_worker.drafting import Drafter, DraftThread
from draft_worker.servicer import DraftServicer
from drafting.mirrors import MirrorTable
from drafting.proposer import Proposer
from engine.batch import Batch
from engine.fake import FakeEngine
from engine.noise import choice_seed
from gateway.__main__ import Gateway
from gateway.config import GatewayConfig
from gateway.text import ModelText
from scheduler.config import SchedulerConfig
from scheduler.loop import Cell
from scheduler.servicer import SchedulerServicer
from tests.integration.harness import MODEL
from tests.scheduler.peers import leading
from worker.attachment import Attachment
from worker.draft_links import DraftLinks
from worker.executor import Executor, NoDrafting
from worker.sequences import SequenceTable, limits_of
from worker.stepping import StepThread
from worker.steps import StepOutcome

EOS = 257
PIECES = ("QR", "TU", "a b", " cd", "the", " end", "Rome", " Rome")
"""tokens of several bytes beyond the fake model's own, which the tokenizer never makes of a prompt"""
PIECE_IDS = {piece: 260 + index for index, piece in enumerate(PIECES)}
VOCAB_SIZE = 260 + len(PIECES)


def write_model(folder: Path) -> Path:
    """The fake model's folder with PIECES in its vocabulary."""
    write_fake_model(folder)
    symbols = byte_symbols()
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {"".join(symbols[byte] for byte in piece.encode()): token_id for piece, token_id in PIECE_IDS.items()}
    # Added tokens keep their ids only where the model knows them, or where they come last.
    vocabulary |= {content: token_id for token_id, content in SPECIAL_TOKENS.items()}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": VOCAB_SIZE}))
    return folder


class ForcedEngine(FakeEngine):
    """`scripts`: what to say after a prompt, by the prompt's first token: (the prompt's length, token ids)."""

    def __init__(self, scripts: Mapping[int, tuple[int, Sequence[int]]] | None = None, **options: Any) -> None:
        options = {"num_blocks": 64, "block_size": 16, "vocab_size": VOCAB_SIZE, **options}
        super().__init__(**options)
        self.scripts = dict(scripts or {})
        self.steps = 0
        self.rows: Counter[int] = Counter()
        """steps with a row of the sequence that begins with a token"""
        self.prefilled: Counter[int] = Counter()
        """computed tokens of prompts with a script, and all tokens of others, by the sequence's first token"""
        self.entered = threading.Event()
        self._permits = threading.Semaphore(1_000_000)
        self._first = np.zeros(self.info.num_blocks * self.info.block_size, dtype=np.int64)

    def hold(self) -> None:
        """Every step from now on waits for `release`."""
        self.entered.clear()
        self._permits = threading.Semaphore(0)

    def release(self, steps: int = 1_000_000) -> None:
        self._permits.release(steps)

    def forward(self, batch: Batch) -> torch.Tensor:
        self.entered.set()
        assert self._permits.acquire(timeout=60)
        self.steps += 1
        at_start = batch.positions == 0
        self._first[batch.slot_mapping[at_start]] = batch.token_ids[at_start]
        logits = super().forward(batch)
        for row, table in enumerate(batch.block_tables):
            start, end = int(batch.query_starts[row]), int(batch.query_starts[row + 1])
            first = int(self._first[int(table[0]) * self.info.block_size])
            self.rows[first] += 1
            length, script = self.scripts.get(first, (1 << 30, ()))
            self.prefilled[first] += int((batch.positions[start:end] < length).sum())
            for index, flat in enumerate(batch.logit_indices.tolist()):
                at = int(batch.positions[flat]) + 1 - length
                if start <= flat < end and 0 <= at < len(script):
                    logits[index] = -30.0
                    logits[index, script[at]] = 40.0
        return logits


@dataclass
class WholeCell:
    """The parts, and a client's stub."""

    scheduler: Cell
    gateway: Gateway
    executor: Executor
    engine: Any
    channel: grpc.aio.Channel
    scheduler_address: str

    @property
    def stub(self) -> Any:
        return generation_pb2_grpc.GenerationServiceStub(self.channel)

    async def whole(self, message: Any) -> Any:
        """The same request as GenerateStream's, answered at once."""
        return await self.stub.Generate(generation_pb2.GenerateRequest.FromString(message.SerializeToString()))

    async def until_idle(self) -> None:
        """No request, no running step, no referenced block; and everything adds up."""
        core = self.scheduler.core
        await until(
            lambda: not core.requests and not any(w.in_flight or w.pool.num_referenced for w in core.workers.values())
        )
        core.check_integrity()


async def until(condition: Callable[[], Any], timeout_s: float = 30.0) -> None:
    """Wait for what other tasks and threads bring about."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  (parts of what is watched belong to other threads)
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def whole_cell(
    folder: Path,
    engine: Any = None,
    draft: Callable[[], Proposer] | None = None,
    scheduler: Mapping[str, Any] | None = None,
    gateway: Mapping[str, Any] | None = None,
) -> AsyncIterator[WholeCell]:
    """`folder`: as write_model makes it; `engine`: a ForcedEngine unless given; `draft` makes a proposer."""
    async with contextlib.AsyncExitStack() as stack:
        cell = Cell(SchedulerConfig(port=0, **(scheduler or {})))
        server = create_server()
        leadership = await leading(cell)
        stack.push_async_callback(leadership.close)
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(SchedulerServicer(cell, leadership), server)
        address = f"127.0.0.1:{bind(server, '127.0.0.1', 0)}"
        await server.start()
        stack.push_async_callback(server.stop, 0)
        executor = await stack.enter_async_context(_worker(address, engine or ForcedEngine(), draft is not None))
        if draft is not None:
            hello = scheduler_pb2.DraftWorkerHello(
                worker_id="d", model=MODEL, address=await stack.enter_async_context(_draft_worker(draft))
            )
            cell.announce(hello)
        config = GatewayConfig(port=0, scheduler=address, model=(f"{MODEL}={folder}",), **(gateway or {}))
        front = Gateway(config, {MODEL: ModelText(MODEL, folder)})
        channel = connect(f"127.0.0.1:{await front.start()}")
        stack.push_async_callback(front.close)
        stack.push_async_callback(front.server.stop, 0)
        stack.push_async_callback(channel.close)
        await until(lambda: front.catalog.num_workers(MODEL))
        await until(lambda: draft is None or all(worker.drafting for worker in cell.core.workers.values()))
        yield WholeCell(cell, front, executor, executor.engine, channel, address)


@contextlib.asynccontextmanager
async def _worker(scheduler: str, engine: Any, drafting: bool) -> AsyncIterator[Executor]:
    """A worker as `worker.__main__` puts it together."""
    parts: list[Attachment] = []

    def send_outcome(outcome: StepOutcome) -> None:
        parts[0].send_outcome(outcome)

    def send_heartbeat() -> None:
        parts[0].send_heartbeat()

    steps = StepThread(send_outcome)
    limits = limits_of(engine.info)
    link = None
    if drafting:
        link = DraftLinks(worker_id="w", model=MODEL, vocab_size=limits.vocab_size, on_change=send_heartbeat)
    executor = Executor(engine, SequenceTable(limits, choice_seed), link or NoDrafting())
    steps.adopt(executor)
    parts.append(
        Attachment(
            leaders=Leaders([scheduler]),
            worker_id="w",
            boot_id="b",
            model=MODEL,
            steps=steps,
            executor=executor,
            drafts=link,
        )
    )
    tasks = [asyncio.ensure_future(parts[0].run())]
    if link is not None:
        tasks.append(asyncio.ensure_future(link.run()))
    try:
        yield executor
    finally:
        if isinstance(engine, ForcedEngine):
            engine.release()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        steps.stop()


@contextlib.asynccontextmanager
async def _draft_worker(make: Callable[[], Proposer]) -> AsyncIterator[str]:
    """A draft worker's parts; its address."""
    servicer = DraftServicer(MODEL)
    thread = DraftThread(servicer.deliver)
    servicer.inbox = thread.inbox
    await thread.start(lambda: Drafter(make(), MirrorTable(64, 8)))
    server = create_server()
    draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
        thread.inbox.stop()
        await asyncio.wait_for(thread.ended, 10)
