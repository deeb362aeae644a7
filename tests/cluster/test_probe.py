"""The health probe, against our own health service and against nobody."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from cluster import server
from cluster.health import Health

ROOT = Path(__file__).resolve().parents[2]


class Served:
    """A server with nothing but health."""

    def __init__(self) -> None:
        self.server = server.create_server()
        self.health: Health = server.add_health(self.server)
        self.address = f"127.0.0.1:{server.bind(self.server, '127.0.0.1', 0)}"


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    one = Served()
    await one.server.start()
    yield one
    await one.server.stop(0)


async def probe(*arguments: str) -> tuple[int, str]:
    """Exit status and output of the program, as a container runs it."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "cluster.probe", *arguments),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await child.communicate()
    assert child.returncode is not None
    return child.returncode, output.decode().strip()


async def test_ready_means_serving(served: Served) -> None:
    served.health.set("", True)
    served.health.set("smol", False)
    assert await probe(served.address) == (0, f"{served.address}: SERVING")
    assert await probe(served.address, "--service=smol") == (1, f"{served.address}: NOT_SERVING")
    assert await probe(served.address, "--service=other") == (1, f"{served.address}: SERVICE_UNKNOWN")


async def test_live_means_answering(served: Served) -> None:
    served.health.enter_graceful_shutdown()
    assert await probe(served.address) == (1, f"{served.address}: NOT_SERVING")
    assert await probe(served.address, "--live") == (0, f"{served.address}: NOT_SERVING")


async def test_nobody_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for flag in ("--timeout-s=60", "--live"):
            status, output = await probe(address, flag)
            assert status == 1
            assert output.startswith(f"{address}: UNAVAILABLE")


async def test_one_that_never_answers() -> None:
    """A frozen process accepts connections, and nothing more."""
    with socket.socket() as frozen:
        frozen.bind(("127.0.0.1", 0))
        frozen.listen()
        address = f"127.0.0.1:{frozen.getsockname()[1]}"
        status, output = await probe(address, "--live", "--timeout-s=0.2")
        assert status == 1
        assert output.startswith(f"{address}: DEADLINE_EXCEEDED")


def test_it_brings_nothing_heavy() -> None:
    script = "import cluster.probe, sys; print({'torch', 'transformers', 'numpy', 'redis'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
