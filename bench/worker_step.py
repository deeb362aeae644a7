"""CPU cost of one decode step in the worker, everything but the model's forward pass.

    python -m bench.worker_step [--kernels] [--temperature 0.7] [--top-p 0.9] [--rows 1,8,32]

Workload: R rows that all decode one token, block size 16, contexts of 64 to 79 tokens, so that one row in 16 takes a
block in every step; the engine returns prepared logits over 49,152 ids. Steps are those the scheduler sends. Phases:
planning and packing before the forward pass, sampling, and settling with the outcome's packing after it. Process time
of one thread, medians over the steps. Without --kernels sampling is torch's.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

import worker.executor
from engine.batch import Batch, EngineInfo
from engine.kernels import build
from engine.noise import choice_seed
from worker.executor import Executor, NoDrafting
from worker.sequences import SequenceTable, limits_of
from worker.steps import Admission, SamplingParams, Step

VOCAB_SIZE = 49_152
BLOCK_SIZE = 16
PROMPT_TOKENS = 64
STEPS = 200
WARM_UP = 20


@dataclass
class PreparedEngine:
    """Logits without a model; notes when it was called."""

    rows: int
    called_s: float = 0.0
    logits: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.logits = torch.randn(self.rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3
        self.logits[:, ::501] += 9.0  # a head, as models have one

    @property
    def info(self) -> EngineInfo:
        return engine_info(self.rows, STEPS + WARM_UP)

    def forward(self, batch: Batch) -> torch.Tensor:
        self.called_s = time.thread_time()
        return self.logits[: len(batch.logit_indices)]


@dataclass(frozen=True)
class Timing:
    """Median CPU microseconds of one step."""

    rows: int
    plan_us: float
    sample_us: float
    settle_us: float

    def __str__(self) -> str:
        total = self.plan_us + self.sample_us + self.settle_us
        parts = (self.plan_us, self.sample_us, self.settle_us, total)
        return f"{self.rows:5d} " + " ".join(f"{part:9.0f}" for part in parts)


def decode_steps(rows: int, params: SamplingParams, num_steps: int) -> Iterator[Step]:
    """Steps in which every row decodes one token; the first admits them, with all but the last token computed."""
    known = [PROMPT_TOKENS + slot % BLOCK_SIZE for slot in range(rows)]
    blocks = itertools.count()
    first = [[next(blocks) for _ in range(-(-length // BLOCK_SIZE))] for length in known]
    admissions = [
        Admission(slot, slot, list(range(known[slot])), known[slot], 0, params, slot, first[slot], known[slot] - 1)
        for slot in range(rows)
    ]
    for number in range(num_steps):
        new = [int(number > 0 and (length + number) % BLOCK_SIZE == 1) for length in known]
        yield Step(
            term=1,
            epoch=1,
            number=number,
            admissions=admissions if number == 0 else (),
            slots=range(rows),
            num_prefill_tokens=[0] * rows,
            max_draft_tokens=[0] * rows,
            num_new_blocks=new,
            new_block_ids=[next(blocks) for _ in range(sum(new))],
        )


def engine_info(rows: int, num_steps: int) -> EngineInfo:
    """With room for so many steps of `decode_steps`."""
    length = PROMPT_TOKENS + BLOCK_SIZE + num_steps + 1
    return EngineInfo("prepared", VOCAB_SIZE, length, rows * -(-length // BLOCK_SIZE), BLOCK_SIZE, rows)


def measure(rows: int, params: SamplingParams) -> Timing:
    engine = PreparedEngine(rows)
    executor = Executor(engine, SequenceTable(limits_of(engine.info), choice_seed), NoDrafting())
    sampled: list[tuple[float, float]] = []
    plain_sample = worker.executor.sample

    def timed_sample(*arguments: object) -> object:
        began_s = time.thread_time()
        result = plain_sample(*arguments)  # type: ignore[arg-type]
        sampled.append((began_s, time.thread_time()))
        return result

    steps = decode_steps(rows, params, STEPS + WARM_UP)
    plans, samples, settles = [], [], []
    worker.executor.sample = timed_sample  # type: ignore[assignment]
    try:
        for number, step in enumerate(steps):
            began_s = time.thread_time()
            outcome = executor.run(step)
            ended_s = time.thread_time()
            assert len(outcome.token_ids) == rows, outcome.failures
            if number >= WARM_UP:
                sampling_s, sampled_s = sampled[-1]
                plans.append(engine.called_s - began_s)
                samples.append(sampled_s - sampling_s)
                settles.append(ended_s - sampled_s + sampling_s - engine.called_s)
    finally:
        worker.executor.sample = plain_sample
    return Timing(rows, *(statistics.median(part) * 1e6 for part in (plans, samples, settles)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,32,64,256")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--kernels", action="store_true", help="sample with the C++ kernels")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.kernels:
        build.library()
    params = SamplingParams(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        repetition_penalty=arguments.repetition_penalty,
        max_tokens=STEPS + WARM_UP + 1,
    )
    print(" rows   plan µs sample µs settle µs  total µs")
    for rows in map(int, arguments.rows.split(",")):
        print(measure(rows, params), flush=True)


if __name__ == "__main__":
    main()
