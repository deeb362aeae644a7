"""`tandem up` with the real services and the fake engine: start, use, lose parts, drain."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cli import admin
from cli.__main__ import main
from cli.up import _own_drafts
from cluster.errors import TandemError
from tandem_client import NO_RETRY, Chunk, Generation, SyncTandemClient, collect
from tests.redis_server import redis_server

PROMPT = "The quick brown fox"
START_TIMEOUT_S = 60.0


class Up:
    """A running `tandem up`."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._state_file = folder / "state.json"
        self.log = folder / "log"
        command = [sys.executable, "-P", "-m", "cli", "up", "--engine", "fake", "--port", "0"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--state-file", str(self._state_file), *flags], stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self.process.stdout is not None
        ready = self.process.stdout.readline().split()
        assert ready[:2] == ["READY", "tandem"], self.log.read_text()
        self.address = ready[2]
        self.scheduler: str = self.state()["scheduler"]["address"]

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self._state_file.read_text())
        return state

    def kill(self, name: str) -> None:
        os.kill(self.state()[name]["pid"], signal.SIGKILL)

    def wait_until(self, holds: Callable[[dict[str, Any]], bool]) -> None:
        """Until the state file says so."""
        end = time.monotonic() + START_TIMEOUT_S
        while not holds(self.state()):
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.05)

    def end(self) -> None:
        """For a fixture: whatever state it is in."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Two workers and a draft worker; slow enough that a test can act in the middle of a stream."""
    cluster = Up(
        tmp_path_factory.mktemp("up"),
        *("--workers=2", "--draft=fake", "--fake-step-ms=4", "--num-blocks=256", "--served-model-name=demo"),
    )
    yield cluster
    cluster.end()


def undisturbed(client: SyncTandemClient, num_tokens: int, **options: Any) -> Generation:
    return client.generate(PROMPT, max_tokens=num_tokens, temperature=0.9, seed=11, ignore_eos=True, **options)


def disturbed(client: SyncTandemClient, num_tokens: int, at: int, act: Callable[[], object]) -> Generation:
    """The same request; `act` is called once `at` tokens have come."""
    chunks: list[Chunk] = []
    num_seen, acted = 0, False
    for chunk in client.stream(PROMPT, max_tokens=num_tokens, temperature=0.9, seed=11, ignore_eos=True):
        chunks.append(chunk)
        num_seen += sum(len(delta.token_ids) for delta in chunk.deltas)
        if num_seen >= at and not acted:
            assert num_seen < num_tokens
            act()
            acted = True
    assert acted
    return collect(chunks)


