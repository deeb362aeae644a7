"""Processes under test: their readiness, their CPU time and memory with those of their children, and their end."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from bench.servers import Server, ServerFailed, answers, cpu_seconds, memory_of, thread_seconds, tree_of

# A parent that burns a little, and a child that burns more and then waits; both say so.
TREE = """
import subprocess, sys, time
def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end: pass
if sys.argv[1:] == ["child"]:
    burn(0.3)
    print("child ready", flush=True)
    time.sleep(60)
child = subprocess.Popen([sys.executable, __file__, "child"])
burn(0.1)
child.wait()
"""


def started(folder: Path) -> Server:
    script = folder / "tree.py"
    script.write_text(TREE)
    return Server("tree", [sys.executable, str(script)], {"MARK": "1"}, folder)


def test_a_server_costs_what_its_tree_costs_and_ends_with_it(tmp_path: Path) -> None:
    server = started(tmp_path)
    try:
        assert server.wait_until(lambda: "child ready" in server.log.read_text(), 30) < 30
        parent, child = tree_of(server.pid)
        assert server.cpu_s() == pytest.approx(cpu_seconds(parent) + cpu_seconds(child), abs=0.05)
        assert server.cpu_s() >= 0.35 > cpu_seconds(parent)
        memory = server.memory()
        assert memory.resident >= memory.proportional > 1
        assert memory.resident > memory_of(child).resident > 1
    finally:
        server.stop()
    assert tree_of(server.pid) == []
    assert not Path(f"/proc/{child}").exists() or ") Z " in Path(f"/proc/{child}/stat").read_text()


def test_a_server_that_ends_or_stalls_is_told_with_its_last_words(tmp_path: Path) -> None:
    server = Server("short", [sys.executable, "-c", "print('no such model'); exit(3)"], {}, tmp_path)
    with pytest.raises(ServerFailed, match=r"(?s)ended \(3\).*no such model"):
        server.wait_until(lambda: False, 30)
    server.stop()
    stalled = Server("stalled", [sys.executable, "-c", "import time; time.sleep(60)"], {}, tmp_path)
    try:
        with pytest.raises(ServerFailed, match=r"not ready in 0\.1 s"):
            stalled.wait_until(lambda: False, 0.1)
    finally:
        stalled.stop()


def test_threads_are_told_apart() -> None:
    own = threading.get_native_id()
    before = thread_seconds(os.getpid())[own]
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
    assert thread_seconds(os.getpid())[own] - before >= 0.045


def test_nobody_there_does_not_answer() -> None:
    assert not answers("http://127.0.0.1:1/health")
    assert cpu_seconds(2**22 + 1) == 0.0
