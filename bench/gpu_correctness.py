"""Are the Triton kernels right on this device, and is a token's result its own? Part of `bench/gpu_check.py`.

Three kinds of checks:

    operations    each against float64 on the same device, or bit by bit against the CPU where bits are promised
    own bits      logits of positions computed in one chunk, in chunks of 7, verified 5 at a time, decoded one by one,
                  and decoded in a batch of all sequences: the same bits, through the whole model
    graphs        replays, padded and reused, against the steps as they are
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from bench.gpu_report import Check
from bench.sequences import Sequences
from engine import noise
from engine.cuda_graphs import GraphedSteps
from engine.decoder import Decoder
from engine.kernels.ops import AttentionRule, HeadShape
from engine.kernels.torch_ops import TorchOps
from engine.kernels.triton_choose import noise_of
from engine.kernels.triton_ops import TritonOps

BF16 = torch.bfloat16
_HALF_STEP = 2.0**-8
"""a bfloat16 is off by this of its value at most, by its one rounding"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the operations' cases are."""

    rows: int
    width: int
    columns: int
    vocab_size: int
    heads: HeadShape
    context: int


LARGE = Sizes(70, 4096, 6144, 128256, HeadShape(32, 8, 128), 3000)
SMALL = Sizes(3, 48, 33, 1100, HeadShape(2, 1, 16), 40)


def operations(ops: TritonOps, device: torch.device, sizes: Sizes) -> Iterator[Check]:
    """One check per kind of operation."""
    yield from _products(ops, device, sizes)
    yield _norm(ops, device, sizes)
    yield _attention(ops, device, sizes)
    yield _noise(device, sizes)
    yield _choice(ops, device, sizes)


def _near(name: str, out: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor | float) -> Check:
    """bound, float64: what float32 may be off before the one rounding to out's dtype."""
    step = _HALF_STEP if out.dtype == BF16 else 2.0**-24
    excess = ((out.double() - exact).abs() / (bound + step * exact.abs() + 1e-30)).max().item()
    return Check(name, excess <= 1.0, f"largest error {excess:.2f} of what rounding allows")


def _products(ops: TritonOps, device: torch.device, sizes: Sizes) -> Iterator[Check]:
    random = torch.Generator(device).manual_seed(1)

    def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(shape, generator=random, device=device).to(dtype)

    for dtype in (BF16, torch.float32):
        x = normal(sizes.rows, sizes.width, dtype=dtype)
        weight = normal(sizes.columns, sizes.width, dtype=dtype) / sizes.width**0.5
        exact = x.double() @ weight.double().T
        # √K roundings of parts of this size; tensor cores may cut instead of rounding, which is twice that.
        bound = 4 * math.sqrt(sizes.width) * 2.0**-24 * (x.double().abs() @ weight.double().abs().T)
        out = torch.empty(sizes.rows, sizes.columns, device=device)
        ops.linear(x, ops.pack(weight), out)
        yield _near(f"linear, {str(dtype).removeprefix('torch.')}", out, exact, bound)
    x, gate, up = (normal(n, sizes.width) / sizes.width**0.5 for n in (sizes.rows, sizes.columns, sizes.columns))
    gate *= sizes.width**0.5
    left, right = x.double() @ gate.double().T, x.double() @ up.double().T
    gated = torch.empty(sizes.rows, sizes.columns, dtype=BF16, device=device)
    ops.linear_gated(x, ops.pack_gated(gate, up), "silu", gated)
    yield _near("linear_gated", gated, left / (1 + (-left).exp()) * right, 1e-5)


def _norm(ops: TritonOps, device: torch.device, sizes: Sizes) -> Check:
    x = torch.randn(sizes.rows, sizes.width, device=device) * 3
    weight = torch.rand(sizes.width, device=device) + 0.5
    out = torch.empty(sizes.rows, sizes.width, dtype=BF16, device=device)
    ops.rms_norm(x, weight, 1e-5, out)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    return _near("rms_norm", out, exact, 1e-6 * (exact.abs() + 1))


