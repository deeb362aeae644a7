"""`make chaos` and `make soak`: the whole matrix, recovery times, and random faults for as long as one likes.

    python -m tests.chaos.run everything                       the first two of these, and pairs with a real model
    python -m tests.chaos.run matrix [--real] [--only TEXT]    every fault × process × load; --real: a real model
    python -m tests.chaos.run recovery [--real]                pauses of eight streams of up to 256 tokens
    python -m tests.chaos.run soak --minutes 60 [--seed N]     random faults, some of them at once

Each prints one line of verdict and appends it to docs/reliability.md (--no-record: only prints). Exit status 1: losses.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

import grpc

from cli.model_source import DEFAULT_NAME
from engine.model_cache import cache_folder
from tests.chaos import leaks
from tests.chaos.arena import Arena, open_arena
from tests.chaos.cells import Cell, every_cell, pairwise_cells
from tests.chaos.cluster import WORKERS, Options, running
from tests.chaos.faults import FAULTS, TARGETS, Strike
from tests.chaos.judgement import Result
from tests.chaos.loads import LOADS, Ask, Load
from tests.chaos.record import Verdict
from tests.chaos.switchboard import Unreachable

NOTICED_WITHIN_S = 5.0
"""a cut link, or a process that stands still"""
MOST_GROWTH_MIB = 96.0
MEDIAN_PAUSES_S = {("worker", "kill"): 2.0, ("leader", "kill"): 3.0}
"""of eight streams of up to 256 tokens, on a machine that is quiet"""


def recovery_load() -> Load:
    """Eight streams of up to 256 tokens."""
    lengths = (256, 240, 224, 208, 192, 248, 232, 216)
    asks = [
        Ask(tuple(f"Recovery, stream number {index}. ".encode()), length, 1, 0.8 if index % 3 else 0.0, index)
        for index, length in enumerate(lengths)
    ]
    return Load("recovery", tuple(asks))


def recovery_cells(times: int) -> list[Cell]:
    """Each fault of each process, early in a stream and late."""
    strikes = [
        Strike(fault, target, 8 + 31 * number) for number in range(times) for target in TARGETS for fault in FAULTS
    ]
    return [Cell("recovery", (strike,)) for strike in strikes]


def random_cells(seed: int, until: float) -> Iterator[Cell]:
    """One to three faults each, one after the other or all at once, until a time of the monotonic clock."""
    chance = random.Random(seed)
    while time.monotonic() < until:
        targets = chance.sample([*TARGETS, "worker"], chance.choice((1, 1, 2, 2, 3)))
        strikes = tuple(Strike(chance.choice(FAULTS), target, chance.randrange(1, 40)) for target in targets)
        yield Cell(chance.choice(LOADS), _apart(strikes), together=len(strikes) > 1 and chance.random() < 0.5)


def _apart(strikes: tuple[Strike, ...]) -> tuple[Strike, ...]:
    """Two strikes at workers are at both of them: which one it is, is the index's parity."""
    if sum(strike.target == "worker" for strike in strikes) < 2:
        return strikes
    turned, parity = [], 0
    for strike in strikes:
        index = strike.index
        if strike.target == "worker":
            index, parity = index - index % 2 + parity, 1
        turned.append(Strike(strike.fault, strike.target, max(index, 2 + index % 2)))
    return tuple(turned)


async def run_all(chosen: Iterable[Cell], verdict: Verdict, options: Options, timed: bool) -> None:
    """Run cells in one cluster; after one that failed, in a new one."""
    waiting: Iterator[Cell] = iter(chosen)
    pending: Cell | None = next(waiting, None)
    while pending is not None:
        async with _arena(options) as arena:
            memory: dict[tuple[str, int], float] = {}
            while pending is not None:
                cell, pending = pending, None
                try:
                    result = await arena.run(cell)
                except (AssertionError, TimeoutError, OSError, grpc.RpcError, Unreachable) as error:
                    verdict.losses.append(f"{cell}: {error or type(error).__name__}")
                    print(f"FAILED {cell}: {error or type(error).__name__}", flush=True)
                    _show_logs(arena)
                    pending = next(waiting, None)
                    break
                if timed:
                    result.losses += _noticed_late(result, arena)
                result.losses += _grown(arena, memory)
                verdict.add(result)
                _show(result)
                pending = next(waiting, None)


@contextlib.asynccontextmanager
async def _arena(options: Options) -> AsyncIterator[Arena]:
    with tempfile.TemporaryDirectory(prefix="tandem-chaos-") as folder:
        async with running(Path(folder), options) as cluster, open_arena(cluster, options) as opened:
            opened.loads["recovery"] = recovery_load()
            yield opened


def _noticed_late(result: Result, arena: Arena) -> list[str]:
    late = []
    for struck in result.struck:
        bound = NOTICED_WITHIN_S + arena.lag.between(struck.at, struck.at + struck.noticed_s)
        if struck.strike.fault in ("cut", "stop") and struck.noticed_s > bound:
            late.append(f"{struck.strike} was noticed after {struck.noticed_s:.1f} s, not {bound:.1f} s")
    return late


