"""What `bench/gpu_check.py` runs, section by section, on one synthetic model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton

from bench import gpu_correctness, gpu_timing
from bench.gpu_report import Check, Figure, Report
from bench.sequences import Sequences
from bench.synthetic import LLAMA_8B, Shape, random_weights, spec_of
from engine.batch import Batch
from engine.cuda_graphs import CudaRecorder, GraphedSteps, GraphLimits, Recorder, RepeatingRecorder, in_own_workspace
from engine.decoder import Decoder
from engine.kernels.ops import HeadShape, PackedLinear
from engine.kernels.triton_linear import Tiling
from engine.kernels.triton_ops import TritonOps
from engine.run_ahead import AheadSteps, TokenFeed
from engine.step_plan import StepPlanBuilder
from engine.stream import stream_of

BLOCK_SIZE = 16
DTYPE = torch.bfloat16
_RESERVE_BYTES = 6 << 30
"""for activations, logits, attention's states and everything that isn't ours"""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is run."""

    shape: Shape
    rows: tuple[int, ...]
    """of decode steps; ascending"""
    context: int
    prefill: int
    bit_lengths: list[int]
    """sequences whose bits are compared"""
    gap_steps: int
    tries: int


FULL = Scale(
    shape=LLAMA_8B,
    rows=(1, 32, 256),
    context=512,
    prefill=2048,
    bit_lengths=[11, 40, 64, 65, 200, 511, 512, 513, 700, 1024, 1030, 1500, 2100],
    gap_steps=64,
    tries=10,
)
TOY = Scale(
    shape=Shape(70, 32, 40, 1, HeadShape(1, 1, 16)),
    rows=(2,),
    context=18,
    prefill=5,
    bit_lengths=[3, 17, 2],
    gap_steps=2,
    tries=1,
)


