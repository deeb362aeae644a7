"""Small makers of core objects, with defaults that fit a test."""

from __future__ import annotations

from typing import Any

from scheduler.core.config import CoreConfig
from scheduler.core.scheduler import Scheduler
from scheduler.core.sequence import Request, RequestSpec, Sequence
from scheduler.core.step import Step, StepOutcome
from scheduler.core.worker_state import WorkerSpec, WorkerState
from tests.scheduler.core.model_worker import Params


def request_spec(key: object = "r", prompt: int | tuple[int, ...] = 8, **fields: Any) -> RequestSpec:
    """A request; a number as prompt means so many tokens that no other prompt shares."""
    if isinstance(prompt, int):
        prompt = tuple(sum(map(ord, str(key))) * 1000 + position for position in range(prompt))
    fields.setdefault("params", Params())
    return RequestSpec(key=key, model=fields.pop("model", "m"), prompt_token_ids=prompt, **fields)


def choices(*emitted: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Choices 0, 1, … with so many tokens emitted already."""
    return tuple((index, tuple(range(count))) for index, count in enumerate(emitted))


def worker_spec(**fields: Any) -> WorkerSpec:
    """A worker with 16 blocks of 4 tokens and 4 slots."""
    given: dict[str, Any] = {
        "model": "m", "fingerprint": "x", "num_blocks": 16, "block_size": 4, "max_sequences": 4, "max_model_len": 64,
    }  # fmt: skip
    return WorkerSpec(**given | fields)


def sequence_of(key: object = "r", number: int = 1, limit: int | None = None, **fields: Any) -> Sequence:
    """A sequence outside any scheduler."""
    spec = request_spec(key, **fields)
    sequence = Sequence(number, Request(spec, number, 0.0), 0, ())
    sequence.limit = sequence.limit if limit is None else limit
    return sequence


def scheduler_of(*workers: WorkerSpec, **config: Any) -> Scheduler:
    """A scheduler with workers w0, w1, …"""
    scheduler = Scheduler(CoreConfig(**config))
    for index, spec in enumerate(workers or (worker_spec(),)):
        scheduler.attach(f"w{index}", spec, 0.0)
    return scheduler


def answer(step: Step, tokens: int | None = None, **fields: Any) -> StepOutcome:
    """The outcome in which every row that samples emits one token (or `tokens`), unlike any other."""
    counts = [min(reserved, 1 if tokens is None else tokens) for reserved in step.reserved]
    emitted = [step.number * 1_000_000 + index for index in range(sum(counts))]
    return StepOutcome(step.number, counts, emitted, fields.pop("finish", [0] * len(counts)), **fields)


def step_once(scheduler: Scheduler, worker_id: str = "w0", **fields: Any) -> Step:
    """Place, plan, answer and apply one step."""
    scheduler.place(scheduler.workers[worker_id].spec.model)
    step = scheduler.plan(worker_id)
    assert step is not None
    scheduler.apply(worker_id, answer(step, **fields))
    scheduler.check_integrity()
    return step


def attached(spec: WorkerSpec | None = None) -> WorkerState:
    """A worker outside any scheduler."""
    return WorkerState.attach("w0", spec or worker_spec())
