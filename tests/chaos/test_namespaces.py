"""A worker in a network namespace of its own, cut off by the kernel: packets vanish both ways, without a reset.

Needs root, `ip` and `iptables`; elsewhere the switchboard's black hole is all there is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.harness import MODEL, Cluster, running
from tests.integration.test_failures import LENGTHS, run_crowd

NOTICED_WITHIN_S = 5.0


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@dataclass(frozen=True, slots=True)
class Namespace:
    """One namespace, joined to ours by a pair of devices."""

    name: str
    ours: str
    """our address on the link"""

    def command(self, *words: str) -> list[str]:
        """To be run inside."""
        return ["ip", "netns", "exec", self.name, *words]

    def cut(self) -> None:
        """Nothing goes in or out any more."""
        for chain in ("INPUT", "OUTPUT"):
            _run(*self.command("iptables", "-A", chain, "-j", "DROP"))

    def heal(self) -> None:
        _run(*self.command("iptables", "-F"))


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    """Skips the test where none can be made."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("iptables")):
        pytest.skip("needs root, ip and iptables")
    tag = f"{os.getpid() % 100_000:05d}"
    network = f"10.77.{os.getpid() % 250}"
    made = Namespace(f"tandem-{tag}", f"{network}.1")
    outer, inner = f"tdm{tag}o", f"tdm{tag}i"
    try:
        _run("ip", "netns", "add", made.name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    try:
        _run("ip", "link", "add", outer, "type", "veth", "peer", "name", inner)
        _run("ip", "link", "set", inner, "netns", made.name)
        _run("ip", "addr", "add", f"{made.ours}/30", "dev", outer)
        _run("ip", "link", "set", outer, "up")
        _run(*made.command("ip", "addr", "add", f"{network}.2/30", "dev", inner))
        for device in (inner, "lo"):
            _run(*made.command("ip", "link", "set", device, "up"))
        yield made
    finally:
        subprocess.run(["ip", "link", "del", outer], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", made.name], check=False, capture_output=True)


@contextlib.asynccontextmanager
async def worker_in(namespace: Namespace, cluster: Cluster, name: str) -> AsyncIterator[Path]:
    """A further worker, inside; the file that it logs to."""
    flags = cluster.worker_flags | {
        "scheduler": cluster.scheduler, "worker_id": name, "model": cluster.model, "served_model_name": MODEL,
    }  # fmt: skip
    words = [f"--{key.replace('_', '-')}={value}" for key, value in flags.items()]
    log = cluster.folder / f"{name}.log"
    with log.open("wb") as output:
        child = await asyncio.create_subprocess_exec(
            *namespace.command(sys.executable, "-P", "-m", "worker", *words),
            stdout=asyncio.subprocess.DEVNULL, stderr=output, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        yield log
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


@pytest.mark.timeout(300)
async def test_a_worker_whose_packets_vanish_is_left_and_comes_back(namespace: Namespace, tmp_path: Path) -> None:
    async with (
        running(tmp_path, workers=1, scheduler={"host": namespace.ours}, fake_step_ms=5) as cluster,
        worker_in(namespace, cluster, "worker-far") as log,
    ):
        await cluster.until_status(lambda status: len(status.workers) == 2, 120)
        cut_at = 0.0
        noticed_after: list[float] = []

        async def strike() -> None:
            nonlocal cut_at
            namespace.cut()
            cut_at = time.monotonic()
            await cluster.until_status(lambda status: len(status.workers) == 1, 60)
            noticed_after.append(time.monotonic() - cut_at)

        answers = await run_crowd(cluster, {20: strike})
        assert len(answers) == len(LENGTHS)
        assert any(answer.usage.resumptions for answer in answers), "the cut struck nobody"
        if os.environ.get("TANDEM_CHAOS_TIMED"):
            assert noticed_after[0] < NOTICED_WITHIN_S
        await _until(lambda: "no scheduler" in log.read_text())
        namespace.heal()
        await cluster.until_status(lambda status: len(status.workers) == 2, 120)
        await run_crowd(cluster, {})
        await cluster.assert_baseline()


async def _until(holds: Callable[[], bool]) -> None:
    """A worker that is cut off says so, in its log."""
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
