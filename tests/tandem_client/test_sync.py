"""The client without an event loop, against a scripted gateway on a thread of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cluster import errors
from tandem_client import SyncTandemClient


@pytest.fixture
def running(scripted: Any) -> Iterator[tuple[Any, str]]:
    """A gateway that breaks its first stream, and its address."""
    gateway = scripted.ScriptedGateway(breaks={0: (3, scripted.draining)})
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    started = threading.Event()
    addresses: list[str] = []

    async def serve() -> None:
        async with scripted.serving(gateway) as (address, _):
            addresses.append(address)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert started.wait(10)
    yield gateway, addresses[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


def test_a_stream_is_an_iterator_and_survives_a_break(running: tuple[Any, str], scripted: Any) -> None:
    gateway, address = running
    with SyncTandemClient(address, retry=scripted.FAST_RETRY) as client:
        text = "".join(chunk.text for chunk in client.stream("hi"))
        assert text == "".join(scripted.answer_text(0, i) for i in range(12))
        assert len(gateway.requests) == 2
        answer = client.generate("hi")
        assert answer.text == text
        assert client.tokenize("ab") == (97, 98)
        assert client.detokenize([97]) == "a"
        assert client.models()[0].name == "scripted"


def test_closing_a_stream_cancels_it(running: tuple[Any, str]) -> None:
    gateway, address = running
    gateway.breaks = {}
    gateway.hang_after = 2
    with SyncTandemClient(address) as client:
        stream = client.stream("hi")
        next(stream)
        stream.close()
        stream = client.stream("hi")
        next(stream)
        with pytest.raises(KeyboardInterrupt):
            stream.throw(KeyboardInterrupt())
        assert [gateway.cancellations.get(timeout=5) for _ in range(2)] == [0, 1]


def test_ctrl_c_while_waiting_cancels_the_request(running: tuple[Any, str]) -> None:
    gateway, address = running
    gateway.breaks = {}
    gateway.hang_after = 2
    with SyncTandemClient(address) as client:
        received = []

        def listen() -> None:
            for chunk in client.stream("hi"):
                received.append(chunk)
                if len(received) == 2:
                    # Arrives while the main thread waits for a third chunk, which never comes.
                    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()

        with pytest.raises(KeyboardInterrupt):
            listen()
        assert gateway.cancellations.get(timeout=5) == 0
        gateway.hang_after = None
        assert client.tokenize("ab") == (97, 98)


def test_errors_are_raised_in_the_caller(scripted: Any) -> None:
    with SyncTandemClient("127.0.0.1:1", retry=scripted.FAST_RETRY) as client, pytest.raises(errors.Unavailable):
        client.generate("hi")
    client.close()
