"""`make setup`: what it does again after which change, and what it says when something is missing."""

from __future__ import annotations

import importlib.util
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def setup_venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, in a small copy of the project, with everything that takes time replaced by a note."""
    for name in ("pyproject.toml", "hatch_build.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "deploy").mkdir()
    script = shutil.copy(ROOT / "deploy" / "setup_venv.py", tmp_path / "deploy")
    (tmp_path / "protos").mkdir()
    (tmp_path / "protos" / "a.proto").write_text("syntax")
    (tmp_path / "engine" / "kernels" / "csrc").mkdir(parents=True)
    (tmp_path / "engine" / "kernels" / "build.py").touch()
    (tmp_path / "engine" / "kernels" / "csrc" / "a.cpp").touch()
    spec = importlib.util.spec_from_file_location("setup_venv_under_test", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    done: list[str] = []
    monkeypatch.setattr(module, "done", done, raising=False)

    def make_venv() -> None:
        done.append("venv")
        (tmp_path / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
        (tmp_path / ".venv" / "bin" / "python").touch()

    def generate() -> None:
        done.append("stubs")
        (tmp_path / "protos" / "a_pb2.py").touch()

    def install() -> None:
        done.append("install")
        generate()

    monkeypatch.setattr(module, "make_venv", make_venv)
    monkeypatch.setattr(module, "install", install)
    monkeypatch.setattr(module, "generate_stubs", generate)
    monkeypatch.setattr(module, "build_kernels", lambda: done.append("kernels"))
    return module


def steps(module: ModuleType) -> list[str]:
    """What one run did."""
    module.done.clear()
    assert module.main() == 0
    return list(module.done)


def test_nothing_is_done_twice(setup_venv: ModuleType, tmp_path: Path) -> None:
    assert steps(setup_venv) == ["venv", "install", "stubs", "kernels"]
    assert steps(setup_venv) == []
    (tmp_path / "protos" / "a.proto").write_text("changed")
    assert steps(setup_venv) == ["stubs"]
    (tmp_path / "protos" / "a_pb2.py").unlink()
    assert steps(setup_venv) == ["stubs"]
    (tmp_path / "engine" / "kernels" / "csrc" / "a.cpp").write_text("changed")
    assert steps(setup_venv) == ["kernels"]
    (tmp_path / "pyproject.toml").write_text("changed")
    assert steps(setup_venv) == ["install", "stubs", "kernels"]
    shutil.rmtree(tmp_path / ".venv")
    assert steps(setup_venv) == ["venv", "install", "stubs", "kernels"]
    assert steps(setup_venv) == []


def test_a_checkout_that_moved_gets_a_new_environment(setup_venv: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    steps(setup_venv)
    stamp = setup_venv.made_from()
    setup_venv.write_stamp({**stamp, "place": "/elsewhere"})
    assert steps(setup_venv) == ["venv", "install", "stubs", "kernels"]
    setup_venv.write_stamp({**stamp, "python": "3.99"})
    assert steps(setup_venv) == ["venv", "install", "stubs", "kernels"]


def test_the_environments_own_python_never_deletes_itself(
    setup_venv: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where `.venv` is activated, make runs the script with the Python inside it."""
    assert setup_venv.base_python() == sys.executable
    base, own = tmp_path / "base-python", tmp_path / ".venv" / "bin" / "python"
    base.touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.setattr(sys, "_base_executable", str(base))
    assert setup_venv.base_python() == str(base)
    own.parent.mkdir(parents=True)
    own.touch()
    for useless in (own, tmp_path / "missing"):
        monkeypatch.setattr(sys, "_base_executable", str(useless))
        with pytest.raises(setup_venv.SetupError, match="deactivate"):
            setup_venv.base_python()


