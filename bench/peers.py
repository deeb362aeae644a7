"""Tandem beside what a user would pick instead: same machine, same weights, same load, within the same minutes.

    .venv/bin/python -m bench.peers --vllm-python /path/to/venv/bin/python --rounds 3

Workload: closed loop of 1, 8, 32 and 64 clients; each request has 128 random prompt token ids that no other request
shares and exactly 128 output tokens (end of sequence ignored), T = 0, streamed. Prefill: 4 clients with prompts of
1024 tokens and one output token. Every server is started once, warmed up and left running; then each load is put on
one after the other, round by round, the order turned over every round, so that neither a warm nor a busy machine
speaks for one of them. Peers that aren't asked are stopped meanwhile (SIGSTOP), as some watch for work all the time;
what others take is measured, and so is each load generator's own CPU time.

Tandem is asked over gRPC, the others over HTTP (`bench/openai_load.py`); both clients run in this process and time
deliveries in the same way. The peers and their settings: `bench/peer_table.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.v1 import generation_pb2_grpc

from bench import openai_load
from bench.peer_report import Load, Run, as_json, as_text, plot, run_of
from bench.peer_table import HOST, MODEL_NAME, PEERS, Peer, Site, free_port
from bench.servers import Server, ServerFailed, answers, cpu_seconds, memory_of, pids_of
from cli import load as tandem_load
from cli.load import Workload
from cli.load_report import Report, summarise
from cluster import event_loop
from cluster.channel import connect
from engine.default_model import fetch_default_model

PREFILL = Load("prefill", 4, 8, 1024, 1)
WARM_UP = Load("warm-up", 8, 8, 128, 16)
# Between the seeds of two loads: further apart than any load has requests.
_SEED_STRIDE = 1_000_003


@dataclass(frozen=True, slots=True)
class Target:
    """One running server, and how to ask it."""

    peer: Peer
    server: Server
    port: int
    parts: dict[str, int]
    """Tandem's processes by name"""


def loads(concurrencies: Sequence[int], waves: int) -> list[Load]:
    """What a round puts on every server; `waves`: requests of each client, three at least in all."""
    return [*(Load(f"c={one}", one, max(3, waves * one), 128, 128) for one in concurrencies), PREFILL]


def start(peer: Peer, site: Site, folder: Path) -> Target:
    """Start a server and wait until it serves. Raises ServerFailed."""
    port = free_port()
    state_file = folder / "tandem.json"
    command = peer.command(site, port)
    if peer.protocol == "tandem":
        command += ["--state-file", str(state_file)]
    server = Server(peer.name, command, peer.env(site), folder)
    try:
        if peer.protocol == "tandem":
            ready = f"READY tandem {HOST}:{port}"
            took_s = server.wait_until(lambda: ready in server.log.read_text(errors="replace"), peer.start_timeout_s)
        else:
            url = f"http://{HOST}:{port}{peer.health_path}"
            took_s = server.wait_until(lambda: answers(url), peer.start_timeout_s)
    except BaseException:  # not started, or told to stop meanwhile
        server.stop()
        raise
    memory = server.memory()
    print(f"{peer.name} serves after {took_s:.0f} s; {memory.proportional:.0f} MiB", file=sys.stderr, flush=True)
    return Target(peer, server, port, pids_of(state_file) if peer.protocol == "tandem" else {})


async def put_on(target: Target, load: Load, seed: int, vocab_size: int) -> Report:
    """One load on one server."""
    workload = Workload(
        model=MODEL_NAME,
        num_requests=load.num_requests,
        concurrency=load.concurrency,
        input_tokens=load.input_tokens,
        output_tokens=load.output_tokens,
        vocab_size=vocab_size,
        seed=seed,
    )
    if target.peer.protocol == "tandem":
        async with connect(f"{HOST}:{target.port}") as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            cpu_s = time.process_time()
            records = await tandem_load.run(workload, [stub], lambda record: None)
    else:
        endpoint = openai_load.Endpoint(HOST, target.port, target.peer.fields)
        prompts = [tandem_load.prompt(workload, index) for index in range(load.num_requests)]
        cpu_s = time.process_time()
        records = await openai_load.run(endpoint, prompts, load.output_tokens, load.concurrency)
    return summarise(workload, records, time.process_time() - cpu_s)


