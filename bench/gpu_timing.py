"""How fast is a device, and how near to that do steps come? Part of `bench/gpu_check.py`.

ceilings    bytes read per second by torch's sum and copy, multiplications per second by torch's product
steps       decode steps of n rows by mode, a chunk of a prompt; the floor is what must be read and multiplied
gap         a loop of steps as a worker runs it, host included, less the same steps' time on the device
tilings     the products' tilings against others: time, and whether they have the same bits
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
import torch

from bench.ceilings import Ceilings
from bench.gpu_report import Check, Figure
from bench.sequences import Sequences
from bench.synthetic import Shape
from engine.batch import Batch, Choices, LaunchedRows
from engine.cuda_graphs import GraphedSteps
from engine.kernels.ops import PackedLinear
from engine.kernels.triton_linear import Epilogue, Tiling, multiply, multiply_by_library, tiling_of
from engine.kernels.triton_ops import TritonOps
from engine.run_ahead import AheadSteps, PendingTokens

BF16 = torch.bfloat16


def device_s(run: Callable[[], object], device: torch.device, tries: int) -> float:
    """Median time of one run, on the device alone where it is a GPU; a GPU's first runs aren't counted."""
    times = []
    warm_up = 2 if device.type == "cuda" else 0
    for attempt in range(tries + warm_up):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            seconds = start.elapsed_time(end) / 1e3
        else:
            began = time.perf_counter()
            run()
            seconds = time.perf_counter() - began
        if attempt >= warm_up:
            times.append(seconds)
    return median(times)


def ceilings(device: torch.device, *, tiny: bool) -> Ceilings:
    """What this device can do at most; about a second."""
    source = torch.ones((1 << 20) if tiny else (1 << 30), device=device)
    target = torch.empty_like(source)
    num_bytes = source.numel() * 4
    read_s = device_s(source.sum, device, 5)
    copy_s = device_s(partial(target.copy_, source), device, 5)
    width = 256 if tiny else 8192
    x = torch.randn((width, width), device=device).to(BF16)
    product_s = device_s(lambda: torch.mm(x, x.t()), device, 5)
    return Ceilings(max(num_bytes / read_s, 2 * num_bytes / copy_s) / 1e9, 2 * width**3 / product_s / 1e9)


@dataclass(frozen=True, slots=True)
class Floor:
    """The least a step can take."""

    shape: Shape
    ceilings: Ceilings
    element_bytes: int = 2

    def step_ms(self, num_rows: int, context: int, num_tokens: int = 1, num_logits: int = 1) -> float:
        """num_rows rows of num_tokens tokens each; context is what a row's last token sees."""
        shape, heads = self.shape, self.shape.heads
        head = shape.vocab_size * shape.hidden_size
        kept = shape.kv_elements_per_token * num_rows * context
        products = num_rows * (num_tokens * (shape.matrix_elements - head) + num_logits * head)
        seen = num_rows * num_tokens * (context - (num_tokens - 1) / 2)
        flops = 2 * products + 4 * shape.num_layers * heads.num_heads * heads.head_dim * seen
        return 1e3 * self.ceilings.floor_s(self.element_bytes * (shape.matrix_elements + kept), flops)


def decode_steps(
    modes: Mapping[str, Callable[[Batch], torch.Tensor]],
    sequences: Sequences,
    rows: tuple[int, ...],
    device: torch.device,
    floor: Floor,
    tries: int,
) -> Iterator[Figure]:
    """Every sequence has the same length; the step computes its last token."""
    context = sequences.lengths[0]
    for num_rows in rows:
        batch = sequences.batch([(index, context - 1, context) for index in range(num_rows)])
        floor_ms = floor.step_ms(num_rows, context)
        for name, forward in modes.items():
            milliseconds = 1e3 * device_s(partial(forward, batch), device, tries)
            note = f"{num_rows / milliseconds * 1e3:,.0f} tokens/s"
            yield Figure(f"decode, {num_rows} rows, {name}", milliseconds, "ms", floor_ms, note)


def prefill(
    forward: Callable[[Batch], torch.Tensor], sequences: Sequences, device: torch.device, floor: Floor, tries: int
) -> Figure:
    """One sequence's tokens as one chunk, no logits but the last's."""
    length = sequences.lengths[0]
    batch = sequences.batch([(0, 0, length)])
    last = Batch(
        batch.token_ids,
        batch.positions,
        batch.slot_mapping,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
        np.array([length - 1]),
    )
    milliseconds = 1e3 * device_s(lambda: forward(last), device, tries)
    note = f"{length / milliseconds * 1e3:,.0f} tokens/s"
    return Figure(f"prefill, {length} tokens", milliseconds, "ms", floor.step_ms(1, length, length), note)


