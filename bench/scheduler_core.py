"""CPU cost of the scheduler's core: planning and applying one decode step.

    python -m bench.scheduler_core

Workload: one worker, R rows that all decode, block size 16, prompts of 64 to 79 tokens that differ from the first
token on. Every step is planned and answered in full: one token a row, or with drafts of a fixed budget k + 1 (all
accepted). With an adaptive budget (auto) no draft is ever right, so that it is 0 but for probes. Lengths are
staggered, so that in every step one row in 16 (or in 3.2) takes a block and has a full one hashed and named. Process
time, medians over the steps; no I/O, no protobuf.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass

from scheduler.core.config import CoreConfig, SpeculationMode
from scheduler.core.scheduler import Scheduler
from scheduler.core.sequence import RequestSpec
from scheduler.core.step import Step, StepOutcome
from scheduler.core.worker_state import WorkerSpec

MODEL = "m"
WORKER = "w"
PROMPT_TOKENS = 64
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Timing:
    """Median CPU microseconds of one step."""

    rows: int
    draft_tokens: int
    speculation: str
    steps: int
    plan_us: float
    apply_us: float
    total_us: float


def loaded_scheduler(rows: int, draft_tokens: int, speculation: SpeculationMode, steps: int) -> Scheduler:
    """A worker on which `rows` sequences have just been prefilled, with memory for `steps` steps."""
    max_tokens = (steps + 16) * (1 + draft_tokens)
    config = CoreConfig(
        token_budget=rows * (PROMPT_TOKENS + BLOCK_SIZE + 1 + draft_tokens),
        max_waiting=rows,
        speculation=speculation,
        max_draft_tokens=draft_tokens,
        draft_token_budget=rows * (1 + draft_tokens),
        depth=2,
    )
    length = PROMPT_TOKENS + BLOCK_SIZE + max_tokens
    scheduler = Scheduler(config)
    spec = WorkerSpec(MODEL, "fp", rows * (-(-length // BLOCK_SIZE)), BLOCK_SIZE, rows, length)
    scheduler.attach(WORKER, spec, now=0.0)
    scheduler.workers[WORKER].drafting = draft_tokens > 0
    for index in range(rows):
        prompt = tuple(index + 1000 * position for position in range(PROMPT_TOKENS + index % BLOCK_SIZE))
        scheduler.submit(RequestSpec(index, MODEL, prompt, max_tokens=max_tokens, client=str(index % 8)), now=0.0)
    while scheduler.num_running < rows:
        scheduler.place(MODEL)
        step = scheduler.plan(WORKER)
        assert step is not None
        scheduler.apply(WORKER, answer(step, right=True))
    return scheduler


def answer(step: Step, right: bool) -> StepOutcome:
    """The outcome of a worker whose every draft is right, or wrong; a token takes as long as any other."""
    drafted = step.num_draft if any(step.num_draft) else []
    accepted = drafted if right else [0] * len(drafted)
    num_tokens = step.reserved if right else [min(reserved, 1) for reserved in step.reserved]
    tokens = [7] * sum(num_tokens)
    finish = [0] * len(num_tokens)
    size = step.num_tokens
    return StepOutcome(
        step.number,
        list(num_tokens),
        tokens,
        finish,
        list(drafted),
        list(accepted),
        duration_s=size * 1e-4,
        num_model_tokens=size,
    )


def measure(rows: int, draft_tokens: int, speculation: SpeculationMode, steps: int) -> Timing:
    """Run steady decode steps and time each half."""
    scheduler = loaded_scheduler(rows, draft_tokens, speculation, steps)
    right = speculation is not SpeculationMode.AUTO
    plans, applies, totals = [], [], []
    for number in range(steps):
        began = time.process_time_ns()
        scheduler.place(MODEL)
        step = scheduler.plan(WORKER)
        planned = time.process_time_ns()
        assert step is not None
        assert len(step.sequences) == rows
        outcome = answer(step, right)
        answered = time.process_time_ns()
        updates = scheduler.apply(WORKER, outcome)
        applied = time.process_time_ns()
        assert len(updates) == rows
        if number >= 8:
            plans.append(planned - began)
            applies.append(applied - answered)
            totals.append(plans[-1] + applies[-1])
    medians = (statistics.median(values) / 1e3 for values in (plans, applies, totals))
    return Timing(rows, draft_tokens, speculation.value, len(plans), *medians)


def main() -> None:
    """Print a table, or JSON lines with --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="steps per measurement")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args()
    if not arguments.json:
        print(f"{'rows':>5} {'k':>2} {'budget':>6} {'plan µs':>9} {'apply µs':>9} {'total µs':>9}   (CPU, medians)")
    off, auto, fixed = SpeculationMode.OFF, SpeculationMode.AUTO, SpeculationMode.FIXED
    for rows, draft_tokens, speculation in (
        (32, 0, off),
        (256, 0, off),
        (256, 4, off),
        (256, 4, auto),
        (256, 4, fixed),
        (1024, 0, off),
    ):
        timing = measure(rows, draft_tokens, speculation, arguments.steps)
        if arguments.json:
            print(json.dumps(asdict(timing)))
        else:
            print(
                f"{timing.rows:>5} {timing.draft_tokens:>2} {timing.speculation:>6} {timing.plan_us:>9.0f} "
                f"{timing.apply_us:>9.0f} {timing.total_us:>9.0f}"
            )


if __name__ == "__main__":
    main()
