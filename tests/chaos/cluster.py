"""A whole cluster of real processes under `tandem up`'s own supervisor, every link by way of a switchboard.

    gateway-0 (is told where schedulers are)   gateway-1 (finds cells in Redis)
    scheduler-0, scheduler-1                   one leads, the other stands by; Redis
    worker-0, worker-1, draft                  all of them are told where schedulers are

Clients call gateways directly. What dies is started again where it was; Redis only when `redis` is told to.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from tandem.v1 import admin_pb2, admin_pb2_grpc, inspection_pb2, inspection_pb2_grpc

from cli.fake_model import write_fake_model
from cli.lifecycle import RestartPolicy, State
from cli.plan import ChildSpec
from cli.supervisor import NAME, Supervisor
from cluster.channel import connect
from cluster.server import split_address
from tests.chaos.switchboard import Address, Switchboard, Unreachable
from tests.integration.harness import MODEL
from tests.redis_server import RedisServer

SCHEDULERS = ("scheduler-0", "scheduler-1")
GATEWAYS = ("gateway-0", "gateway-1")
WORKERS = ("worker-0", "worker-1")
DRAFT = "draft"
REDIS = "redis"
POLL_S = 0.1
PATIENCE_S = 180.0
"""for what happens by itself within seconds; a loaded machine takes longer"""
BLOCK_SIZE = 16
RESTARTS = RestartPolicy(first_delay_s=0.2, max_delay_s=0.4)


@dataclass(frozen=True, slots=True)
class Options:
    """What is served, and how fast."""

    model: Path | None = None
    """a folder with real weights; None: the fake engine"""
    draft: str = "fake"
    step_ms: float = 4.0
    token_us: float = 20.0
    num_blocks: int = 1024
    kv_mib: float = 0.0
    """that they take"""
    extra: dict[str, dict[str, str]] = field(default_factory=dict)
    """further flags by service"""


class Cluster:
    """See the module's text."""

    def __init__(self, folder: Path, options: Options) -> None:
        self.options = options
        self.redis = RedisServer(folder)
        self.supervisor = Supervisor(self._on_line, RESTARTS)
        self.board = Switchboard(self._pids)
        self.logs: dict[str, list[str]] = {}
        self.restarting_s: list[tuple[float, float]] = []
        """(from, to) of each restart"""
        self._model = options.model or folder / MODEL
        self._gone_since: dict[str, float] = {}
        if options.model is None:
            write_fake_model(self._model)

    async def start(self) -> None:
        """Everything, until it serves."""
        state = f"redis://{await self.board.listen(REDIS, lambda: ('127.0.0.1', self.redis.port))}/0"
        addresses = {name: await self.board.listen(name, self._target(name)) for name in SCHEDULERS}
        await self.supervisor.start(
            [
                self._spec(name, "scheduler", port=0, advertise=address, state=state, token_budget=128,
                           session_grace_s=5, speculation="fixed")
                for name, address in addresses.items()
            ]
        )  # fmt: skip
        known = ",".join(addresses.values())
        draft = await self.board.listen(DRAFT, self._target(DRAFT))
        model = f"{MODEL}={self._model}"
        await self.supervisor.start(
            [
                self._spec(GATEWAYS[0], "gateway", port=0, metrics_port=0, model=model, scheduler=known),
                self._spec(GATEWAYS[1], "gateway", port=0, metrics_port=0, model=model, scheduler="", state=state),
                *(self._worker_spec(name, known) for name in WORKERS),
                self._spec(DRAFT, "draft_worker", port=0, metrics_port=0, worker_id=DRAFT, scheduler=known,
                           advertise=draft, target=MODEL, target_model=self._model, draft=self.options.draft,
                           threads=1, dtype="float32"),
            ]
        )  # fmt: skip
        await self.settled()

    def _worker_spec(self, name: str, known: str) -> ChildSpec:
        options = self.options
        engine = {"engine": "fake", "fake_step_ms": options.step_ms, "fake_token_us": options.token_us}
        if options.model is not None:
            engine = {"engine": "transformers", "dtype": "float32", "device": "cpu"}
        return self._spec(
            name, "worker", worker_id=name, port=0, scheduler=known, model=self._model, served_model_name=MODEL,
            num_blocks=options.num_blocks, block_size=BLOCK_SIZE, max_sequences=64, threads=1, **engine,
        )  # fmt: skip

    def _spec(self, name: str, service: str, **flags: Any) -> ChildSpec:
        flags |= self.options.extra.get(service, {})
        spelt = tuple((key.replace("_", "-"), str(value)) for key, value in flags.items())
        env = (("OMP_NUM_THREADS", "1"), ("MKL_NUM_THREADS", "1"), ("OMP_WAIT_POLICY", "PASSIVE"))
        return ChildSpec(name, service, spelt, env)

    async def stop(self) -> None:
        """Everything, in order where it still can."""
        self.board.heal()
        for name in self.supervisor.members:
            with contextlib.suppress(ProcessLookupError, Unreachable):
                self.signal(name, signal.SIGCONT)
        with contextlib.suppress(AssertionError):
            self.redis.resume()
        self.supervisor.kill()
        await self.supervisor.wait_stopped()
        await self.board.close()
        self.redis.kill()

    # -------------------------------------------------------------------------------------------------- processes

    @property
    def names(self) -> list[str]:
        """Every supervised process."""
        return list(self.supervisor.members)

    def pid(self, name: str) -> int:
        """Of the running process. Raises Unreachable between two."""
        child = self.supervisor.members[name].child
        if child is None:
            raise Unreachable(name)
        return child.pid

    def signal(self, name: str, number: signal.Signals) -> None:
        """To one process."""
        os.kill(self.pid(name), number)

    def address(self, name: str) -> str:
        """Where it itself listens, past the switchboard."""
        return self.supervisor.members[name].address

    def restarts(self, name: str) -> int:
        """How often it was started again, and is ready."""
        member = self.supervisor.members[name]
        return member.lifecycle.num_restarts - int(member.lifecycle.state is not State.READY)

    def gateways(self) -> dict[str, str]:
        """Where clients find gateways."""
        return {name: self.address(name) for name in GATEWAYS}

    def said(self, name: str, text: str) -> int:
        """In how many lines of its log a process has said so."""
        return sum(text in line for line in self.logs.get(name, ()))

    def _pids(self) -> dict[int, str]:
        members = self.supervisor.members.items()
        return {member.child.pid: name for name, member in members if member.child is not None}

    def _target(self, name: str) -> Callable[[], Address]:
        def target() -> Address:
            member = self.supervisor.members.get(name)
            if member is None or member.child is None or member.port is None:
                raise Unreachable(name)
            return split_address(member.address)

        return target

    def _on_line(self, name: str, line: str) -> None:
        self.logs.setdefault(name, []).append(line)
        if name == NAME and " ended (" in line:
            self._gone_since[line.split()[0]] = time.monotonic()

    # ------------------------------------------------------------------------------------------------ observations

    async def status_of(self, name: str) -> Any:
        """A scheduler's account; None if it gives none."""
        channel = connect(self.address(name))
        try:
            with contextlib.suppress(grpc.aio.AioRpcError):
                return await admin_pb2_grpc.AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=2)
        finally:
            await channel.close()
        return None

    async def leader(self) -> tuple[str, Any]:
        """Name and account of who leads under the highest term; ("", None) where nobody does."""
        found = await asyncio.gather(*(self.status_of(name) for name in SCHEDULERS))
        leading = [(status.term, name, status) for name, status in zip(SCHEDULERS, found, strict=True)
                   if status is not None and status.leading]  # fmt: skip
        if not leading:
            return "", None
        _, name, status = max(leading, key=lambda one: one[0])
        return name, status

    async def inspect(self, name: str) -> Any:
        """What a scheduler or a worker holds."""
        channel = connect(self.address(name))
        try:
            stub = inspection_pb2_grpc.InspectionServiceStub(channel)
            return await stub.Inspect(inspection_pb2.InspectRequest(), timeout=10)
        finally:
            await channel.close()

    async def metrics(self, name: str) -> dict[str, float]:
        """The page of a gateway or the draft worker."""
        line = next(line for line in reversed(self.logs[name]) if "metrics" in line and "port=" in line)
        port = int(line.rpartition("port=")[2].split()[0] if "metrics_port" not in line
                   else line.partition("metrics_port=")[2].split()[0])  # fmt: skip
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
        page = (await asyncio.wait_for(reader.read(), 10)).decode()
        writer.close()
        rows = (line.rpartition(" ") for line in page.splitlines() if line.startswith("tandem_"))
        return {key: float(value) for key, _, value in rows}

    async def settled(self) -> tuple[str, str]:
        """Everything is up, knows its place and serves; the leader and the standby."""
        last: Any = "nobody leads"
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    with contextlib.suppress(grpc.aio.AioRpcError, OSError, Unreachable):
                        leader, last = await self._look_settled()
                        if leader:
                            self._note_restarts()
                            return leader, next(name for name in SCHEDULERS if name != leader)
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise AssertionError(f"the cluster did not settle: {last}") from None

    async def _look_settled(self) -> tuple[str, str]:
        """The leader, or an empty name and what is missing."""
        away = [name for name in self.names if self.supervisor.members[name].lifecycle.state is not State.READY]
        if away:
            return "", f"{away} are not up"
        found = [(name, await self.status_of(name)) for name in SCHEDULERS]
        views = [(name, status.leading, status.leader) for name, status in found if status is not None]
        if sorted(leading for _, leading, _ in views) != [False, True] or len({view[2] for view in views}) != 1:
            return "", f"leadership is unclear: {views}"
        leader, status = next((name, status) for name, status in found if status.leading)
        workers = sorted(worker.worker_id for worker in status.workers if worker.drafting)
        if workers != sorted(WORKERS) or len(status.gateways) != len(GATEWAYS) or len(status.draft_workers) != 1:
            return "", f"not everybody is there: drafting {workers}, gateways {len(status.gateways)}"
        ups = await asyncio.gather(*(self.metrics(name) for name in GATEWAYS))
        if not all(up["tandem_gateway_session_up"] for up in ups):
            return "", "a gateway has no session"
        return leader, ""

    def _note_restarts(self) -> None:
        now = time.monotonic()
        self.restarting_s += [(since, now) for since in self._gone_since.values()]
        self._gone_since.clear()


@contextlib.asynccontextmanager
async def running(folder: Path, options: Options | None = None) -> AsyncIterator[Cluster]:
    """A cluster; on failure the ends of all logs are shown."""
    cluster = Cluster(folder, options or Options())
    try:
        await cluster.start()
        yield cluster
    except BaseException:
        for name, lines in cluster.logs.items():
            print(f"--- {name}", *lines[-40:], sep="\n")
        raise
    finally:
        await cluster.stop()