def gap(
    ops: TritonOps,
    steps: GraphedSteps,
    launching: AheadSteps,
    sequences: Sequences,
    num_rows: int,
    num_steps: int,
    device: torch.device,
) -> Iterator[Figure | Check]:
    """Greedy decoding of num_rows sequences for num_steps steps; both ways must give the same tokens."""
    slots = np.arange(num_rows)
    nothing = np.zeros(0, np.int64)
    first = sequences.lengths[0] - num_steps - 1

    def step(number: int, tokens: list[int] | None) -> PendingTokens:
        """tokens: the last step's, or None: they are fed."""
        at = first + number
        batch = sequences.batch([(index, at, at + 1) for index in range(num_rows)])
        fed = slots if tokens is None else nothing
        if tokens is not None:
            batch.token_ids[:] = np.maximum(tokens, 0)
        choices = Choices([0.0] * num_rows, [0] * num_rows, [number] * num_rows)
        return launching.launch(LaunchedRows(batch, choices, slots, fed, fed))

    def waiting() -> list[list[int]]:
        found = [[0] * num_rows]
        for number in range(num_steps):
            found.append(step(number, found[-1]).token_ids())
        return found[1:]

    def ahead() -> list[list[int]]:
        found, pending = [], step(0, [0] * num_rows)
        for number in range(1, num_steps):
            following = step(number, None)
            found.append(pending.token_ids())
            pending = following
        return [*found, pending.token_ids()]

    def on_device() -> None:
        ops.choose_on_device(steps.forward(batch), temperatures, keys)

    temperatures = torch.zeros(num_rows, device=device)
    keys = torch.zeros((num_rows, 2), dtype=torch.int64, device=device)
    batch = sequences.batch([(index, first, first + 1) for index in range(num_rows)])
    alone_ms = 1e3 * device_s(on_device, device, 8)
    tokens = []
    for name, loop in (("waiting for each step's tokens", waiting), ("running ahead", ahead)):
        tokens.append(loop())
        began = time.perf_counter()
        loop()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        each_ms = 1e3 * (time.perf_counter() - began) / num_steps
        note = f"{each_ms:.3g} ms a step, {alone_ms:.3g} of them on the device"
        yield Figure(f"gap, {num_rows} rows, {name}", 1e3 * (each_ms - alone_ms), "µs", None, note)
    differ = sum(a != b for a, b in zip(*tokens, strict=True))
    yield Check(f"running ahead, {num_rows} rows", differ == 0, f"{differ} of {num_steps} steps have other tokens")


CANDIDATES = (
    Tiling(64, 64, 64, num_warps=4, num_stages=4),
    Tiling(64, 128, 64, num_warps=4, num_stages=4),
    Tiling(128, 128, 64, num_warps=8, num_stages=3),
    Tiling(128, 256, 64, num_warps=8, num_stages=3),
)


def tilings(
    weights: dict[str, PackedLinear],
    rows: tuple[int, ...],
    candidates: tuple[Tiling, ...],
    device: torch.device,
    ceilings: Ceilings,
    tries: int,
) -> Iterator[Figure]:
    """Where another tiling is faster and has the same bits, it could be used for many rows."""
    for name, weight in weights.items():
        plain = PackedLinear(weight.data, None, weight.in_features, len(weight.data))
        chosen = tiling_of(plain)
        for num_rows in rows:
            x = torch.randn((num_rows, plain.in_features), device=device).to(BF16)
            floor_us = 1e6 * ceilings.floor_s(weight.data.numel() * 2, 2 * num_rows * weight.data.numel())
            own = torch.empty((num_rows, plain.out_features), device=device)
            other = torch.empty_like(own)
            runs: dict[str, Callable[[], None]] = {
                _named(tiling): partial(multiply, x, plain, Epilogue(), other, tiling)
                for tiling in candidates
                if tiling != chosen
            }
            runs["cuBLAS"] = partial(multiply_by_library, x, plain, Epilogue(), other)
            label = f"{name}, {num_rows} rows"
            own_us = 1e6 * device_s(partial(multiply, x, plain, Epilogue(), own), device, tries)
            yield Figure(f"{label}, {_named(chosen)}", own_us, "µs", floor_us, "the one in use")
            for how, run in runs.items():
                microseconds = 1e6 * device_s(run, device, tries)
                note = "same bits" if torch.equal(own, other) else "other bits"
                yield Figure(f"{label}, {how}", microseconds, "µs", floor_us, note)


def _named(tiling: Tiling) -> str:
    return f"{tiling.block_t}×{tiling.block_n}×{tiling.block_k}"