def test_a_failed_install_is_told_and_the_next_run_goes_on(
    setup_venv: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install = setup_venv.install

    def fail() -> None:
        raise setup_venv.SetupError("pip install failed")

    monkeypatch.setattr(setup_venv, "install", fail)
    assert setup_venv.main() == 1
    assert "setup: pip install failed" in capsys.readouterr().err
    monkeypatch.setattr(setup_venv, "install", install)
    assert steps(setup_venv) == ["install", "stubs", "kernels"], "the environment itself is kept"


@pytest.mark.parametrize(
    ("log", "advice"),
    [
        ("OSError: [Errno 28] No space left on device", "The disk is full."),
        ("Failed to establish a new connection: [Errno -3] Temporary failure in name resolution", "can't be reached"),
        ("ERROR: Could not find a version that satisfies x (from versions: none)", "offers nothing"),
        ("ERROR: No matching distribution found for torch==2.13.0", "no build for Python"),
        ("error: command 'gcc' failed: No such file or directory", "sudo apt install gcc"),
    ],
)
def test_pips_failures_come_with_advice(
    setup_venv: ModuleType, monkeypatch: pytest.MonkeyPatch, log: str, advice: str
) -> None:
    monkeypatch.setattr(setup_venv.shutil, "which", lambda name: None)
    text = setup_venv.explain(["Progress 1 of 2", log])
    assert advice in text
    assert log in text
    assert "Progress" not in text


PIP = [
    "Collecting torch==2.13.0",
    "  Downloading https://index/torch-2.13.0-cp311.whl (720.0 MB)",
    "Progress 0 of 104857600",
    "Progress 52428800 of 104857600",
    "  Downloading https://index/numpy-2.0-cp311.whl (2 MB)",
    "Installing collected packages: torch, numpy",
]


class Stream(io.StringIO):
    """A terminal, or none."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def told(setup_venv: ModuleType, stream: Stream, seconds_per_line: float) -> str:
    """What is shown while pip prints PIP, a line in so many seconds."""
    now_s = 0.0
    progress = setup_venv.PipProgress(stream, lambda: now_s)
    for line in PIP:
        progress.see(line)
        now_s += seconds_per_line
    progress.end()
    return stream.getvalue()


def test_progress_of_pip_without_a_terminal(setup_venv: ModuleType) -> None:
    """A line now and then, whole."""
    seldom = told(setup_venv, Stream(terminal=False), 6.0).splitlines()
    assert seldom == ["setup: downloading torch-2.13.0-cp311.whl, 50% of 100 MiB"]
    often = told(setup_venv, Stream(terminal=False), 20.0).splitlines()
    assert often[0] == "setup: downloading torch-2.13.0-cp311.whl"
    assert often[-1] == "setup: unpacking what was downloaded"
    assert told(setup_venv, Stream(terminal=False), 0.1) == ""


def test_progress_of_pip_on_a_terminal(setup_venv: ModuleType) -> None:
    """One line that moves, and is gone at the end."""
    shown = told(setup_venv, Stream(terminal=True), 0.1)
    assert "\n" not in shown
    frames = [frame.strip() for frame in shown.split("\r\033[K")[1:]]
    assert len(frames) == len(PIP) + 1
    assert frames[3].startswith("[##########          ]   100.0 MiB  downloading torch")
    assert frames[-1] == ""


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make as from a shell, though the tests themselves may run under make."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_make_names_a_python_that_is_too_old(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.10.1" || exit 1\n')
    old.chmod(0o755)
    done = make("setup", f"PYTHON={old}")
    assert done.returncode != 0
    assert "is Python 3.10.1; Python 3.11 or newer is needed" in done.stderr


def test_make_lists_every_command() -> None:
    text = make().stdout
    makefile = (ROOT / "Makefile").read_text("utf-8")
    (commands,) = [line.split(":", 1)[1].split() for line in makefile.splitlines() if line.startswith(".PHONY:")]
    listed = [line.split()[0] for line in text.splitlines() if line and not line.startswith("make ")]
    assert sorted(listed) == sorted(commands)
