"""The services' event loop: one turn for all completions so far, none lost, and the poller chosen before gRPC loads."""

from __future__ import annotations

import asyncio
import functools
import importlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from cluster import event_loop


class Completions:
    """Stands for gRPC's own reader: takes one byte and everything that is queued."""

    def __init__(self) -> None:
        self.queued = 0
        self.turns: list[int] = []
        self.wakeups, self.poller = socket.socketpair()
        self.wakeups.setblocking(False)

    def complete(self, count: int) -> None:
        self.queued += count
        self.poller.send(b"1" * count)

    def read(self, loop: object) -> None:
        assert self.wakeups.recv(1) == b"1"
        self.turns.append(self.queued)
        self.queued = 0


Completions.__module__ = "grpc._cython.cygrpc"


async def settle(completions: Completions) -> None:
    """Let the loop turn until nothing wakes it any more."""
    for _ in range(20):
        await asyncio.sleep(0)
    assert completions.queued == 0


def test_one_turn_for_all_completions_and_none_lost() -> None:
    completions = Completions()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(completions.wakeups, functools.partial(completions.read, loop))
        for count in (1, 32, 2, 5000):
            completions.complete(count)
            await settle(completions)
        loop.remove_reader(completions.wakeups)

    event_loop.run(main())
    # 5000 are more than one look takes: two turns, the second with nothing left to do.
    assert completions.turns == [1, 32, 2, 5000, 0]


def test_other_readers_are_left_alone() -> None:
    async def main() -> list[bytes]:
        ours, theirs = socket.socketpair()
        seen: list[bytes] = []
        asyncio.get_running_loop().add_reader(ours, lambda: seen.append(ours.recv(1)))
        theirs.send(b"abc")
        while len(seen) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
        asyncio.get_running_loop().remove_reader(ours)
        return seen

    assert event_loop.run(main()) == [b"a", b"b", b"c"]


def test_the_installed_library_is_recognised() -> None:
    """Its reader is private: a release that renames it would silently cost the idle turns again.

    In a process of its own, since gRPC binds its one poller to the first loop that uses it.
    """
    code = """
import asyncio
from cluster import event_loop
event_loop.choose_poller()
from cluster.channel import connect

async def main():
    async with connect("127.0.0.1:1") as channel:
        channel.get_state(try_to_connect=True)
        await asyncio.wait_for(channel.wait_for_state_change(channel.get_state()), 10)

seen = []
read_once = event_loop._read_once
event_loop._read_once = lambda *arguments: (seen.append(arguments), read_once(*arguments))
event_loop.run(main())
assert seen
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("service", ["gateway", "scheduler", "worker", "draft_worker"])
def test_services_choose_before_grpc_is_loaded(service: str) -> None:
    code = f"import sys, os, {service}; assert 'grpc' not in sys.modules; print(os.environ['GRPC_EXPERIMENTS'])"

    def choice(**env: str) -> str:
        kept = {name: value for name, value in os.environ.items() if name != event_loop.EXPERIMENTS}
        run = subprocess.run([sys.executable, "-c", code], env=kept | env, capture_output=True, text=True, check=True)
        return run.stdout.strip()

    assert choice() == "-event_engine_poller_for_python"
    assert choice(GRPC_EXPERIMENTS="mine") == "mine"


def test_the_library_knows_the_choice() -> None:
    """Names that it doesn't know are only logged."""
    code = "import grpc; grpc.insecure_channel('127.0.0.1:1')"
    env = os.environ | {event_loop.EXPERIMENTS: "-event_engine_poller_for_python", "GRPC_VERBOSITY": "error"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert "Unknown experiment" not in run.stderr
    unknown = subprocess.run(
        [sys.executable, "-c", code], env=env | {event_loop.EXPERIMENTS: "-no_such"}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert "no_such" in unknown.stderr


@pytest.mark.parametrize("service", ["worker", "draft_worker"])
def test_processes_with_a_model_share_the_interpreter_in_short_turns(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(f"{service}.__main__")
    intervals = []

    def run(main: Coroutine[Any, Any, int]) -> int:
        main.close()
        intervals.append(sys.getswitchinterval())
        return 0

    monkeypatch.setattr(event_loop, "run", run)
    flags = {"worker": ["--model=m"], "draft_worker": ["--target=m"]}
    monkeypatch.setattr(sys, "argv", [service, *flags[service]])
    before = sys.getswitchinterval()
    sys.setswitchinterval(usual := 0.005)
    try:
        assert module.main() == 0
    finally:
        sys.setswitchinterval(before)
    assert intervals == [pytest.approx(event_loop.SWITCH_INTERVAL_S)]
    assert intervals[0] < usual


def test_its_clock_is_fine() -> None:
    """Latencies are read off it."""

    async def main() -> list[tuple[float, float, float]]:
        loop = asyncio.get_running_loop()
        return [(time.monotonic(), loop.time(), time.monotonic()) for _ in range(3)]

    assert all(before <= now <= after for before, now, after in event_loop.run(main()))
