"""A whole cluster of real processes with the fake engine, for tests to use, kill, stop and load.

The expected answer comes from `expected_tokens`: the fake engine and the sampler in a plain loop of one sequence, with
none of the scheduler's, the worker's or the gateway's code.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc
import numpy as np
from tandem.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc

from cluster.channel import connect

MODEL = "fake"
START_TIMEOUT_S = 180.0


@dataclass
class Process:
    """One child, its ready line read."""

    name: str
    child: asyncio.subprocess.Process
    address: str
    log: Path

    @classmethod
    async def start(cls, folder: Path, name: str, module: str, **flags: Any) -> Process:
        log = folder / f"{name}.log"
        arguments = [f"--{key.replace('_', '-')}={value}" for key, value in flags.items()]
        with log.open("ab") as stderr:
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", module, *arguments, stdout=asyncio.subprocess.PIPE, stderr=stderr,
                env=os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
            )  # fmt: skip
        process = cls(name, child, "", log)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                assert child.stdout is not None
                while not (line := await child.stdout.readline()).startswith(b"READY"):
                    if not line:
                        raise AssertionError(f"{name} ended before it was ready:\n{process.tail()}")
        except TimeoutError:
            child.kill()
            raise AssertionError(f"{name} was not ready in {START_TIMEOUT_S} s:\n{process.tail()}") from None
        process.address = line.decode().split()[-1]
        return process

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-3000:]

    def kill(self) -> None:
        """SIGKILL."""
        self.child.kill()

    def signal(self, number: int) -> None:
        self.child.send_signal(number)

    async def stop(self) -> int:
        """End it in order; the exit status."""
        if self.child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.child.send_signal(signal.SIGCONT)
                self.child.terminate()
            try:
                async with asyncio.timeout(15):
                    await self.child.wait()
            except TimeoutError:
                self.child.kill()
        return await self.child.wait()


OWN = "own"


@dataclass
class Cluster:
    """The processes, and a client's view of them."""

    folder: Path
    model: Path
    worker_flags: dict[str, Any] = field(default_factory=dict)
    discovery: dict[str, Any] = field(default_factory=dict)
    """how gateways and workers find schedulers, where that is not the one scheduler's address"""
    processes: dict[str, Process] = field(default_factory=dict)
    channels: list[Any] = field(default_factory=list)

    @classmethod
    async def start(
        cls,
        folder: Path,
        workers: int = 1,
        draft: str | None = None,
        scheduler: dict[str, Any] | None = None,
        model: Path | None = None,
        **flags: Any,
    ) -> Cluster:
        """Scheduler first, then everything else side by side. `flags` are the workers'.

        `draft`: a draft worker's, or OWN: each worker guesses for itself, with the fake draft unless flags say another.
        Without `model`, a folder with real weights, the engine is the fake one. The served name is the same.
        """
        from cli.fake_model import write_fake_model

        flags.setdefault("engine", "fake" if model is None else "transformers")
        if draft == OWN:
            flags, draft = {"draft": "own", "draft_model": "fake", **flags}, None
        if model is None:
            model = folder / MODEL
            write_fake_model(model)
        cluster = cls(folder, model, {"num_blocks": 256, "block_size": 16, "threads": 1, **flags})
        try:
            await cluster.add("scheduler", "scheduler", port=0, **(scheduler or {}))
            starts = [cluster.add_gateway("gateway")]
            starts += [cluster.add_worker(f"worker-{index}") for index in range(workers)]
            if draft is not None:
                starts.append(cluster.add_draft_worker("draft", draft))
            await asyncio.gather(*starts)
            await cluster.until_serving(workers)
        except BaseException:
            await cluster.stop()
            raise
        return cluster

    async def add(self, name: str, module: str, **flags: Any) -> Process:
        process = await Process.start(self.folder, name, module, **flags)
        self.processes[name] = process
        return process

    async def add_gateway(self, name: str, **flags: Any) -> Process:
        flags = {"port": 0, **self._discovery(), "model": f"{MODEL}={self.model}", **flags}
        return await self.add(name, "gateway", **flags)

    async def add_worker(self, name: str, **flags: Any) -> Process:
        flags = {
            **self._discovery(), "worker_id": name, "model": self.model, "served_model_name": MODEL,
            **self.worker_flags, **flags,
        }  # fmt: skip
        return await self.add(name, "worker", **flags)

    async def add_draft_worker(self, name: str, draft: str, **flags: Any) -> Process:
        flags = {
            **self._discovery(), "worker_id": name, "target": MODEL, "target_model": self.model, "draft": draft,
            "port": 0, **flags,
        }  # fmt: skip
        return await self.add(name, "draft_worker", **flags)

    def _discovery(self) -> dict[str, Any]:
        return self.discovery or {"scheduler": self.scheduler}

    async def restore(self, workers: int, draft: str | None = None) -> None:
        """Everything that was killed, stopped or drained is back."""
        names = [f"worker-{index}" for index in range(workers)]
        for process in self.processes.values():
            if process.child.returncode is None:
                process.signal(signal.SIGCONT)
        dead = {name for name, process in self.processes.items() if process.child.returncode is not None}
        starts = [self.add_worker(name) for name in names if name in dead]
        if draft is not None and "draft" in dead:
            starts.append(self.add_draft_worker("draft", draft))
        if "gateway" in dead:
            starts.append(self.add_gateway("gateway"))
        await asyncio.gather(*starts)
        await self.until_serving(workers)

    @property
    def scheduler(self) -> str:
        return self.processes["scheduler"].address

    def stub(self, gateway: str = "gateway") -> Any:
        """A fresh connection to a gateway."""
        channel = connect(self.processes[gateway].address)
        self.channels.append(channel)
        return generation_pb2_grpc.GenerationServiceStub(channel)

    @property
    def has_drafts(self) -> bool:
        """Whether workers are to have drafts, of a draft worker or their own."""
        return self.worker_flags.get("draft") == "own" or any(name.startswith("draft") for name in self.processes)

    async def status(self) -> Any:
        """The scheduler's own account."""
        channel = connect(self.scheduler)
        try:
            return await admin_pb2_grpc.AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=10)
        finally:
            await channel.close()

    async def until_status(self, condition: Callable[[Any], bool], timeout_s: float = 20.0) -> Any:
        """Poll the status until a condition holds."""
        status = None
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        status = await self.status()
                        if condition(status):
                            return status
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"the status never got there; the last one:\n{status}") from None

    async def until_serving(self, workers: int, drafting: bool | None = None) -> None:
        """Wait until so many workers serve and the gateway knows."""
        wanted = self.has_drafts if drafting is None else drafting
        await self.until_status(
            lambda status: len(status.workers) == workers and all(one.drafting == wanted for one in status.workers)
        )
        stub = self.stub()
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    response = await stub.GetModel(generation_pb2.GetModelRequest(model=MODEL))
                    if response.model.workers == workers:
                        return
                await asyncio.sleep(0.02)

    async def assert_baseline(self) -> None:
        """Nothing waits, runs or holds a block, and every block is accounted for."""
        status = await self.until_status(
            lambda status: (
                not (
                    status.waiting
                    or status.running
                    or any(one.referenced_blocks or one.steps_in_flight for one in status.workers)
                )
            )
        )
        for worker in status.workers:
            assert worker.free_blocks + worker.cached_blocks == worker.total_blocks

    def print_logs(self) -> None:
        """Their ends, for whoever looks into a failure."""
        for process in self.processes.values():
            print(f"--- {process.name}\n{process.tail()}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.print_logs()
        await self.stop()

    async def stop(self) -> None:
        for channel in self.channels:
            await channel.close()
        schedulers = [name for name in self.processes if name.startswith("scheduler")]
        others = [name for name in self.processes if name not in schedulers]
        for names in (others, schedulers):
            await asyncio.gather(*(self.processes[name].stop() for name in names))


def request(prompt: list[int] | str = "Once", max_tokens: int = 32, **fields: Any) -> Any:
    """A GenerateStreamRequest for the fake model that ignores end of sequence."""
    message = generation_pb2.GenerateStreamRequest(model=MODEL)
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.token_ids.ids.extend(prompt)
    message.stop.max_tokens = max_tokens
    message.stop.ignore_eos = True
    message.sampling.temperature = fields.pop("temperature", 0.0)
    message.sampling.seed = fields.pop("seed", 7)
    for name in ("top_k", "top_p", "repetition_penalty", "frequency_penalty", "presence_penalty"):
        if name in fields:
            setattr(message.sampling, name, fields.pop(name))
    for name, value in fields.items():
        setattr(message, name, value)
    return message


@dataclass
class Answer:
    """A stream as a client received it; receiving checks that indices are gapless and nothing comes twice."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    finish: dict[int, int] = field(default_factory=dict)
    usage: Any = None
    seed: int = 0

    def take(self, response: Any) -> None:
        self.seed = response.seed or self.seed
        for delta in response.deltas:
            tokens = self.tokens.setdefault(delta.index, [])
            if delta.token_ids:
                assert delta.first_token_index == len(tokens), "a gap or a repeated token"
            tokens += delta.token_ids
            self.texts[delta.index] = self.texts.get(delta.index, "") + delta.text
            if delta.finish_reason:
                assert delta.index not in self.finish, "finished twice"
                self.finish[delta.index] = delta.finish_reason
        if response.HasField("usage"):
            assert self.usage is None, "usage came twice"
            self.usage = response.usage


async def receive(call: Any, on_token: Callable[[int], None] | None = None) -> Answer:
    """Take a stream to its end; `on_token` is told how many tokens of choice 0 have come."""
    answer = Answer()
    async for response in call:
        answer.take(response)
        if on_token is not None:
            on_token(len(answer.tokens.get(0, [])))
    assert answer.usage is not None, "the stream ended without usage"
    return answer


def expected_tokens(prompt: list[int], max_tokens: int, choice: int = 0, seed: int = 7, **params: Any) -> list[int]:
    """What the answer must be: the fake engine and the sampler in a loop of one sequence."""
    from engine.batch import Batch
    from engine.fake import FakeEngine
    from engine.noise import choice_seed
    from engine.sampler import SampleRow, sample
    from engine.sampling_params import SamplingParams

    size = 16
    num_blocks = -(-(len(prompt) + max_tokens) // size)
    engine = FakeEngine(num_blocks=num_blocks, block_size=size)
    table = np.arange(num_blocks, dtype=np.int32)
    sampling = SamplingParams(**{"temperature": 0.0, **params})
    known, computed = list(prompt), 0
    for index in range(max_tokens):
        new = np.array(known[computed:], dtype=np.int32)
        positions = np.arange(computed, len(known), dtype=np.int32)
        logits = engine.forward(
            Batch(
                token_ids=new,
                positions=positions,
                slot_mapping=positions.astype(np.int64),
                query_starts=np.array([0, len(new)], dtype=np.int32),
                context_lens=np.array([len(known)], dtype=np.int32),
                block_tables=table[None],
                logit_indices=np.array([len(new) - 1], dtype=np.int64),
            )
        )
        row = SampleRow(sampling, choice_seed(seed, choice), index, known, len(prompt), [])
        computed = len(known)
        token = sample(logits, [row]).token_ids[0]
        assert token is not None
        known.append(token)
    return known[len(prompt) :]


@contextlib.asynccontextmanager
async def running(folder: Path, **options: Any) -> AsyncIterator[Cluster]:
    """A cluster for one test or module; on failure the logs' ends are shown."""
    async with await Cluster.start(folder, **options) as cluster:
        yield cluster
