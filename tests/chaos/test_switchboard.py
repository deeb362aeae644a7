"""The switchboard: links told by who calls whom, cut so that nothing crosses them, slowed, healed."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator

import pytest

from tests.chaos.switchboard import Switchboard, Unreachable

# A process that connects and passes its standard input and output through the connection.
CALLER = """
import socket, sys, threading
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
def send():
    for line in sys.stdin.buffer.raw:
        s.sendall(line)
    s.shutdown(socket.SHUT_WR)
threading.Thread(target=send, daemon=True).start()
for line in s.makefile("rb"):
    sys.stdout.buffer.write(line); sys.stdout.flush()
print("closed", flush=True)
"""


class Echo:
    """A server that says back what it is told, and a process that calls it by way of a switchboard."""

    def __init__(self) -> None:
        self.pids: dict[int, str] = {}
        self.board = Switchboard(lambda: self.pids)
        self.port = 0
        self.children: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while line := await reader.readline():
                writer.write(line)
            writer.close()

        self.server = await asyncio.start_server(answer, "127.0.0.1", 0)
        own = self.server.sockets[0].getsockname()
        self.port = int((await self.board.listen("server", lambda: own)).rpartition(":")[2])

    async def call(self, name: str) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CALLER, str(self.port), stdin=pipe, stdout=pipe
        )
        self.pids[child.pid] = name
        self.children.append(child)
        return child

    async def close(self) -> None:
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.communicate()
        await self.board.close()
        self.server.close()


async def said(child: asyncio.subprocess.Process, line: bytes) -> bytes:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(line)
    return await asyncio.wait_for(child.stdout.readline(), 30)


async def is_silent(child: asyncio.subprocess.Process) -> bool:
    """Nothing comes for a moment; a switchboard that lets anything through does so within far less."""
    assert child.stdout is not None
    try:
        await asyncio.wait_for(child.stdout.readline(), 0.3)
    except TimeoutError:
        return True
    return False


@pytest.fixture
async def echo() -> AsyncIterator[Echo]:
    started = Echo()
    await started.start()
    try:
        yield started
    finally:
        await started.close()


async def test_only_the_links_of_the_one_named_are_cut(echo: Echo) -> None:
    one, other = await echo.call("one"), await echo.call("other")
    assert (await said(one, b"a\n"), await said(other, b"b\n")) == (b"a\n", b"b\n")
    echo.board.cut("one")
    assert one.stdin is not None
    one.stdin.write(b"c\n")
    assert await said(other, b"d\n") == b"d\n"
    assert await is_silent(one)
    assert echo.board.held["one"] == 1
    echo.board.heal("one")
    assert one.stdout is not None
    assert await asyncio.wait_for(one.stdout.readline(), 30) == b"c\n", "what was under way arrives in the end"


async def test_not_even_an_end_crosses_a_cut_link(echo: Echo) -> None:
    child = await echo.call("one")
    assert await said(child, b"a\n") == b"a\n"
    echo.board.cut("one", "server")
    echo.server.close()
    assert child.stdin is not None
    child.stdin.close()
    assert await is_silent(child), "neither side hears of the other"
    echo.board.heal()
    assert child.stdout is not None
    await asyncio.wait_for(child.stdout.readline(), 30)


async def test_a_pair_that_is_not_this_one_stays_whole(echo: Echo) -> None:
    child = await echo.call("one")
    echo.board.cut("one", "redis")
    assert await said(child, b"a\n") == b"a\n"


async def test_a_new_connection_through_a_cut_leads_nowhere_until_it_is_healed(echo: Echo) -> None:
    echo.board.cut("server")
    child = await echo.call("one")
    assert child.stdin is not None
    child.stdin.write(b"a\n")
    assert await is_silent(child)
    echo.board.heal("server")
    assert child.stdout is not None
    assert await asyncio.wait_for(child.stdout.readline(), 30) == b"a\n"


async def test_a_slow_link_delays_each_message_both_ways(echo: Echo) -> None:
    child = await echo.call("one")
    assert await said(child, b"a\n") == b"a\n"
    echo.board.slow("one", delay_s=0.2)
    began = time.monotonic()
    assert await said(child, b"b\n") == b"b\n"
    assert time.monotonic() - began >= 0.4
    assert echo.board.held["one"] == 2


async def test_who_is_not_there_refuses(echo: Echo) -> None:
    def nowhere() -> tuple[str, int]:
        raise Unreachable("nobody")

    address = await echo.board.listen("nobody", nowhere)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
    assert await asyncio.wait_for(reader.read(), 30) == b""
    writer.close()
