"""A stand-in for a service: a tiny program that announces itself, crashes or lingers as its flags say."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.plan import ChildSpec

STUB = """
import argparse, os, signal, socket, sys, time

parser = argparse.ArgumentParser()
parser.add_argument("--name")
parser.add_argument("--port", type=int, default=0)
parser.add_argument("--journal")
parser.add_argument("--say", default="")
parser.add_argument("--exit-before", type=int)
parser.add_argument("--kill-before", type=int)
parser.add_argument("--crashes", default="")
parser.add_argument("--bar")
parser.add_argument("--say-long", type=int, default=0)
parser.add_argument("--deaf", default="")
args = parser.parse_args()

def note(what):
    with open(args.journal, "a") as journal:
        journal.write(f"{args.name} {what}\\n")

note(f"started {os.getpid()}")
if args.bar:
    for share in range(0, 101, 10):
        sys.stderr.write(f"\\rloading {share}%")
        sys.stderr.flush()
        while share == 50 and not os.path.exists(args.bar):  # until the bar so far has been seen
            time.sleep(0.005)
    sys.stderr.write("\\n")
if args.say_long:
    print("x" * args.say_long, file=sys.stderr)
if args.say:
    print(args.say, file=sys.stderr)
if args.exit_before is not None:
    sys.exit(args.exit_before)
if args.kill_before is not None:
    os.kill(os.getpid(), args.kill_before)
if args.deaf:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    def stop(*_):
        note("stopping")
        print("bye", file=sys.stderr)
        sys.exit(0)
    signal.signal(signal.SIGTERM, stop)
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("127.0.0.1", args.port))
listener.listen()
print("some output", flush=True)
print(f"READY {args.name} 127.0.0.1:{listener.getsockname()[1]}", flush=True)
while True:
    signal.pause()
"""

StubSpec = Callable[..., ChildSpec]


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Where stubs note what happens to them, in order."""
    path = tmp_path / "journal"
    path.touch()
    return path


@pytest.fixture
def stub(tmp_path: Path, journal: Path, monkeypatch: pytest.MonkeyPatch) -> StubSpec:
    """Makes the spec of a stub."""
    folder = tmp_path / "stubs"
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    )
    folder.mkdir()
    (folder / "stub_service.py").write_text(STUB)

    def spec(name: str, **flags: object) -> ChildSpec:
        given = {"name": name, "journal": journal, **flags}
        return ChildSpec(
            name,
            "stub_service",
            tuple((key.replace("_", "-"), str(value)) for key, value in given.items()),
        )

    return spec
