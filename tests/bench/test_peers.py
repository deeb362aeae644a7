"""The whole comparison, once: a real Tandem without weights, and a peer made of a script."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import peers
from bench.peer_table import PEERS, Peer, Site, llama_command, vllm_all_cores_env
from cli.fake_model import write_fake_model

# Streams max_tokens tokens; with "short" as an argument one fewer, once it has answered the warm-up.
SCRIPT = r"""
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Door(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *rest): pass
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["ignore_eos"] and body["model"] == "bench" and body["stream"]
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        total = body["max_tokens"] - (sys.argv[2:] == ["short"] and body["max_tokens"] == 128)
        events = [{"choices": [{"text": "x"}]}] * total + [{"choices": [], "usage": {"completion_tokens": total}}]
        for event in events:
            data = b"data: " + json.dumps(event).encode() + b"\n\n"
            self.wfile.write(b"%x\r\n" % len(data) + data + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Door).serve_forever()
"""


def scripted(name: str, *arguments: str) -> Peer:
    fields = {"model": "bench", "ignore_eos": True}

    def command(site: Site, port: int) -> list[str]:
        return [sys.executable, "-c", SCRIPT, str(port), *arguments]

    return Peer(name, "openai", lambda site: True, command, fields=fields)


def compare(monkeypatch: pytest.MonkeyPatch, folder: Path, chosen: tuple[Peer, ...], *flags: str) -> int:
    write_fake_model(folder / "model")
    monkeypatch.setattr(peers, "PEERS", chosen)
    arguments = ["peers", "--model", str(folder / "model"), "--output", str(folder / "out"), "--waves", "1"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--tandem-flag=--engine=fake", *flags])
    return peers.main()


def test_a_comparison_from_start_to_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = (PEERS[0], scripted("script"))
    assert compare(monkeypatch, tmp_path, chosen, "--rounds=2", "--concurrency=1,4") == 0
    shown = capsys.readouterr()
    assert re.search(r"\| c=4 \| \d+(\.\d)? \| \d+(\.\d)? \| \d+\.\d\d×", shown.out)
    form = json.loads((tmp_path / "out" / "peers.json").read_text())
    order = [(run["round"], run["load"]["name"], run["server"]) for run in form["runs"]]
    assert order[:2] == [(0, "c=1", "tandem"), (0, "c=1", "script")]
    assert order[6:8] == [(1, "c=1", "script"), (1, "c=1", "tandem")]
    assert len(order) == 2 * 2 * 3
    for run in form["runs"]:
        assert run["errors"] == {}
        assert run["output_tokens_per_s"] > 0
        assert run["client_cpu_s"] > 0
        assert set(run["parts_cpu_s"]) == ({"scheduler", "gateway", "worker-0"} if run["server"] == "tandem" else set())
    assert form["about"]["memory_mib"]["tandem"]["worker-0"]["resident"] > 10
    assert {one["peer"] for one in form["ratios"]} == {"script"}


def test_short_answers_are_told_and_not_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = (scripted("tandem"), scripted("script", "short"))
    assert compare(monkeypatch, tmp_path, chosen, "--rounds=1", "--concurrency=1") == 1
    assert "script, c=1, round 0: {'SHORT_ANSWER': 3}" in capsys.readouterr().out
    form = json.loads((tmp_path / "out" / "peers.json").read_text())
    assert {one["load"] for one in form["ratios"]} == {"prefill"}


def test_a_peer_that_does_not_start_ends_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Peer(
        "broken", "openai", lambda site: True, lambda site, port: [sys.executable, "-c", "exit('no weights')"]
    )
    assert compare(monkeypatch, tmp_path, (broken,)) == 1
    assert "no weights" in capsys.readouterr().err


def test_only_what_is_installed_is_compared(tmp_path: Path) -> None:
    nothing = Site(tmp_path)
    assert [peer.name for peer in PEERS if peer.is_installed(nothing)] == ["tandem"]
    with_vllm = replace(nothing, vllm_python=Path("python"))
    assert {peer.name for peer in PEERS if peer.is_installed(with_vllm)} >= {"tandem", "vllm"}
    assert vllm_all_cores_env(with_vllm)["VLLM_CPU_OMP_THREADS_BIND"] == f"0-{with_vllm.num_cores - 1}"


def test_every_load_fits_into_a_slot_of_llama_cpp() -> None:
    """It splits its memory evenly among slots and refuses what is longer."""
    site = Site(model=Path("model"), llama_server=Path("llama-server"), gguf=Path("weights.gguf"))
    command = llama_command(site, 1)
    slots = int(command[command.index("--parallel") + 1])
    room = int(command[command.index("--ctx-size") + 1]) // slots
    for load in (*peers.loads([1, 8, 32, 64], waves=2), peers.WARM_UP):
        assert load.concurrency <= slots
        assert load.input_tokens + load.output_tokens <= room