def _attention(ops: TritonOps, device: torch.device, sizes: Sizes) -> Check:
    """A decode row, a verification and a chunk over a shuffled cache, with a window, a cap and sinks."""
    heads, dim = sizes.heads, sizes.heads.head_dim
    random = torch.Generator(device).manual_seed(2)
    sequences = Sequences([sizes.context, sizes.context // 2, sizes.context // 3], block_size=16)
    cache = ops.make_cache(sequences.num_blocks, 16, heads, BF16)
    cache.keys.normal_(generator=random)
    cache.values.normal_(generator=random)
    rows = [(0, sizes.context - 1, sizes.context), (1, sizes.context // 2 - 5, sizes.context // 2), (2, 2, 22)]
    rows = [(index, max(0, first), min(end, sequences.lengths[index])) for index, first, end in rows]
    plan = sequences.plan(rows, device)
    num_tokens = len(plan.positions)
    queries = torch.randn((num_tokens, heads.num_heads, dim), generator=random, device=device).to(BF16)
    sinks = torch.randn(heads.num_heads, generator=random, device=device)
    rule = AttentionRule(2 * dim**-0.5, window=max(20, sizes.context - 100), softcap=20.0, sinks=sinks)
    out = torch.empty(num_tokens, heads.num_heads * dim, dtype=BF16, device=device)
    ops.attend(queries, heads, rule, plan, cache, out)
    exact, at = torch.empty(num_tokens, heads.num_heads, dim, dtype=torch.float64, device=device), 0
    for index, first, end in rows:
        blocks = torch.tensor(sequences.tables[index], device=device)
        position = torch.arange(end, device=device)
        keys, values = (
            memory[blocks[position // 16], :, position % 16]
            .double()
            .repeat_interleave(heads.num_heads // heads.kv_heads, dim=1)
            for memory in (cache.keys, cache.values)
        )
        own = queries[at : at + end - first].double()
        scores = torch.einsum("nhd,chd->hnc", own, keys) * rule.scale
        scores = torch.tanh(scores / 20.0) * 20.0
        distance = torch.arange(first, end, device=device)[:, None] - position
        scores[:, (distance < 0) | (distance >= (rule.window or 0))] = -torch.inf
        with_sinks = torch.cat((scores, sinks.double()[:, None, None].expand(-1, end - first, 1)), dim=-1)
        exact[at : at + end - first] = torch.einsum("hnc,chd->nhd", with_sinks.softmax(-1)[..., :-1], values)
        at += end - first
    return _near("attend", out, exact.flatten(1), 2.0**-8)


def _noise(device: torch.device, sizes: Sizes) -> Check:
    wrong = 0
    for seed, index in ((0, 0), (2**64 - 1, 12345), (81985529216486895, 7)):
        found = noise_of(noise.row_key(seed, index), sizes.vocab_size, device).cpu()
        expected = noise.gumbel(seed, index, sizes.vocab_size)
        wrong += int((found.view(torch.int32) != expected.view(torch.int32)).sum())
    return Check("noise, bit by bit", wrong == 0, f"{wrong} of {3 * sizes.vocab_size} values differ from the CPU's")


def _choice(ops: TritonOps, device: torch.device, sizes: Sizes) -> Check:
    num_rows = 16 if sizes.vocab_size > 2000 else 3
    logits = torch.randn((num_rows, sizes.vocab_size), generator=torch.Generator().manual_seed(3)) * 3
    temperatures = torch.tensor([0.0, 1.0, 0.7, 1.3] * num_rows)[:num_rows]
    keys = torch.tensor([noise.row_key(seed, seed) for seed in range(num_rows)])
    expected = TorchOps(torch.device("cpu")).choose(logits, temperatures, keys)
    found = ops.choose(logits.to(device), temperatures, keys)
    wrong = int((found != expected).sum())
    return Check("choose", wrong == 0, f"{wrong} of {num_rows} tokens differ from the CPU's")


def own_bits(decoder: Decoder, sequences: Sequences, device: torch.device, compared: int = 10) -> Iterator[Check]:
    """See the module's text; the last `compared` positions of every sequence."""
    expected: dict[tuple[int, int], torch.Tensor] = {}
    for index, length in enumerate(sequences.lengths):
        first = length - compared
        if first > 0:
            decoder.forward(sequences.plan([(index, 0, first)], device, logits=False))
        logits = decoder.forward(sequences.plan([(index, first, length)], device))
        expected.update({(index, first + at): row for at, row in enumerate(logits.clone())})
    firsts = [length - compared for length in sequences.lengths]
    everyone = range(len(firsts))

    def chunks(size: int) -> list[list[tuple[int, int, int]]]:
        return [
            [(index, at, min(at + size, firsts[index] + compared))]
            for index in everyone
            for at in range(firsts[index], firsts[index] + compared, size)
        ]

    together = [[(index, firsts[index] + at, firsts[index] + at + 1) for index in everyone] for at in range(compared)]
    for name, steps in (
        ("chunks of 7", chunks(7)),
        ("verified 5 at a time", chunks(5)),
        ("decoded alone", chunks(1)),
        (f"decoded in a batch of {len(firsts)}", together),
    ):
        wrong, total = 0, 0
        for rows in steps:
            logits = decoder.forward(sequences.plan(rows, device))
            positions = [(index, at) for index, first, end in rows for at in range(first, end)]
            for position, row in zip(positions, logits, strict=True):
                wrong += int((row.view(torch.int32) != expected[position].view(torch.int32)).sum())
                total += len(row)
        yield Check(f"own bits: {name}", wrong == 0, f"{wrong} of {total} logits differ")


def graphs(decoder: Decoder, steps: GraphedSteps, sequences: Sequences, device: torch.device) -> Check:
    """Batches of changing size; a shape that comes back reuses its graph."""
    wrong, total = 0, 0
    for num_rows in (len(sequences.lengths), 1, max(1, len(sequences.lengths) - 1), len(sequences.lengths)):
        rows = [(index, sequences.lengths[index] - 1, sequences.lengths[index]) for index in range(num_rows)]
        expected = decoder.forward(sequences.plan(rows, device)).clone()
        found = steps.forward(sequences.batch(rows))
        wrong += int((found.view(torch.int32) != expected.view(torch.int32)).sum())
        total += found.numel()
    detail = f"{wrong} of {total} logits differ from the steps as they are; {steps.num_graphs} graphs"
    return Check("graphs", wrong == 0, detail)


def finite(logits: torch.Tensor) -> bool:
    """Whether a model's logits are numbers of some spread: an all-zero result would pass every comparison above."""
    return bool(torch.isfinite(logits).all()) and float(np.asarray(logits.float().std().cpu())) > 0.01
