"""The supervisor with real processes that stand in for the services."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.lifecycle import RestartPolicy, State
from cli.supervisor import ClusterFailed, Supervisor, reason_of

FAST = RestartPolicy(first_delay_s=0.01, max_delay_s=0.05, max_crashes=3)


class Lines:
    """What the children say."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def __call__(self, name: str, line: str) -> None:
        self.lines.append((name, line))


async def eventually(holds: Callable[[], bool]) -> None:
    """Until it holds; processes change state by themselves, so there is nothing to wait on."""
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def notes(journal: Path) -> list[str]:
    """What the stubs noted, without process ids."""
    return [line.rsplit(" ", 1)[0] if "started" in line else line for line in journal.read_text().splitlines()]


async def running_again(supervisor: Supervisor, name: str, old_pid: int) -> None:
    """Until a new process of the child is ready."""
    member = supervisor.members[name]
    await eventually(
        lambda: member.child is not None and member.child.pid != old_pid and member.lifecycle.state is State.READY
    )


def pid_of(supervisor: Supervisor, name: str) -> int:
    child = supervisor.members[name].child
    assert child is not None
    return child.pid


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


async def test_children_start_and_stop_in_order(stub: Any, journal: Path, tmp_path: Path) -> None:
    lines = Lines()
    supervisor = Supervisor(lines, FAST, tmp_path / "state.json")
    (address,) = await supervisor.start([stub("a")])
    others = await supervisor.start([stub("b"), stub("c")])
    assert len({address, *others}) == 3
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))):
        pass
    state = json.loads((tmp_path / "state.json").read_text())
    assert {name: entry["state"] for name, entry in state.items()} == {"a": "ready", "b": "ready", "c": "ready"}
    assert state["a"]["address"] == address
    assert state["a"]["pid"] == pid_of(supervisor, "a")

    await supervisor.stop(["b"], 5)
    await supervisor.stop(["a", "c"], 5)
    await supervisor.wait_stopped()
    noted = notes(journal)
    assert noted[0] == "a started"
    assert noted[3] == "b stopping"
    assert sorted(noted[4:]) == ["a stopping", "c stopping"]
    # Stdout besides the ready line, and stderr up to the last word, are forwarded.
    assert ("a", "some output") in lines.lines
    assert ("b", "bye") in lines.lines
    assert not any("READY" in line for _, line in lines.lines)


async def test_a_child_that_dies_comes_back_at_its_address(stub: Any) -> None:
    lines = Lines()
    supervisor = Supervisor(lines, FAST)
    (address,) = await supervisor.start([stub("a", port=0)])
    for restart in range(1, 4):
        pid = pid_of(supervisor, "a")
        os.kill(pid, signal.SIGKILL)
        await running_again(supervisor, "a", pid)
        assert supervisor.members["a"].address == address
        assert supervisor.members["a"].lifecycle.num_restarts == restart
    assert not supervisor.failed.done()
    assert sum("SIGKILL" in line for name, line in lines.lines if name == "tandem") == 3
    await supervisor.stop(["a"], 5)


async def test_a_child_that_can_not_start_ends_the_cluster(stub: Any, journal: Path) -> None:
    supervisor = Supervisor(Lines(), FAST)
    bad = stub("bad", exit_before=2, say="12:00:00.123 ERROR   worker       no such model  model=x")
    with pytest.raises(ClusterFailed, match=r"^bad can't start \(exit status 2\): no such model  model=x$"):
        await supervisor.start([stub("a"), bad])
    assert notes(journal).count("bad started") == 1
    supervisor.kill()
    await supervisor.wait_stopped()


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([], "it said nothing"),
        (["Traceback", "ValueError: no"], "ValueError: no"),
        (["12:00:00.123 ERROR   worker       it can't start  why=short"], "short"),
        (['12:00:00.123 ERROR   worker       it can\'t start  why="the \\"big\\" one"'], 'the "big" one'),
    ],
)
def test_the_reason_is_the_last_line(lines: list[str], reason: str) -> None:
    assert reason_of(lines) == reason


async def test_a_process_that_can_not_be_made_ends_the_cluster(stub: Any) -> None:
    """The command line is longer than the system takes."""
    supervisor = Supervisor(Lines(), FAST)
    with pytest.raises(ClusterFailed, match=r"^a can't start .*: no process can be started: .*too long"):
        await supervisor.start([stub("a", say="x" * 2_000_000)])


async def test_a_child_that_is_killed_at_start_gets_three_tries(stub: Any, journal: Path) -> None:
    supervisor = Supervisor(Lines(), FAST)
    with pytest.raises(ClusterFailed, match=r"SIGKILL; is memory short\?"):
        await supervisor.start([stub("a", kill_before=9)])
    assert notes(journal).count("a started") == 3


