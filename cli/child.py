"""One child process: started through the launcher, read line by line, stopped in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Callable
from pathlib import Path

from cli.plan import ChildSpec

LAUNCHER = Path(__file__).with_name("launcher.py")
_READY = re.compile(r"READY (\S+) (\S+)")
_LONGEST_LINE = 2**20
_NUM_LAST_LINES = 20


OnLine = Callable[[str, str], None]
"""Takes the child's name and one line"""


class Child:
    """A running process of one spec; start another object for a restart.

    `ready` resolves to the address of the ready line (`READY <service> <address>` on its stdout) or is cancelled when
    the process ends before. Everything else that it writes goes to `on_line`, one call a line, and lines that are still
    being redrawn (progress bars) to `on_progress`.
    """

    def __init__(self, spec: ChildSpec, process: Process, on_line: OnLine, on_progress: OnLine) -> None:
        self.spec = spec
        self.ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.last_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self._process = process
        self._on_line = on_line
        self._on_progress = on_progress
        self._exit = asyncio.create_task(self._read_until_exit())

    @classmethod
    async def start(cls, spec: ChildSpec, on_line: OnLine, on_progress: OnLine = lambda name, text: None) -> Child:
        """Start the process. Its own session: a terminal's Ctrl-C reaches the supervisor alone, which drains."""
        python = sys.executable
        process = await asyncio.create_subprocess_exec(
            *(python, "-I", "-S", str(LAUNCHER), str(os.getpid()), python, *spec.arguments()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            env={**dict(spec.env), **os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        return cls(spec, process, on_line, on_progress)

    @property
    def pid(self) -> int:
        """The process id; it stays the same when the launcher becomes the service."""
        return self._process.pid

    async def wait(self) -> int:
        """The exit status (negative: the signal), once everything it wrote has been read."""
        return await asyncio.shield(self._exit)

    def terminate(self) -> None:
        """Ask it to drain and exit."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and whatever it has started."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            # Not in every case: it polls first, and would take the exit status from the one who waits for it.
            self._signal(signal.SIGKILL)

    async def stop(self, timeout_s: float) -> bool:
        """Terminate and wait; kill after `timeout_s`. Whether it ended by itself."""
        self.terminate()
        try:
            await asyncio.wait_for(self.wait(), timeout_s)
        except TimeoutError:
            self.kill()
            await self.wait()
            return False
        return True

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _read_until_exit(self) -> int:
        stdout, stderr = self._process.stdout, self._process.stderr
        assert stdout is not None
        assert stderr is not None
        reading = [
            asyncio.create_task(self._read(stdout, self._stdout_line)),
            asyncio.create_task(self._read(stderr, self._stderr_line)),
        ]
        status = await self._process.wait()
        # A grandchild may hold the pipes open; what the child itself wrote is there already.
        await asyncio.wait(reading, timeout=1.0)
        for task in reading:
            task.cancel()
        self.ready.cancel()
        return status

    async def _read(self, stream: asyncio.StreamReader, on_line: Callable[[str], None]) -> None:
        rest = b""
        while data := await stream.read(2**16):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                text = _shown(line)
                if text:
                    on_line(text)
            # A progress bar redraws its line after each carriage return; nobody needs the older drawings.
            if b"\r" in rest:
                rest = b"\r" + rest.rstrip(b"\r").rpartition(b"\r")[2]
                self._on_progress(self.spec.name, _shown(rest))
            rest = rest[-_LONGEST_LINE:]
        if text := _shown(rest):
            on_line(text)

    def _stdout_line(self, line: str) -> None:
        match = _READY.fullmatch(line)
        if match is None:
            self._stderr_line(line)
        elif not self.ready.done():
            self.ready.set_result(match[2])

    def _stderr_line(self, line: str) -> None:
        self.last_lines.append(line)
        self._on_line(self.spec.name, line)


def _shown(line: bytes) -> str:
    """A line as it stands on a terminal after its carriage returns."""
    return line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2].rstrip()