class Run:
    """One model, the modes that it is run in, and what is measured of it."""

    def __init__(self, device: torch.device, *, tiny: bool, report: Report) -> None:
        self.device = device
        self.tiny = tiny
        self.report = report
        self.scale = TOY if tiny else _fitting(FULL, device, report)
        self.ops = TritonOps(device)
        self._plans = StepPlanBuilder(device)
        self._stream = stream_of(device)
        report.facts.update(_facts(device, self.scale.shape))

    def sections(self) -> list[tuple[str, Callable[[], None]]]:
        """In order; later ones use the model of the third."""
        return [
            ("measuring the ceilings", self._ceilings),
            ("checking operations", self._operations),
            ("making a model", self._model),
            ("comparing bits", self._bits),
            ("checking graphs", self._graphs),
            ("measuring steps", self._steps),
            ("measuring the gap between steps", self._gap),
            ("comparing tilings", self._tilings),
        ]

    def _ceilings(self) -> None:
        self.ceilings = gpu_timing.ceilings(self.device, tiny=self.tiny)
        self.report.figures += [
            Figure("memory, read or copied", self.ceilings.gigabytes, "GB/s"),
            Figure("products of bfloat16", self.ceilings.gigaflops / 1e3, "TFLOP/s"),
        ]

    def _operations(self) -> None:
        sizes = gpu_correctness.SMALL if self.tiny else gpu_correctness.LARGE
        self.report.checks += gpu_correctness.operations(self.ops, self.device, sizes)

    def _model(self) -> None:
        scale, shape = self.scale, self.scale.shape
        most = max(scale.rows)
        self.many = Sequences([scale.context] * most, BLOCK_SIZE, shape.vocab_size)
        self.long = Sequences([scale.prefill], BLOCK_SIZE, shape.vocab_size)
        self.mixed = Sequences(scale.bit_lengths, BLOCK_SIZE, shape.vocab_size)
        scratch = max(self.many.num_blocks, self.long.num_blocks, self.mixed.num_blocks)
        spec, weights = spec_of(shape), random_weights(shape, self.ops, DTYPE, self.device)
        caches = [self.ops.make_cache(scratch + 1, BLOCK_SIZE, shape.heads, DTYPE) for _ in spec.layers]
        longest = max(scale.context, scale.prefill, *scale.bit_lengths)
        self.packed = {name: weight for name, weight in weights.items() if isinstance(weight, PackedLinear)}
        self.feed = TokenFeed(most, self.device)
        limits = GraphLimits(max(most, len(scale.bit_lengths)), longest, BLOCK_SIZE, scratch)
        self.decoders, self.graphed = {}, {}
        for numerics in ("exact", "fast"):
            ops = self.ops if numerics == "exact" else TritonOps(self.device, "fast")
            decoder = Decoder(spec, weights, ops, DTYPE, self.device, longest)
            decoder.bind_caches(list(caches))
            recorder: Recorder = CudaRecorder() if self.device.type == "cuda" else RepeatingRecorder()
            own = in_own_workspace(decoder, limits.max_sequences, DTYPE, self.device)
            self.decoders[numerics] = decoder
            self.graphed[numerics] = GraphedSteps(
                decoder.forward, own, recorder, self._plans, self.device, limits, self.feed
            )
        logits = self.decoders["exact"].forward(self.long.plan([(0, 0, 4)], self.device))
        self.report.checks.append(
            Check("logits are numbers", gpu_correctness.finite(logits), f"deviation {logits.std().item():.3g}")
        )

    def _eager(self, batch: Batch) -> torch.Tensor:
        return self.decoders["exact"].forward(self._plans.build(batch))

    def _bits(self) -> None:
        compared = 2 if self.tiny else 10
        self.report.checks += gpu_correctness.own_bits(self.decoders["exact"], self.mixed, self.device, compared)

    def _graphs(self) -> None:
        self.report.checks.append(
            gpu_correctness.graphs(self.decoders["exact"], self.graphed["exact"], self.mixed, self.device)
        )

    def _steps(self) -> None:
        scale = self.scale
        floor = gpu_timing.Floor(scale.shape, self.ceilings)
        modes = {
            "kernel by kernel": self._eager,
            "graph": self.graphed["exact"].forward,
            "graph, numerics fast": self.graphed["fast"].forward,
        }
        self.report.figures += gpu_timing.decode_steps(modes, self.many, scale.rows, self.device, floor, scale.tries)
        self.report.figures.append(gpu_timing.prefill(self._eager, self.long, self.device, floor, scale.tries))

    def _gap(self) -> None:
        for num_rows in self.scale.rows:
            steps = self.graphed["exact"]
            ahead = AheadSteps(steps.prepare, self.ops.choose_on_device, self.feed, self.device, self._stream)
            self.report.take(
                gpu_timing.gap(self.ops, steps, ahead, self.many, num_rows, self.scale.gap_steps, self.device)
            )

    def _tilings(self) -> None:
        weights = {name.removeprefix("layers.0."): self.packed[name] for name in self.packed if _is_first(name)}
        tries = self.scale.tries
        candidates: tuple[Tiling, ...] = gpu_timing.CANDIDATES
        if self.tiny:
            weights, candidates = {"head": self.packed["head"]}, candidates[:1]
        self.report.figures += gpu_timing.tilings(
            weights, self.scale.rows, candidates, self.device, self.ceilings, tries
        )


def _is_first(name: str) -> bool:
    return name == "head" or name.startswith("layers.0.")


def _fitting(scale: Scale, device: torch.device, report: Report) -> Scale:
    """With as many layers as the device's memory holds."""
    free = torch.cuda.mem_get_info(device)[0] - _RESERVE_BYTES
    shape = scale.shape
    tokens = max(max(scale.rows) * scale.context, scale.prefill, sum(scale.bit_lengths)) + BLOCK_SIZE * 300

    def num_bytes(num_layers: int) -> int:
        cut = replace(shape, num_layers=num_layers)
        elements = cut.matrix_elements + cut.vocab_size * cut.hidden_size + cut.kv_elements_per_token * tokens
        return DTYPE.itemsize * elements

    num_layers = next((n for n in range(shape.num_layers, 0, -1) if num_bytes(n) <= free), 1)
    if num_layers < shape.num_layers:
        report.facts["cut to"] = f"{num_layers} of {shape.num_layers} layers, which is what the memory holds"
    return replace(scale, shape=replace(shape, num_layers=num_layers))


def _facts(device: torch.device, shape: Shape) -> dict[str, str]:
    name = "Triton's interpreter"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = f"{properties.name} ({properties.major}.{properties.minor}, {properties.total_memory / 2**30:.0f} GiB)"
    return {
        "device": name,
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda})",
        "triton": triton.__version__,
        "model": f"{shape.num_layers} layers of width {shape.hidden_size}, bfloat16, random",
    }