async def test_a_child_that_was_ready_is_never_given_up(stub: Any, journal: Path) -> None:
    """Its port is taken while it is down: it tries until the port is free again."""
    supervisor = Supervisor(Lines(), FAST)
    (address,) = await supervisor.start([stub("a")])
    pid = pid_of(supervisor, "a")
    member = supervisor.members["a"]
    member.spec = member.spec.with_flag("exit-before", "3")
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: notes(journal).count("a started") >= 6)
    assert not supervisor.failed.done()
    member.spec = stub("a", port=address.rpartition(":")[2])
    await running_again(supervisor, "a", pid)
    await supervisor.stop(["a"], 5)


async def test_a_progress_bar_is_one_line_in_the_end(stub: Any, tmp_path: Path) -> None:
    lines, bars, seen = Lines(), Lines(), tmp_path / "seen"

    def on_progress(name: str, line: str) -> None:
        bars(name, line)
        seen.touch()

    supervisor = Supervisor(lines, FAST, on_progress=on_progress)
    await supervisor.start([stub("a", bar=str(seen), say_long=3_000_000)])
    await supervisor.stop(["a"], 5)
    assert [line for _, line in lines.lines if "loading" in line] == ["loading 100%"]
    assert bars.lines
    assert all(line.startswith("loading ") and line.count("loading") == 1 for _, line in bars.lines)
    # A line without end doesn't fill the memory, nor block the child.
    assert 0 < len(next(line for _, line in lines.lines if line.startswith("x"))) <= 2**20 + 2**16


async def test_the_users_environment_wins(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_TEST_A", "user")
    supervisor = Supervisor(Lines(), FAST)
    spec = replace(stub("a"), env=(("TANDEM_TEST_A", "plan"), ("TANDEM_TEST_B", "plan")))
    await supervisor.start([spec])
    environment = Path(f"/proc/{pid_of(supervisor, 'a')}/environ").read_bytes().split(b"\0")  # noqa: ASYNC240
    assert b"TANDEM_TEST_A=user" in environment
    assert b"TANDEM_TEST_B=plan" in environment
    await supervisor.stop(["a"], 5)


async def test_a_child_that_does_not_stop_is_killed(stub: Any) -> None:
    lines = Lines()
    supervisor = Supervisor(lines, FAST)
    await supervisor.start([stub("a", deaf="yes")])
    pid = pid_of(supervisor, "a")
    await supervisor.stop(["a"], 0.1)
    assert not is_alive(pid)
    assert any("was killed" in line for _, line in lines.lines)


async def test_stopping_while_backing_off_ends_at_once(stub: Any) -> None:
    supervisor = Supervisor(Lines(), RestartPolicy(first_delay_s=60))
    await supervisor.start([stub("a")])
    os.kill(pid_of(supervisor, "a"), signal.SIGKILL)
    await eventually(lambda: supervisor.members["a"].lifecycle.state is State.BACKOFF)
    await asyncio.wait_for(supervisor.stop(["a"], 5), 2)
    assert supervisor.members["a"].lifecycle.state is State.STOPPED


async def test_kill_ends_everything_at_once(stub: Any) -> None:
    supervisor = Supervisor(Lines(), FAST)
    await supervisor.start([stub("a", deaf="yes"), stub("b", deaf="yes")])
    pids = [pid_of(supervisor, name) for name in "ab"]
    supervisor.kill()
    await asyncio.wait_for(supervisor.wait_stopped(), 5)
    assert not any(map(is_alive, pids))


def test_children_die_with_the_supervisor(stub: Any, journal: Path) -> None:
    """The supervisor is killed, so it can't do anything about it itself."""
    spec = stub("a", deaf="yes")
    program = textwrap.dedent(f"""
        import asyncio
        from cli.plan import ChildSpec
        from cli.supervisor import Supervisor

        async def main():
            supervisor = Supervisor(lambda name, line: None)
            await supervisor.start([ChildSpec({spec.name!r}, {spec.service!r}, {spec.flags!r})])
            print(supervisor.members["a"].child.pid, flush=True)
            await asyncio.Event().wait()

        asyncio.run(main())
    """)
    with subprocess.Popen([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        watch = os.pidfd_open(pid)
        supervisor.kill()
    # Readable once the process has ended.
    assert select.select([watch], [], [], 10)[0]
    os.close(watch)
    assert not is_alive(pid)


async def test_a_state_file_that_cannot_be_written_is_told_once_and_stops_nothing(stub: Any, tmp_path: Path) -> None:
    lines = Lines()
    supervisor = Supervisor(lines, FAST, tmp_path / "gone" / "state.json")
    await asyncio.wait_for(supervisor.start([stub("a")]), 20)
    old = pid_of(supervisor, "a")
    os.kill(old, signal.SIGKILL)
    await running_again(supervisor, "a", old)
    assert len([line for name, line in lines.lines if name == "tandem" and "state file" in line]) == 1
    (tmp_path / "gone").mkdir()
    await supervisor.stop(["a"], 5)
    assert json.loads((tmp_path / "gone" / "state.json").read_text())["a"]["state"] == "stopped"


async def test_a_start_that_is_cancelled_leaves_no_work_behind(stub: Any) -> None:
    supervisor = Supervisor(Lines(), FAST)
    work = asyncio.gather(asyncio.Event().wait())
    waiting = asyncio.create_task(supervisor.unless_failed(work))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert work.done()
