"""The engine alone, without a cluster: what one step costs, and where its time goes.

    python -m bench.engine [--kernels avx512] [--dtype float32] [--threads 2] [--json FILE]

Workload: N sequences with C tokens of context each, filled with random ids by real prefills. A decode step computes one
token of every sequence (or, as in a verification, several) and chooses by sampling at T = 0 as the worker does; it is
repeated at the same position. A prefill computes one prompt from its start in one step, with the last token's logits.
Times are medians of wall-clock time, from the batch on the host to token ids on the host.

Beside every figure stands the floor: the time that this machine, by `bench.ceilings` measured before and after, needs
at least to read the weights and the visible keys and values once, or to multiply, whichever is longer.

The split by operation is measured apart, in means over other steps with every operation wrapped. What an empty wrapper
costs is taken off; what is left around the operations is the plan, the walk over the calls, and sampling.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.ceilings import Ceilings, measure
from bench.floors import Costs, Work
from bench.op_times import OpTimes
from engine.batch import Batch, pad_tables
from engine.decoder_route import DecoderModel, decoder_spec
from engine.default_model import fetch_default_model
from engine.description import Undescribed
from engine.kernels.cpp_linear import CODED_SHARE
from engine.kernels.ops import Ops
from engine.kernels.selection import KERNELS, select_ops
from engine.loading import ModelFacts, check_supported, resolve_model
from engine.processors import SampleRow
from engine.runner import DTYPES, ROUTES, ModelRunner, RunnerOptions, resolve_device, resolve_dtype
from engine.sampler import sample
from engine.sampling_params import SamplingParams

BLOCK_SIZE = 16
PREFILL_CHUNK = 2048
WARM_UP = 3
MIN_STEPS = 5
LONG_S = 1.0
"""of a step that takes longer, one warms up and three are timed"""
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Timing:
    """A step's wall-clock milliseconds, and what they amount to."""

    work: Work
    median_ms: float
    best_ms: float
    steps: int
    tokens_per_s: float
    """computed by the median step"""
    floor_ms: float
    """of reading and multiplying, by the ceilings at hand"""

    def __str__(self) -> str:
        work = self.work
        return (
            f"{work.rows:5d} {work.context:8d} {work.tokens:7d} {self.median_ms:9.2f} {self.best_ms:9.2f} "
            f"{self.tokens_per_s:10.0f} {self.floor_ms:9.2f} {self.median_ms / self.floor_ms:6.2f}"
        )


def timing(work: Work, times_s: list[float], floor_s: float) -> Timing:
    median = statistics.median(times_s)
    tokens_per_s = work.rows * work.tokens / median
    return Timing(work, median * 1e3, min(times_s) * 1e3, len(times_s), tokens_per_s, floor_s * 1e3)


HEADER = (
    f"{'rows':>5} {'context':>8} {'tokens':>7} {'median ms':>9} {'best ms':>9} {'tokens/s':>10} {'floor ms':>9} ratio"
)