def _grown(arena: Arena, memory: dict[tuple[str, int], float]) -> list[str]:
    """Processes that have grown too far since this runner first saw them; `memory` is what they had then."""
    grown = []
    for name in arena.cluster.names:
        pid = arena.cluster.pid(name)
        now = leaks.resident_mib(pid)
        before = memory.setdefault((name, pid), now)
        # A KV pool's memory is there once it was used.
        if now > before + MOST_GROWTH_MIB + (arena.cluster.options.kv_mib if name in WORKERS else 0):
            grown.append(f"{name} grew from {before:.0f} to {now:.0f} MiB")
    return grown


def _show(result: Result) -> None:
    verdict = "LOST" if result.losses else "missed" if result.missed else "holds"
    for struck in result.struck:
        waits = " ".join(f"{one:.2f}" for one in result.pauses_s(struck))
        print(
            f"{verdict} {result.cell.load}: {struck.strike} ({struck.name}): "
            f"noticed {struck.noticed_s:.1f} s, settled {struck.settled_s:.1f} s, pauses {waits}",
            flush=True,
        )
    for loss in result.losses:
        print(f"  LOSS {loss}", flush=True)
    for missed in result.missed:
        print(f"  MISSED {missed}", flush=True)


def _show_logs(arena: Arena) -> None:
    for name, lines in arena.cluster.logs.items():
        print(f"  --- {name}", *lines[-25:], sep="\n  ", flush=True)


def _options(real: bool) -> Options | None:
    if not real:
        return Options()
    folder = cache_folder() / "models" / DEFAULT_NAME
    # 30 layers of keys and values, 3 heads of 64 floats, 16 tokens a block.
    kv_mib = 512 * 16 * 30 * 2 * 3 * 64 * 4 / 2**20
    return Options(model=folder, draft="ngram", num_blocks=512, kv_mib=kv_mib) if folder.exists() else None


def _plan(what: str, real: bool, args: argparse.Namespace) -> tuple[Verdict, Iterable[Cell]]:
    model = "SmolLM2-135M" if real else "fake engine"
    if what == "soak":
        until = time.monotonic() + 60 * args.minutes
        what = f"soak of {args.minutes:g} min, seed {args.seed}, {model}"
        return Verdict(what, may_miss=True), random_cells(args.seed, until)
    if what == "recovery":
        return Verdict(f"recovery, {model}"), recovery_cells(args.times)
    if real or args.pairwise:
        return Verdict(f"pairs, {model}"), pairwise_cells()
    return Verdict(f"matrix, {model}"), every_cell()


def _run(what: str, real: bool, args: argparse.Namespace) -> Verdict | None:
    """One run, its table, its losses and its line; None where the model is missing. Ctrl-C ends it, not its verdict."""
    options = _options(real)
    if options is None:
        print("the default model is not here (`tandem up` fetches it): nothing is run with it")
        return None
    verdict, chosen = _plan(what, real, args)
    try:
        asyncio.run(run_all((one for one in chosen if args.only in str(one)), verdict, options, timed=what != "soak"))
    except KeyboardInterrupt:
        verdict.what += ", cut short"
    if what == "recovery":
        verdict.losses += slow_recoveries(verdict)
    for row in verdict.table():
        print(row)
    for loss in verdict.losses:
        print(f"LOSS {loss}")
    print(verdict.line(), flush=True)
    if not args.no_record:
        verdict.keep()
    return verdict


def slow_recoveries(verdict: Verdict) -> list[str]:
    """Median pauses that are longer than promised."""
    found = []
    for struck, bound_s in MEDIAN_PAUSES_S.items():
        pauses = verdict.pauses_s.get(struck)
        if pauses and statistics.median(pauses) > bound_s:
            found.append(f"{' '.join(struck)}: a median pause of {statistics.median(pauses):.2f} s, not {bound_s:g} s")
    return found


def main(arguments: list[str]) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run")
    parser.add_argument("what", choices=("everything", "matrix", "recovery", "soak"))
    parser.add_argument("--real", action="store_true", help="the default model's weights, in float32; pairwise")
    parser.add_argument("--pairwise", action="store_true", help="the fifteen cells of the ordinary suite")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cells whose description has it")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--times", type=int, default=3, help="recovery: how often each fault strikes")
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args(arguments)
    runs = [(args.what, args.real)]
    if args.what == "everything":
        runs = [("matrix", False), ("recovery", False), ("matrix", True)]
    verdicts = [verdict for what, real in runs if (verdict := _run(what, real, args)) is not None]
    failed = any(verdict.losses for verdict in verdicts)
    if len(runs) > 1:
        print("", *(verdict.line() for verdict in verdicts), sep="\n")
        print(f"chaos: {'FAILED' if failed else 'holds'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
