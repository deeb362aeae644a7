"""What speculation costs the steps that draft nothing: pairs of steps with and without it, CPU time.

    python -m bench.idle_speculation [--rows 1,8,64,256] [--steps 256] [--builds 5] [--json]

Scheduler: two cores with the same rows, one without drafts (off), one whose budget is chosen (auto) for drafts that
never pay, so that k is 0. Worker: two executors with the same rows, one without a draft worker, one that is linked to
a draft worker, a real process, and asked for no draft. Steps are those of `bench/scheduler_core.py` and
`bench/worker_step.py`, without the model's forward pass: nothing but what surrounds it is in the denominator. Both
sides take turns step by step, and who goes first alternates, too; a pair in which the one side drafted (it looks now
and then whether drafts have become better) isn't counted. `--builds` times everything is built anew, so that where
things lie in memory speaks for neither. CPU time of the thread; the median ratio of each 16 pairs, and the median of
those with its 90 % interval. Beside them: the CPU time of the draft worker, in percent of a core, while steps run that
ask it for nothing, and while nothing runs.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeVar

import torch

from bench.ratios import Ratio, bootstrap
from bench.scheduler_core import WORKER, answer, loaded_scheduler
from bench.servers import cpu_seconds
from bench.worker_step import VOCAB_SIZE, decode_steps, engine_info
from engine.batch import Batch, Choices, DecodeRows, EngineInfo
from engine.noise import choice_seed
from scheduler.core.config import SpeculationMode
from scheduler.core.speculation import Phase
from worker.draft_links import DraftLinks
from worker.executor import Drafting, Executor, NoDrafting
from worker.sequences import SequenceTable, limits_of
from worker.steps import SamplingParams

T = TypeVar("T")

BLOCK = 16
"""pairs whose median counts as one"""
DRAFT_TOKENS = 4
WARM_UP_STEPS = 16
MOST_STEPS_TO_OFF = 400
LINK_TIMEOUT_S = 120.0
IDLE_S = 10.0

Stepper = Callable[[], int | None]
"""runs one step: its CPU nanoseconds, or None where it drafted"""


@dataclass(frozen=True, slots=True)
class Cost:
    """Steps with idle speculation by steps without."""

    where: str
    rows: int
    plain_us: float
    """CPU of a step without"""
    ratio: Ratio


def ratios_of(plain: Stepper, idle: Stepper, num_steps: int) -> tuple[list[float], float]:
    """Idle by plain, the median of each BLOCK pairs; and the median microseconds of a plain step."""
    found: list[tuple[int, int]] = []
    gc.collect()
    gc.freeze()
    for number in range(num_steps):
        first, second = (plain(), idle()) if number % 2 else (idle(), plain())
        if first is not None and second is not None:
            found.append((first, second) if number % 2 else (second, first))
    gc.unfreeze()
    ratios = [idle_ns / plain_ns for plain_ns, idle_ns in found]
    blocks = [ratios[start : start + BLOCK] for start in range(0, len(ratios) - BLOCK + 1, BLOCK)]
    return [statistics.median(block) for block in blocks], statistics.median(one for one, _ in found) / 1e3


# ------------------------------------------------------------------------------------------------------------ scheduler


def core_stepper(rows: int, mode: SpeculationMode, num_steps: int) -> Stepper:
    """A core whose next steps all decode; with a chosen budget one that has found that drafts don't pay."""
    scheduler = loaded_scheduler(rows, DRAFT_TOKENS, mode, num_steps + WARM_UP_STEPS + MOST_STEPS_TO_OFF)
    speculation = scheduler.workers[WORKER].speculation

    def step() -> int | None:
        began = time.thread_time_ns()
        scheduler.place("m")
        planned = scheduler.plan(WORKER)
        paused = time.thread_time_ns()
        assert planned is not None
        outcome = answer(planned, right=False)
        resumed = time.thread_time_ns()
        scheduler.apply(WORKER, outcome)
        spent = time.thread_time_ns() - resumed + paused - began
        return None if any(planned.num_draft) else spent

    for number in range(MOST_STEPS_TO_OFF):
        if number >= WARM_UP_STEPS and (mode is SpeculationMode.OFF or speculation.phase is Phase.OFF):
            break
        step()
    return step


def core_cost(rows: int, num_steps: int, builds: int) -> Cost:
    """Of the scheduler's core."""
    ratios: list[float] = []
    spent_us: list[float] = []
    for number in range(builds):
        modes = [SpeculationMode.OFF, SpeculationMode.AUTO]
        made = {mode: core_stepper(rows, mode, num_steps) for mode in (modes if number % 2 else reversed(modes))}
        found, median_us = ratios_of(made[SpeculationMode.OFF], made[SpeculationMode.AUTO], num_steps)
        ratios += found
        spent_us.append(median_us)
    return Cost("scheduler", rows, min(spent_us), bootstrap(ratios))


