"""What the cluster around the engine costs in CPU time: gateway, scheduler, and the worker's network side.

    .venv/bin/python -m bench.cluster_cost [--concurrency 1,8,32,64] [--step-ms 8.2 --token-us 775] [--json FILE]

Workload: as in `bench/peers.py`, 128 random prompt token ids and 128 output tokens, streamed, closed loop, on one
worker whose engine has no weights. A step waits `step_ms` + `token_us` for each of its tokens, about what the default
model takes on two cores, and the wait costs no CPU: what is left is the cluster's. The load generator is apart, in this
process. CPU time is the kernel's own account, to the nanosecond (/proc/PID/task/TID/schedstat).

Of the worker everything counts but its busiest thread, which is the one that runs the engine. A process that wakes
seldom finds its code and data gone from the caches, so one client's tokens cost more each than thirty-two clients' do,
and a machine that others use makes everything dearer: compare only runs that took turns.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.peer_report import Load
from bench.peer_table import HOST, MODEL_NAME, Peer, Site
from bench.peers import Target, put_on, start
from bench.servers import ServerFailed, thread_seconds
from cli.load_report import Report
from cluster import event_loop

VOCAB_SIZE = 260


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU microseconds per output token, and what the client saw."""

    concurrency: int
    gateway_us: float
    scheduler_us: float
    worker_us: float
    """its network side"""
    client_us: float
    output_tokens_per_s: float
    ttft_ms: float | None
    tpot_ms: float | None
    engine_ms: float
    """what a decode step of so many rows waits"""

    @property
    def cluster_us(self) -> float:
        """Per token, without the client."""
        return self.gateway_us + self.scheduler_us + self.worker_us


def tandem(step_ms: float, token_us: float) -> Peer:
    """A cluster without weights."""

    def command(site: Site, port: int) -> list[str]:
        return [
            *(sys.executable, "-m", "cli", "up", "--engine", "fake", "--served-model-name", MODEL_NAME),
            *("--draft", "none", "--num-blocks", "8192", "--host", HOST, "--port", str(port)),
            *("--fake-step-ms", str(step_ms), "--fake-token-us", str(token_us)),
        ]

    return Peer("tandem", "tandem", lambda site: True, command)


def spent(before: Mapping[str, Mapping[int, float]], after: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """CPU seconds of each process in between; of a worker without its busiest thread."""
    found = {}
    for name, threads in after.items():
        seconds = [spent_s - before[name].get(number, 0.0) for number, spent_s in threads.items()]
        found[name] = sum(seconds) - (max(seconds) if name.startswith("worker") else 0.0)
    return found


def cost_of(concurrency: int, parts: Mapping[str, float], report: Report, engine_ms: float) -> Cost:
    """Of one load; `parts`: CPU seconds of each process."""
    micro = 1e6 / report.output_tokens
    first, each = report.ttft_s.p50, report.time_per_output_token_s.p50
    return Cost(
        concurrency=concurrency,
        gateway_us=parts["gateway"] * micro,
        scheduler_us=parts["scheduler"] * micro,
        worker_us=sum(seconds for name, seconds in parts.items() if name.startswith("worker")) * micro,
        client_us=report.client_cpu_s * micro,
        output_tokens_per_s=report.output_tokens_per_s,
        ttft_ms=None if first is None else first * 1e3,
        tpot_ms=None if each is None else each * 1e3,
        engine_ms=engine_ms,
    )


async def measure(target: Target, concurrencies: Sequence[int], step_ms: float, token_us: float) -> list[Cost]:
    """One load after the other, each after a short one of its own kind. Raises ServerFailed for failed requests."""
    costs = []
    for index, one in enumerate(concurrencies):
        await put_on(target, Load("warm-up", one, one, 128, 8), 2_000_003 * (index + 1), VOCAB_SIZE)
        before = {name: thread_seconds(pid) for name, pid in target.parts.items()}
        report = await put_on(target, Load(f"c={one}", one, max(4, 2 * one), 128, 128), 1_000_003 * index, VOCAB_SIZE)
        parts = spent(before, {name: thread_seconds(pid) for name, pid in target.parts.items()})
        if report.errors:
            raise ServerFailed(f"requests failed: {report.errors}\n{target.server.last_lines()}")
        costs.append(cost_of(one, parts, report, step_ms + token_us * one / 1e3))
    return costs


def as_text(costs: Sequence[Cost]) -> str:
    """A table; µs of CPU per output token, and ms of CPU per step."""
    lines = [
        f"{'clients':>7} {'gateway':>8} {'scheduler':>9} {'worker':>7} {'cluster':>8} {'a step':>8} {'client':>7}"
        f" {'tokens/s':>9} {'first':>9} {'each':>8}",
    ]
    for cost in costs:
        step_ms = cost.cluster_us * cost.concurrency / 1e3
        lines.append(
            f"{cost.concurrency:>7} {cost.gateway_us:>8.0f} {cost.scheduler_us:>9.0f} {cost.worker_us:>7.0f} "
            f"{cost.cluster_us:>5.0f} µs {step_ms:>5.2f} ms {cost.client_us:>7.0f} {cost.output_tokens_per_s:>9.1f} "
            f"{cost.ttft_ms or 0:>6.1f} ms {cost.tpot_ms or 0:>5.2f} ms"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure and print; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", default="1,8,32,64", metavar="N,…")
    parser.add_argument("--step-ms", type=float, default=8.2, metavar="MS", help="what a step waits (default 8.2)")
    parser.add_argument("--token-us", type=float, default=775.0, metavar="US", help="and each token (default 775)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    concurrencies = [int(one) for one in args.concurrency.split(",")]
    with tempfile.TemporaryDirectory(prefix="tandem-") as scratch:
        try:
            target = start(tandem(args.step_ms, args.token_us), Site(Path(scratch)), Path(scratch))
        except ServerFailed as failure:
            print(f"cluster_cost: {failure}", file=sys.stderr)
            return 1
        try:
            costs = event_loop.run(measure(target, concurrencies, args.step_ms, args.token_us))
        except ServerFailed as failure:
            print(f"cluster_cost: {failure}", file=sys.stderr)
            return 1
        finally:
            target.server.stop()
    print(as_text(costs))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(cost) for cost in costs], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
