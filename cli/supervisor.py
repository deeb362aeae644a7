"""Keeps the processes of a local cluster alive, and stops them in order.

start   scheduler; once it listens, everything else at once
run     a child that dies is started again, at the address it had (see `cli.lifecycle` for how soon)
drain   gateway: it finishes its streams, so all else must still run → workers and draft → scheduler
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli.child import Child, OnLine
from cli.lifecycle import Event, Lifecycle, RestartPolicy, State, describe_exit
from cli.plan import ChildSpec

NAME = "tandem"
# Time, level and service of a log line (see cluster.logs).
_LOG_PREFIX = re.compile(r"^\d\d:\d\d:\d\d\.\d+ +[A-Z]+ +\S+ +")
_WHY = re.compile(r'\bwhy=("(?:[^"\\]|\\.)*"|\S+)')


def reason_of(last_lines: Collection[str]) -> str:
    """Why a child ended, out of the last line that it wrote: the log's frame is taken off."""
    if not last_lines:
        return "it said nothing"
    line = _LOG_PREFIX.sub("", list(last_lines)[-1])
    why = _WHY.search(line)
    if why is None:
        return line
    with contextlib.suppress(ValueError):
        return str(json.loads(why[1]))
    return why[1]


class ClusterFailed(Exception):
    """The cluster can't run; the message is fit for a user."""


@dataclass
class Member:
    """One child through all its processes."""

    spec: ChildSpec
    lifecycle: Lifecycle
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    address: str = "-"
    child: Child | None = None
    task: asyncio.Task[None] | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def port(self) -> int | None:
        """The port it listens on, if it does."""
        tail = self.address.rpartition(":")[2]
        return int(tail) if tail.isdecimal() else None


class Supervisor:
    """Owns the members. Everything happens on one event loop."""

    def __init__(
        self,
        on_line: OnLine,
        policy: RestartPolicy | None = None,
        state_file: Path | None = None,
        on_progress: OnLine = lambda name, text: None,
    ) -> None:
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.members: dict[str, Member] = {}
        self._on_line = on_line
        self._on_progress = on_progress
        self._policy = policy or RestartPolicy()
        self._state_file = state_file
        self._state_file_failed = False
        self._killing = False

    async def start(self, specs: Sequence[ChildSpec]) -> list[str]:
        """Start children at once and wait for all; their addresses. Raise ClusterFailed if one gives up."""
        started = []
        for spec in specs:
            member = Member(spec, Lifecycle(self._policy))
            self.members[spec.name] = member
            member.task = asyncio.create_task(self._supervise(member))
            started.append(member)
        await self.unless_failed(asyncio.gather(*(member.ready.wait() for member in started)))
        return [member.address for member in started]

    async def unless_failed(self, work: asyncio.Future[Any]) -> None:
        """Wait for work, or raise ClusterFailed as soon as a child gives up."""
        either: set[asyncio.Future[Any]] = {work, self.failed}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                return
        finally:
            # Also where this itself is cancelled (Ctrl-C): nothing is left for the loop's end to complain about.
            if not work.done():
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
        raise ClusterFailed(self.failed.result())

    async def stop(self, names: Sequence[str], timeout_s: float) -> None:
        """Stop these members side by side; kill those that take longer than `timeout_s`."""
        await asyncio.gather(*(self._stop(self.members[name], timeout_s) for name in names if name in self.members))

    def kill(self) -> None:
        """End everything now."""
        self._killing = True
        for member in self.members.values():
            member.lifecycle.apply(Event.STOP)
            member.wake.set()
            if member.child is not None:
                member.child.kill()

    async def wait_stopped(self) -> None:
        """Until no member has a process or a restart before it."""
        await asyncio.gather(*(member.task for member in self.members.values() if member.task is not None))

    async def _supervise(self, member: Member) -> None:
        while True:
            try:
                child = await Child.start(member.spec, self._on_line, self._on_progress)
            except OSError as error:  # no memory, no process left, …
                if member.lifecycle.state is State.STOPPING:
                    member.lifecycle.apply(Event.EXIT)
                    return
                if not await self._back_off(member, [f"no process can be started: {error}"], 1):
                    return
                continue
            member.child = child
            # Told to stop while the process was being made.
            if self._killing:
                child.kill()
            elif member.lifecycle.state is State.STOPPING:
                child.terminate()
            self._write_state()
            announced = asyncio.create_task(self._announce(member, child))
            status = await child.wait()
            await announced
            member.child = None
            if member.lifecycle.state is State.STOPPING:
                member.lifecycle.apply(Event.EXIT)
                self._write_state()
                return
            if not await self._back_off(member, child.last_lines, status):
                return

    async def _announce(self, member: Member, child: Child) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            member.address = await child.ready
            member.lifecycle.ready(time.monotonic())
            # The others know this address: the next process must take it again.
            if member.port is not None:
                member.spec = member.spec.with_flag("port", str(member.port))
            member.ready.set()
            self._write_state()

    async def _back_off(self, member: Member, last_lines: Collection[str], status: int) -> bool:
        """Report the exit and wait; whether to start again."""
        member.ready.clear()
        delay_s = member.lifecycle.exited(status, time.monotonic())
        self._write_state()
        name = member.spec.name
        if delay_s is None:
            if not self.failed.done():
                self.failed.set_result(f"{name} can't start ({describe_exit(status)}): {reason_of(last_lines)}")
            return False
        self._on_line(NAME, f"{name} ended ({describe_exit(status)}); starting it again in {delay_s:.1f} s")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(member.wake.wait(), delay_s)
        if member.lifecycle.state is State.STOPPED:
            return False
        member.lifecycle.restarted()
        return True

    async def _stop(self, member: Member, timeout_s: float) -> None:
        member.lifecycle.apply(Event.STOP)
        member.wake.set()
        if member.child is not None and not await member.child.stop(timeout_s):
            self._on_line(NAME, f"{member.spec.name} took longer than {timeout_s:g} s to stop and was killed")
        if member.task is not None:
            await member.task

    def _write_state(self) -> None:
        if self._state_file is None:
            return
        state = {
            name: {
                "service": member.spec.service,
                "state": member.lifecycle.state.value,
                "pid": member.child.pid if member.child else None,
                "address": member.address,
                "restarts": member.lifecycle.num_restarts,
            }
            for name, member in self.members.items()
        }
        partial = self._state_file.with_name(self._state_file.name + ".part")
        try:
            partial.write_text(json.dumps(state, indent=1) + "\n")
            os.replace(partial, self._state_file)
        except OSError as error:  # no such folder, a full disk: the cluster itself needs no description
            if not self._state_file_failed:
                self._on_line(NAME, f"the state file can't be written: {error}")
                self._state_file_failed = True
        else:
            self._state_file_failed = False
