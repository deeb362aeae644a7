"""Servers under test as local processes: started with a log, waited for, told apart by CPU time and memory, ended.

What a server costs is summed over its whole process tree (/proc), so that a supervisor's children count. Linux only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.2


class ServerFailed(Exception):
    """A server that does not start, or ended; the text is for a person."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Of a process tree, in MiB."""

    resident: float
    """every process counted in full"""
    proportional: float
    """pages that several share divided among them (PSS)"""


class Server:
    """One running server."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], folder: Path) -> None:
        """Start it. Its output goes to NAME.log in `folder`; variables of `env` win over the user's own."""
        self.name = name
        self.log = folder / f"{name}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the first process."""
        return self._process.pid

    def wait_until(self, is_ready: Callable[[], bool], timeout_s: float) -> float:
        """Return the seconds until it was ready. Raises ServerFailed with the log's end."""
        began_s = time.monotonic()
        while not is_ready():
            if self._process.poll() is not None:
                raise ServerFailed(f"{self.name} ended ({self._process.returncode}):\n{self.last_lines()}")
            if time.monotonic() - began_s > timeout_s:
                raise ServerFailed(f"{self.name} was not ready in {timeout_s:g} s:\n{self.last_lines()}")
            time.sleep(_POLL_S)
        return time.monotonic() - began_s

    def last_lines(self, count: int = 15) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    def cpu_s(self) -> float:
        """CPU seconds of all its processes so far."""
        return sum(cpu_seconds(pid) for pid in tree_of(self.pid))

    def memory(self) -> Memory:
        """What its processes hold now."""
        found = [memory_of(pid) for pid in tree_of(self.pid)]
        return Memory(sum(one.resident for one in found), sum(one.proportional for one in found))

    def pause(self) -> None:
        """Stop all its processes where they are, until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on; harmless if they never stopped."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in tree_of(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for whatever is left of its tree; returns once nothing of it runs."""
        tree = tree_of(self.pid)
        self.resume()
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_TIMEOUT_S)
        for pid in tree:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        while any(_runs(pid) for pid in tree):
            time.sleep(_POLL_S / 10)


def answers(url: str) -> bool:
    """Whether a GET has status 200."""
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def pids_of(state_file: Path) -> dict[str, int]:
    """The processes of a `tandem up --state-file`, by name."""
    return {name: member["pid"] for name, member in json.loads(state_file.read_text()).items()}


def tree_of(pid: int) -> list[int]:
    """A process and all its descendants that live now."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                children.setdefault(int(_stat(int(folder.name))[1]), []).append(int(folder.name))
    found = [pid] if Path(f"/proc/{pid}").exists() else []
    for one in found:
        found.extend(children.get(one, []))
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and of its children that have ended; 0 when it is gone."""
    try:
        fields = _stat(pid)
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS_PER_S


def thread_seconds(pid: int) -> dict[int, float]:
    """CPU seconds by thread id, to the nanosecond."""
    found: dict[int, float] = {}
    for folder in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found[int(folder.name)] = int((folder / "schedstat").read_text().split()[0]) / 1e9
    return found


def _runs(pid: int) -> bool:
    """Whether it has not ended; a zombie has, and waits for its parent."""
    try:
        return _stat(pid)[0] != "Z"
    except OSError:
        return False


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, which may hold anything; state is the first."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def memory_of(pid: int) -> Memory:
    """Of one process; 0 when it is gone."""
    sums = {"Rss:": 0.0, "Pss:": 0.0}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            name, *rest = line.split()
            if name in sums:
                sums[name] += int(rest[0]) / 1024
    return Memory(sums["Rss:"], sums["Pss:"])
