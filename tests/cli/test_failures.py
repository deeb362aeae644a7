"""One clear line for each thing that can go wrong, and the right exit status."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cli.__main__ import COMMANDS, build_parser, main
from cli.failures import UsageError, explain
from cli.model_source import ModelUnavailable
from cli.supervisor import ClusterFailed
from cluster.errors import InvalidField, NotFound, Unavailable


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UsageError("wrong"), "wrong"),
        (ModelUnavailable("no model"), "no model"),
        (ClusterFailed("worker-0 can't start"), "worker-0 can't start"),
        (InvalidField("stop.strings", "is empty"), "INVALID_ARGUMENT: stop.strings: is empty"),
        (NotFound("model", "x"), "NOT_FOUND: model 'x' does not exist"),
        (Unavailable("draining"), "UNAVAILABLE: draining"),
        (OSError(errno.ENOSPC, "No space left on device", "/data/x"), "the disk is full: /data/x"),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "in.jsonl"),
            "in.jsonl: No such file or directory",
        ),
    ],
)
def test_known_errors_are_one_line(error: Exception, line: str) -> None:
    assert explain(error) == line


def test_a_bug_keeps_its_traceback() -> None:
    assert explain(KeyError("x")) is None
    assert explain(OSError("strange")) is None


def test_no_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--target", "127.0.0.1:1", "--prompt", "x"]) == 1
    error = capsys.readouterr().err
    assert "no cluster answers (127.0.0.1:1); start one with `tandem up`" in error
    assert error.count("\n") == 1
    assert main(["status", "--scheduler", "127.0.0.1:1"]) == 1
    assert "no cluster answers" in capsys.readouterr().err


def test_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        assert main(["up", "--engine", "fake", "--port", str(number)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"can't listen on 127.0.0.1:{number}" in captured.err
    assert captured.err.count("\n") == 1


def test_no_such_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["up", "--engine", "fake", "--port", "0", "--model", str(tmp_path / "none")]) == 1
    assert "no model folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "--max-tokens", "0"],
        ["up", "--workers", "0"],
        ["up", "--port", "70000"],
        ["up", "--kv-cache-gib", "-1"],
        ["bench", "--rate", "x"],
        ["bench", "--concurrency", "1,x"],
        ["nothing"],
        [],
    ],
)
def test_wrong_flags_have_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: tandem" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args([command, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert "examples:" in shown
    assert f"tandem {command}" in shown


def test_the_command_never_imports_torch() -> None:
    """Nor does declaring the flags bring gRPC, so that --help is quick."""
    program = (
        "import sys, cli.__main__ as command; command.build_parser(); assert 'grpc' not in sys.modules; "
        "import cli.failures, cli.session, cli.bench, cli.load, cli.load_report, cli.admin, cli.health, cli.demo; "
        "assert 'torch' not in sys.modules; assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True)


def test_a_closed_pipe_is_no_error() -> None:
    program = "import sys; from cli.__main__ import main; sys.exit(main(['--help']))"
    ran = subprocess.run(
        ["bash", "-c", 'set -o pipefail; "$0" -P -c "$1" | head -c 1', sys.executable, program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in ran.stderr
