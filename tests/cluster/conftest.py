"""Processes for the cluster's tests."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

PEER = Path(__file__).with_name("peer.py")
Start = Callable[..., Awaitable[asyncio.subprocess.Process]]


@pytest.fixture
async def start_peer() -> AsyncIterator[Start]:
    """Start `peer.py` with arguments; whatever still runs at the end of the test is killed."""
    started: list[asyncio.subprocess.Process] = []

    async def start(*arguments: str) -> asyncio.subprocess.Process:
        peer = await asyncio.create_subprocess_exec(
            sys.executable, "-P", str(PEER), *arguments, stdout=asyncio.subprocess.PIPE
        )
        started.append(peer)
        return peer

    yield start
    for peer in started:
        if peer.returncode is None:
            peer.send_signal(signal.SIGKILL)
            await peer.wait()


@pytest.fixture
def read_line() -> Callable[[asyncio.subprocess.Process], Awaitable[str]]:
    """The next line that a peer prints."""

    async def read(peer: asyncio.subprocess.Process) -> str:
        assert peer.stdout is not None
        return (await asyncio.wait_for(peer.stdout.readline(), 30)).decode().strip()

    return read
