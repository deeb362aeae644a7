"""A real redis-server for tests: on a free port of the loopback, keeping nothing on disk."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

MISSING = "these tests need redis-server: `apt-get install redis-server` (Debian, Ubuntu) or `brew install redis`"


class RedisServer:
    """One server that can be killed, stopped, emptied and started again at its address."""

    def __init__(self, folder: Path) -> None:
        """Start it; returns once it accepts connections. Fails with `MISSING` where the program is not installed."""
        program = shutil.which("redis-server")
        assert program is not None, MISSING
        self._program = program
        self._folder = folder
        self._child: subprocess.Popen[str] | None = None
        for _ in range(20):
            with contextlib.closing(socket.socket()) as probe:
                probe.bind(("127.0.0.1", 0))
                self.port: int = probe.getsockname()[1]
            if self._start():
                return
        raise AssertionError("no free port for redis-server")

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def restart(self) -> None:
        """Start it again at its port, empty."""
        assert self._start(), f"port {self.port} was taken meanwhile"

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            assert self._child.stdout is not None
            self._child.stdout.close()
            self._child = None

    def terminate(self) -> None:
        """SIGTERM, and wait for its end."""
        if self._child is not None:
            self._child.terminate()
            self._child.wait()
            self.kill()

    def pause(self) -> None:
        """Connections stand, nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def empty(self) -> None:
        """Lose everything that is stored."""
        self.command("FLUSHALL")

    def command(self, *words: str) -> str:
        """The first line of the answer to one command."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            connection.sendall((" ".join(words) + "\r\n").encode())
            return connection.makefile().readline().strip()

    def _signal(self, number: signal.Signals) -> None:
        assert self._child is not None
        self._child.send_signal(number)

    def _start(self) -> bool:
        """Whether it serves; False: the port is in use."""
        self._child = subprocess.Popen(
            [
                *(self._program, "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self._folder)),
                *("--save", "", "--appendonly", "no", "--daemonize", "no"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._child.stdout is not None
        lines = []
        for line in self._child.stdout:
            lines.append(line)
            if "eady to accept connections" in line:
                return True
        self.kill()
        output = "".join(lines)
        assert "Address already in use" in output, output
        return False


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[RedisServer]:
    """One for a test or a module."""
    server = RedisServer(folder)
    try:
        yield server
    finally:
        server.kill()