class Bench:
    """One runner and the sequences that are timed on it."""

    def __init__(self, runner: ModelRunner, kinds: list[Work], seconds: float) -> None:
        """`kinds`: all that will be timed."""
        self.runner = runner
        self._seconds = seconds
        self._random = np.random.default_rng(1)
        needed = blocks_per_row(kinds)
        order = self._random.permutation(runner.info.num_blocks).astype(np.int32)
        self._tables = np.split(order[: sum(needed)], np.cumsum(needed)[:-1])
        self._filled = [0] * len(needed)

    def times_s(self, work: Work, warmed: Callable[[], None] = lambda: None) -> list[float]:
        """Seconds of each of several steps, all of them after the call of `warmed`."""
        for row in range(work.rows):
            self._fill(row, work.context - work.tokens)
        batch = self._batch(work)
        long = self._step(batch) > LONG_S
        for _ in range(0 if long else WARM_UP - 1):
            self._step(batch)
        warmed()
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < (3 if long else MIN_STEPS) or time.perf_counter() - began < self._seconds:
            times.append(self._step(batch))
        return times

    def _step(self, batch: Batch) -> float:
        began = time.perf_counter()
        logits = self.runner.forward(batch)
        rows = [SampleRow(GREEDY, 0, 0, (), 0)] * len(batch.logit_indices)
        sample(logits, rows)
        return time.perf_counter() - began

    def _fill(self, row: int, length: int) -> None:
        """Attention over memory that was never written would read one page of zeros again and again."""
        while self._filled[row] < length:
            end = min(length, self._filled[row] + PREFILL_CHUNK)
            self._step(self._rows([(row, self._filled[row], end)], logits_per_row=1))
            self._filled[row] = end

    def _batch(self, work: Work) -> Batch:
        rows = [(row, work.context - work.tokens, work.context) for row in range(work.rows)]
        return self._rows(rows, work.num_logits)

    def _rows(self, rows: list[tuple[int, int, int]], logits_per_row: int) -> Batch:
        positions = np.concatenate([np.arange(first, end, dtype=np.int32) for _, first, end in rows])
        blocks = np.concatenate([self._tables[row][np.arange(first, end) // BLOCK_SIZE] for row, first, end in rows])
        starts = np.cumsum([0, *(end - first for _, first, end in rows)])
        wanted = np.concatenate([np.arange(end - logits_per_row, end) for end in starts[1:]])
        return Batch(
            token_ids=self._random.integers(3, self.runner.info.vocab_size, len(positions), dtype=np.int32),
            positions=positions,
            slot_mapping=blocks.astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE,
            query_starts=starts.astype(np.int32),
            context_lens=np.array([end for _, _, end in rows], np.int32),
            block_tables=pad_tables([self._tables[row][: -(-end // BLOCK_SIZE)] for row, _, end in rows]),
            logit_indices=wanted.astype(np.int64),
        )


def works(arguments: argparse.Namespace) -> dict[str, list[Work]]:
    """What is measured, by the table it stands in."""
    context = arguments.context
    return {
        "by rows": [Work(rows, context) for rows in arguments.rows],
        "by context": [Work(1, length) for length in arguments.contexts],
        "by tokens per row": [Work(rows, context, tokens) for rows in (1, 8) for tokens in arguments.tokens],
        "prefill": [Work(1, length, length, logits=1) for length in arguments.prompts],
    }


def blocks_per_row(kinds: list[Work]) -> list[int]:
    """Blocks that each row needs for the longest context in which it takes part."""
    lengths = [max(work.context for work in kinds if work.rows > row) for row in range(max(w.rows for w in kinds))]
    return [-(-length // BLOCK_SIZE) for length in lengths]


def split(facts: ModelFacts, options: RunnerOptions, kinds: list[Work], seconds: float) -> list[dict[str, Any]]:
    """Each kind of step's milliseconds per operation, most first; nothing on the transformers route, nor on a GPU,
    where steps are graphs (`bench.gpu_check` says more of those).
    """
    dtype, device = resolve_dtype(options.dtype), resolve_device(options.device)
    spec = decoder_spec(facts, facts.max_model_len)
    if options.route == "transformers" or isinstance(spec, Undescribed) or device.type != "cpu":
        return []
    ops = select_ops(device, options.kernels)
    times = OpTimes(ops)
    model = DecoderModel(facts, spec, ops, dtype, device, facts.max_model_len, recorded=False)
    bench = Bench(ModelRunner(model, facts, replace(options, num_blocks=sum(blocks_per_row(kinds)))), kinds, seconds)
    result = []
    for work in kinds:
        steps = bench.times_s(work, times.clear)
        result.append({"work": asdict(work), **times.per_step(len(steps), statistics.fmean(steps))})
    return result


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", help="folder, .gguf file or hub id; default: the default model")
    parser.add_argument("--dtype", default="bfloat16", choices=list(DTYPES))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--route", default="auto", choices=ROUTES)
    parser.add_argument("--kernels", default="auto", choices=KERNELS)
    parser.add_argument("--threads", type=int, help="default: the engine's")
    parser.add_argument("--rows", type=_numbers, default=[1, 8, 32, 64], help="decode steps of so many rows")
    parser.add_argument("--context", type=int, default=128, help="where it isn't what is varied")
    parser.add_argument("--contexts", type=_numbers, default=[128, 512, 1024, 2048, 4096], help="one row each")
    parser.add_argument("--tokens", type=_numbers, default=[1, 2, 3, 4, 5], help="per row, as in a verification")
    parser.add_argument("--prompts", type=_numbers, default=[128, 512, 2048], help="tokens of a prefill")
    parser.add_argument("--seconds", type=float, default=1.5, help="per figure, at least five steps")
    parser.add_argument("--no-split", action="store_true", help="leave out the split by operation")
    parser.add_argument("--json", type=Path, help="write everything there")
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    facts = check_supported(resolve_model(arguments.model) if arguments.model else fetch_default_model())
    tables = works(arguments)
    kinds = [work for table in tables.values() for work in table]
    options = RunnerOptions(
        dtype=arguments.dtype,
        device=arguments.device,
        num_blocks=sum(blocks_per_row(kinds)),
        block_size=BLOCK_SIZE,
        threads=arguments.threads,
        route=arguments.route,
        kernels=arguments.kernels,
    )
    runner = ModelRunner.load(facts.folder, **asdict(options))
    ops: Ops = select_ops(resolve_device(options.device), options.kernels)
    dtype, device = resolve_dtype(options.dtype), resolve_device(options.device)
    coded = dtype is torch.bfloat16 and "route=decoder kernels=cpp" in runner.info.fingerprint
    costs = Costs.of(facts, dtype, CODED_SHARE if coded else 1.0)
    print(f"{facts.folder.name} {options.dtype}: {runner.info.fingerprint}")

    before = measure(ops, dtype, device)
    bench = Bench(runner, kinds, arguments.seconds)
    measured = {name: [(work, bench.times_s(work)) for work in table] for name, table in tables.items()}
    after = measure(ops, dtype, device)
    ceilings = before.best(after)
    timings = {
        name: [timing(work, times, costs.floor_s(work, ceilings)) for work, times in table]
        for name, table in measured.items()
    }
    print_tables(timings, before, after)
    del runner, bench
    splits: list[dict[str, Any]] = []
    if not arguments.no_split:
        splits = split(facts, options, tables["by rows"] + tables["prefill"][:1], arguments.seconds)
        print_splits(splits)
    if arguments.json:
        result = {
            "model": facts.folder.name,
            "options": asdict(options),
            "threads": torch.get_num_threads(),
            "ceilings": {"before": asdict(before), "after": asdict(after)},
            "timings": {name: [asdict(entry) for entry in table] for name, table in timings.items()},
            "splits": splits,
        }
        arguments.json.write_text(json.dumps(result, indent=1))


def print_tables(timings: dict[str, list[Timing]], before: Ceilings, after: Ceilings) -> None:
    for name, entries in timings.items():
        print(f"\n{name}\n{HEADER}")
        for entry in entries:
            print(entry)
    print(
        f"\nfloors: {before.gigabytes:.1f} GB/s and {before.gigaflops:.0f} GFLOP/s before, "
        f"{after.gigabytes:.1f} and {after.gigaflops:.0f} after; the higher ones count"
    )


def print_splits(splits: list[dict[str, Any]]) -> None:
    for entry in splits:
        work = entry["work"]
        print(
            f"\n{work['rows']} rows of {work['tokens']} tokens, {work['context']} visible: {entry['step_ms']:.2f} ms "
            f"without the wrappers' {entry['wrapper_us']:.2f} µs a call"
        )
        for name, spent_ms in entry["operations_ms"].items():
            calls = entry["calls"].get(name)
            print(
                f"  {name:28} {spent_ms:9.3f} ms {spent_ms / entry['step_ms']:6.1%}"
                + (f" {calls:6.0f} calls" if calls else "")
            )


if __name__ == "__main__":
    main()
