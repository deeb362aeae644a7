"""T(n) before the first step: how long a step of n token rows takes, for n = 1, 2, 4, 8, …, measured in a bounded time.

The scheduler starts from it (scheduler/core/step_time.py) and corrects it by the steps that it sees.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import torch

from engine.batch import Batch, Choices, ChoosingEngine, Engine
from engine.sampler import SampleRow, sample
from engine.sampling_params import SamplingParams

MAX_ROWS = 256
REPEATS = 3
"""of each size, after one that warms up; the least counts"""

StepTimes = list[tuple[int, float]]
"""(token rows, seconds), sizes rising"""


def measure_step_times(engine: Engine, budget_s: float, clock: Callable[[], float] = time.perf_counter) -> StepTimes:
    """Forward and choose for more and more rows, until another size may not fit into `budget_s`.

    To be called before the engine's KV memory is anybody's: it writes the first token of as many blocks.
    """
    info = engine.info
    most = min(MAX_ROWS, info.max_sequences, info.num_blocks)
    found: StepTimes = []
    began_s = clock()
    num_rows, last_s = 1, 0.0
    while num_rows <= most:
        # Another size takes at most twice as long as the last one did.
        if clock() - began_s + 2 * last_s > budget_s:
            break
        at_s = clock()
        durations = [_step_s(engine, num_rows, clock) for _ in range(1 + REPEATS)]
        found.append((num_rows, min(durations[1:])))
        last_s = clock() - at_s
        num_rows *= 2
    return found


def _step_s(engine: Engine, num_rows: int, clock: Callable[[], float]) -> float:
    batch = Batch(
        token_ids=np.zeros(num_rows, np.int32),
        positions=np.zeros(num_rows, np.int32),
        slot_mapping=np.arange(num_rows, dtype=np.int64) * engine.info.block_size,
        query_starts=np.arange(num_rows + 1, dtype=np.int32),
        context_lens=np.ones(num_rows, np.int32),
        block_tables=np.arange(num_rows, dtype=np.int32)[:, None],
        logit_indices=np.arange(num_rows, dtype=np.int64),
    )
    rows = [SampleRow(SamplingParams(temperature=0.0), 0, 0, (), 1) for _ in range(num_rows)]
    began_s = clock()
    with torch.inference_mode():
        if isinstance(engine, ChoosingEngine) and engine.chooses:
            engine.choose(batch, Choices([0.0] * num_rows, [0] * num_rows, [0] * num_rows))
        else:
            sample(engine.forward(batch), rows)
    return clock() - began_s


def added_s(step_times: StepTimes, num_rows: int, num_tokens: float) -> float:
    """What so many tokens more add to a step of so many rows; 0 where that is not known."""
    return max(0.0, _at(step_times, num_rows + num_tokens) - _at(step_times, num_rows))


def _at(step_times: StepTimes, size: float) -> float:
    """Linear between the sizes that were measured, and beyond the last two."""
    if len(step_times) < 2:
        return 0.0
    at = min(max(1, bisect_left(step_times, (size, 0.0))), len(step_times) - 1)
    (low, low_s), (high, high_s) = step_times[at - 1], step_times[at]
    return low_s + (high_s - low_s) * (size - low) / (high - low)