async def measure(targets: Sequence[Target], load: Load, number: int, seed: int, vocab_size: int) -> list[Run]:
    """One load on every server in turn; the order is turned over every round."""
    runs = []
    for target in targets if number % 2 == 0 else reversed(targets):
        others = [one.server for one in targets if one is not target and one.peer.protocol != "tandem"]
        for server in others:
            server.pause()
        before = {one.peer.name: one.server.cpu_s() for one in targets}
        parts = {name: cpu_seconds(pid) for name, pid in target.parts.items()}
        report = await put_on(target, load, seed, vocab_size)
        for server in others:
            server.resume()
        spent = {one.peer.name: one.server.cpu_s() - before[one.peer.name] for one in targets}
        parts = {name: cpu_seconds(pid) - parts[name] for name, pid in target.parts.items()}
        own_s = spent.pop(target.peer.name)
        idle_share = sum(spent.values()) / report.duration_s if report.duration_s else 0.0
        run = run_of(target.peer.name, load, number, report, own_s, idle_share, parts)
        runs.append(run)
        what = f"{run.input_tokens_per_s:.0f} in/s" if load is PREFILL else f"{run.output_tokens_per_s:.1f} out/s"
        note = f" {run.errors}" if run.errors else ""
        print(f"round {number} {load.name:8} {run.server:14} {what}{note}", file=sys.stderr, flush=True)
    return runs


async def compare(targets: Sequence[Target], chosen: Sequence[Load], rounds: int, vocab_size: int) -> list[Run]:
    """Warm everything up, then all rounds."""
    for target in targets:
        for seed, load in enumerate((WARM_UP, dataclasses.replace(PREFILL, num_requests=2))):
            report = await put_on(target, load, seed, vocab_size)
            if report.errors:
                raise ServerFailed(f"{target.peer.name} fails: {report.errors}\n{target.server.last_lines()}")
    runs: list[Run] = []
    for number in range(rounds):
        for index, load in enumerate(chosen):
            seed = (1 + number * len(chosen) + index) * _SEED_STRIDE
            runs += await measure(targets, load, number, seed, vocab_size)
    return runs


def _memory(target: Target) -> dict[str, dict[str, float]]:
    """What a server holds after its loads, in MiB: all of it, and each of Tandem's processes."""
    found = {"all": target.server.memory()}
    found |= {name: memory_of(pid) for name, pid in target.parts.items()}
    return {name: dataclasses.asdict(memory) for name, memory in found.items()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="default: the default model")
    parser.add_argument("--vllm-python", type=Path, metavar="PATH", help="interpreter of an environment with vLLM")
    parser.add_argument("--llama-server", type=Path, metavar="PATH", help="llama.cpp's server; needs --gguf")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="the same weights for llama.cpp")
    parser.add_argument("--only", metavar="NAME,…", help=f"of {', '.join(peer.name for peer in PEERS)}")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument(
        "--waves", type=int, default=2, metavar="N", help="requests of each client in a run (default 2)"
    )
    parser.add_argument("--concurrency", default="1,8,32,64", metavar="N,…")
    parser.add_argument("--tandem-flag", action="append", default=[], metavar="FLAG", help="one more for `tandem up`")
    parser.add_argument(
        "--output", type=Path, default=Path("bench-peers"), metavar="FOLDER", help="JSON, plot and logs"
    )
    return parser.parse_args()


def main() -> int:
    """Compare what is installed; the exit status."""
    args = _arguments()
    site = Site(
        model=args.model or fetch_default_model(),
        vllm_python=args.vllm_python,
        llama_server=args.llama_server,
        gguf=args.gguf,
        tandem_flags=tuple(args.tandem_flag),
    )
    names = args.only.split(",") if args.only else [peer.name for peer in PEERS if peer.by_default]
    wanted = [peer for peer in PEERS if peer.name in names and peer.is_installed(site)]
    vocab_size = json.loads((site.model / "config.json").read_text())["vocab_size"]
    args.output.mkdir(parents=True, exist_ok=True)
    targets: list[Target] = []
    # A SIGTERM unwinds like a Ctrl-C, so that no server is left behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        for peer in wanted:
            targets.append(start(peer, site, args.output))
        chosen = loads([int(one) for one in args.concurrency.split(",")], args.waves)
        runs = event_loop.run(compare(targets, chosen, args.rounds, vocab_size))
        memory = {target.peer.name: _memory(target) for target in targets}
    except ServerFailed as failure:
        print(f"peers: {failure}", file=sys.stderr)
        return 1
    finally:
        for target in targets:
            target.server.stop()
    about = {
        "machine": platform.processor() or platform.machine(),
        "cores": site.num_cores,
        "model": site.model.name,
        "rounds": args.rounds,
        "at": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "commands": {peer.name: peer.command(site, 0) for peer in wanted},
        "memory_mib": memory,
    }
    print(as_text(runs))
    (args.output / "peers.json").write_text(json.dumps(as_json(runs, about), indent=1) + "\n")
    if not plot(runs, args.output / "peers.png"):
        print("no plot: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
    return 1 if any(run.errors for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