def test_one_request_as_json(up: Up, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--target", up.address, "--prompt", PROMPT, "--max-tokens=12", "--seed=3", "--json"]
    assert main([*arguments, "--no-speculation"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main([*arguments, "--speculation=model", "--max-draft-tokens=3"]) == 0
    drafted = json.loads(capsys.readouterr().out)
    assert plain["token_ids"] == drafted["token_ids"]
    assert plain["text"] == bytes(token for token in plain["token_ids"] if token < 256).decode()
    assert (plain["finish_reason"], plain["seed"], plain["model"]) == ("length", 3, "demo")
    assert plain["usage"]["completion_tokens"] == 12


def test_a_stream_as_text(up: Up, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "generate",
        "--target",
        up.address,
        "--chat",
        "hi",
        "--max-tokens=9",
        "--temperature=0",
        "--ignore-eos",
    ]
    assert main(arguments) == 0
    whole = capsys.readouterr().out
    assert main([*arguments, "--stream"]) == 0
    assert capsys.readouterr().out == whole


def test_a_refused_request_names_the_field(up: Up, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--target", up.address, "--prompt", "x", "--temperature=-1"]) == 1
    assert "sampling.temperature" in capsys.readouterr().err
    assert main(["generate", "--target", up.address, "--prompt", "x", "--model", "other"]) == 1
    assert "NOT_FOUND" in capsys.readouterr().err


def test_models_and_status(up: Up, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--target", up.address, "--json"]) == 0
    (model,) = json.loads(capsys.readouterr().out)
    assert (model["name"], model["workers"], model["vocab_size"], model["chat"]) == ("demo", 2, 260, True)
    assert main(["status", "--scheduler", up.scheduler, "--json", "--interval=0.01"]) == 0
    cell = json.loads(capsys.readouterr().out)
    assert {worker["worker_id"] for worker in cell["workers"]} == {"worker-0", "worker-1"}
    assert {worker["total_blocks"] for worker in cell["workers"]} == {256}
    assert len(cell["draft_workers"]) == 1
    assert main(["status", "--scheduler", up.scheduler, "--once", "--interval=0"]) == 0
    assert "worker-1" in capsys.readouterr().out


def test_a_load_leaves_nothing_behind(up: Up, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["bench", "--target", up.address, "--concurrency=16", "--requests=48", "--warmup=4"]
    result = tmp_path / "bench.json"
    assert main([*arguments, "--input-tokens=40", "--output-tokens=16", "--json", str(result)]) == 0
    report = json.loads(result.read_text())
    assert (report["completed"], report["errors"], report["output_tokens"]) == (48, {}, 48 * 16)
    assert 0 < report["ttft_s"]["p50"] <= report["end_to_end_s"]["p99"]
    assert "tokens/s" in capsys.readouterr().out
    assert main([*arguments, "--rate=100", "--input-tokens=40", "--output-tokens=8"]) == 0
    several = ["bench", "--target", up.address, "--concurrency=1,4", "--seed=7"]
    several += ["--input-tokens=40", "--output-tokens=8"]
    assert main([*several, "--json", str(result)]) == 0
    reports = json.loads(result.read_text())
    assert [(one["workload"]["concurrency"], one["completed"]) for one in reports] == [(1, 8), (4, 32)]
    # Not one prompt twice: nothing comes from the prefix cache, neither within a load nor from the one before.
    assert [one["cached_tokens"] for one in reports] == [0, 0]
    assert "at a time" in capsys.readouterr().out
    capsys.readouterr()
    assert main(["status", "--scheduler", up.scheduler, "--json", "--interval=0"]) == 0
    cell = json.loads(capsys.readouterr().out)
    assert (cell["running"], cell["waiting"]) == (0, 0)
    for worker in cell["workers"]:
        assert worker["referenced_blocks"] == 0
        assert worker["free_blocks"] + worker["cached_blocks"] == worker["total_blocks"]


def test_a_batch(up: Up, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps({"prompt": f"question {number}", "max_tokens": 4, "seed": 1}) for number in range(12)]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines, '{"id": "bad", "prompt": ""}']) + "\n")
    arguments = ["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), "--target", up.address]
    assert main(arguments) == 1
    entries = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(entries) == 13
    assert [entry["id"] for entry in entries if "error" in entry] == ["bad"]
    assert main(arguments) == 0
    capsys.readouterr()


def test_services_that_need_no_torch_have_none(up: Up) -> None:
    for name in ("gateway", "scheduler"):
        assert "libtorch" not in Path(f"/proc/{up.state()[name]['pid']}/maps").read_text()
    assert "libtorch" in Path(f"/proc/{up.state()['worker-0']['pid']}/maps").read_text()


@pytest.mark.parametrize(
    ("asked", "on_cpu", "with_gpu"),
    [
        ({}, True, False),
        ({"device": "cpu"}, True, True),
        ({"device": "cuda"}, False, False),
        ({"draft": "none"}, False, False),
        ({"draft": "none", "drafting": "worker"}, False, False),
        ({"draft": "fake"}, False, False),
        ({"engine": "fake"}, False, False),
        ({"engine": "fake", "draft": "fake", "drafting": "worker"}, True, True),
        ({"drafting": "apart"}, False, False),
        ({"drafting": "worker"}, True, True),
    ],
)
def test_where_drafts_are_guessed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: dict[str, str], on_cpu: bool, with_gpu: bool
) -> None:
    settings = {"drafting": "auto", "draft": "ngram", "engine": "transformers", "device": None, **asked}
    for drivers, expected in (((tmp_path / "no",), on_cpu), ((tmp_path / "no", tmp_path), with_gpu)):
        monkeypatch.setattr("cli.up.GPU_DRIVERS", drivers)
        assert _own_drafts(**settings) is expected  # type: ignore[arg-type]


@pytest.mark.parametrize("part", ["gateway", "worker", "draft", "scheduler"])
def test_a_lost_part_comes_back_and_the_stream_goes_on(up: Up, part: str) -> None:
    before = up.state()
    killed: list[str] = []

    def kill() -> None:
        name = part
        if part == "worker":
            (name,) = (worker.worker_id for worker in admin.status(up.scheduler).workers if worker.running)
        up.kill(name)
        killed.append(name)

    with SyncTandemClient(up.address) as client:
        whole = undisturbed(client, 150)
        answer = disturbed(client, 150, at=20, act=kill)
    assert answer.token_ids == whole.token_ids
    assert answer.text == whole.text
    assert answer.usage.resumptions >= (0 if part == "draft" else 1)
    (name,) = killed
    up.wait_until(lambda state: state[name]["restarts"] == 1 and state[name]["state"] == "ready")
    assert before[name]["restarts"] == 0
    assert up.state()[name]["address"] == before[name]["address"]
    assert {other: member["restarts"] for other, member in up.state().items() if other != name} == {
        other: member["restarts"] for other, member in before.items() if other != name
    }
    assert up.process.poll() is None


def test_a_second_signal_ends_everything_at_once(up: Up) -> None:
    """Last with this cluster."""
    pids = [member["pid"] for member in up.state().values()]
    with SyncTandemClient(up.address, retry=NO_RETRY) as client:
        stream = client.stream(PROMPT, max_tokens=3000, ignore_eos=True)
        next(stream)
        start = time.monotonic()
        up.process.send_signal(signal.SIGINT)
        # The first signal waits for this stream: it goes on.
        for _ in range(10):
            next(stream)
        assert up.process.poll() is None
        up.process.send_signal(signal.SIGINT)
        up.process.wait(10)
        assert time.monotonic() - start < 10
        with pytest.raises(TandemError):
            list(stream)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_sigterm_drains(tmp_path: Path) -> None:
    """The stream under way is delivered whole, new requests are refused, everything ends, with status 0."""
    up = Up(tmp_path, "--draft=none", "--fake-step-ms=10")
    pids = [member["pid"] for member in up.state().values()]
    assert set(up.state()) == {"scheduler", "gateway", "worker-0"}
    try:
        with SyncTandemClient(up.address) as client, SyncTandemClient(up.address, retry=NO_RETRY) as other:
            whole = undisturbed(client, 50)
            refused: list[TandemError] = []

            def drain() -> None:
                up.process.terminate()
                while not refused:
                    try:
                        other.generate("x", max_tokens=1)
                    except TandemError as error:
                        refused.append(error)

            answer = disturbed(client, 50, at=3, act=drain)
        assert answer.token_ids == whole.token_ids
        assert refused[0].code.name == "UNAVAILABLE"
        assert up.process.wait(20) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        assert not (tmp_path / "state.json").exists()
    finally:
        up.end()


def test_a_standby_takes_over_from_a_lost_leader(tmp_path: Path) -> None:
    with redis_server(tmp_path) as redis:
        up = Up(tmp_path, "--draft=none", "--fake-step-ms=4", "--schedulers=2", f"--state={redis.url}")
        try:
            term = admin.status(up.scheduler).term
            leader = admin.status(up.scheduler).leader
            (name,) = (name for name, member in up.state().items() if member["address"] == leader)
            with SyncTandemClient(up.address) as client:
                whole = undisturbed(client, 150)
                answer = disturbed(client, 150, at=20, act=lambda: up.kill(name))
            assert answer.token_ids == whole.token_ids
            assert answer.usage.resumptions >= 1
            up.wait_until(lambda state: state[name]["restarts"] == 1 and state[name]["state"] == "ready")
            # Whichever is asked: the leader answers.
            for scheduler in ("scheduler", "scheduler-1"):
                status = admin.status(up.state()[scheduler]["address"])
                assert status.leading
                assert status.term > term
            up.process.terminate()
            assert up.process.wait(30) == 0, up.log.read_text()
        finally:
            up.end()


def test_standbys_without_a_shared_state_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--schedulers", "2"]) != 0
    assert "--state redis://" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["up", "prepare"])
def test_a_name_that_gateways_cannot_be_given_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--served-model-name", "a=b"])
    assert "a served name is not empty and has no '=', unlike 'a=b'" in capsys.readouterr().err