# --------------------------------------------------------------------------------------------------------------- worker


@dataclass(frozen=True, slots=True)
class InstantEngine:
    """Chooses tokens without a model."""

    rows: int
    num_steps: int
    chooses: bool = True

    @property
    def info(self) -> EngineInfo:
        return engine_info(self.rows, self.num_steps)

    def forward(self, batch: Batch) -> torch.Tensor:
        raise NotImplementedError

    def choose(self, batch: Batch, choices: Choices) -> list[int]:
        return [7] * self.rows

    def decode(self, rows: DecodeRows) -> list[int]:
        return [7] * self.rows


def worker_stepper(rows: int, drafting: Drafting, num_steps: int) -> Stepper:
    """An executor whose next steps all decode a token of each row."""
    engine = InstantEngine(rows, num_steps + WARM_UP_STEPS)
    executor = Executor(engine, SequenceTable(limits_of(engine.info), choice_seed), drafting)
    steps = decode_steps(rows, SamplingParams(temperature=0.0, max_tokens=num_steps + WARM_UP_STEPS + 1), 10**6)

    def step() -> int:
        made = next(steps)
        began = time.thread_time_ns()
        outcome = executor.run(made)
        spent = time.thread_time_ns() - began
        assert len(outcome.token_ids) == rows, outcome.failures
        return spent

    for _ in range(WARM_UP_STEPS):
        step()
    return step


def worker_cost(rows: int, links: DraftLinks, num_steps: int, builds: int) -> Cost:
    """Of the worker's step thread."""
    ratios: list[float] = []
    spent_us: list[float] = []
    for number in range(builds):
        sides: list[Drafting] = [NoDrafting(), links]
        made = [worker_stepper(rows, side, num_steps) for side in (sides if number % 2 else reversed(sides))]
        plain, idle = made if number % 2 else reversed(made)
        found, median_us = ratios_of(plain, idle, num_steps)
        ratios += found
        spent_us.append(median_us)
    return Cost("worker", rows, min(spent_us), bootstrap(ratios))


@contextmanager
def draft_worker() -> Iterator[tuple[int, str]]:
    """A draft worker process without weights: its id and address."""
    command = [sys.executable, "-P", "-m", "draft_worker", "--target=m", "--draft=fake", "--scheduler=127.0.0.1:1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        try:
            yield child.pid, child.stdout.readline().decode().split()[-1]
        finally:
            child.kill()


@contextmanager
def linked(address: str) -> Iterator[DraftLinks]:
    """Links to a draft worker, on an event loop of their own thread as in a worker."""
    made: list[tuple[DraftLinks, asyncio.AbstractEventLoop, asyncio.Task[None]]] = []
    ready = threading.Event()

    async def serve() -> None:
        links = DraftLinks(worker_id="w", model="m", vocab_size=VOCAB_SIZE, on_change=ready.set)
        links.set_addresses([address])
        task = asyncio.ensure_future(links.run())
        made.append((links, asyncio.get_running_loop(), task))
        await asyncio.gather(task, return_exceptions=True)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    if not ready.wait(LINK_TIMEOUT_S):
        raise TimeoutError("the draft worker did not link")
    links, loop, task = made[0]
    try:
        yield links
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


def share_of(pid: int, work: Callable[[], T]) -> tuple[float, T]:
    """CPU seconds of a process by the seconds that `work` takes; and what comes of it."""
    began_s, before_s = time.perf_counter(), cpu_seconds(pid)
    found = work()
    return (cpu_seconds(pid) - before_s) / (time.perf_counter() - began_s), found


def main() -> None:
    """Print a table, or JSON lines with --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,64,256", metavar="N,…")
    parser.add_argument("--steps", type=int, default=256, metavar="N", help="pairs of steps of each build")
    parser.add_argument("--builds", type=int, default=5, metavar="N", help="times that both sides are built anew")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    numbers = [int(one) for one in arguments.rows.split(",")]
    for rows in numbers:
        _show(core_cost(rows, arguments.steps, arguments.builds), arguments.json)
    with draft_worker() as (pid, address), linked(address) as links:
        for rows in numbers:
            work = partial(worker_cost, rows, links, arguments.steps, arguments.builds)
            under_load, cost = share_of(pid, work)
            _show(cost, arguments.json)
            if not arguments.json:
                print(f"{'':>15} the draft worker meanwhile: {under_load:.2%} of a core")
        idle, _ = share_of(pid, lambda: time.sleep(IDLE_S))
        if not arguments.json:
            print(f"{'':>15} the draft worker idle: {idle:.2%} of a core")


def _show(cost: Cost, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(cost)), flush=True)
    else:
        print(f"{cost.where:>9} {cost.rows:>5} {cost.plain_us:>9.0f} µs {cost.ratio.as_excess()}", flush=True)


if __name__ == "__main__":
    main()
