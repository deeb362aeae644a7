"""The operations in float64, straight from their definitions, and how far float32 may be from them.

A sum of K float32 products, in whatever order, is off by about √K roundings of its parts; `sum_bound` allows twice as
many. What is written is rounded once more, by at most half a unit in the last place of its dtype.
"""

from __future__ import annotations

import math

import torch

UNIT = 2.0**-24
"""half a unit in the last place of float32, relative to the value, at most"""
HALF_STEP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def sum_bound(magnitudes: torch.Tensor, length: int) -> torch.Tensor:
    """magnitudes: Σ |parts| of sums of `length` parts."""
    return 2 * math.sqrt(length + 4) * UNIT * magnitudes


def assert_close(out: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor | float) -> None:
    """|out − expected| ≤ bound, plus the one rounding to out's dtype."""
    bound = torch.as_tensor(bound, dtype=torch.float64)
    allowed = bound + HALF_STEP[out.dtype] * (expected.abs() + bound) + 1e-30
    excess = ((out.double() - expected).abs() / allowed).max().item() if out.numel() else 0.0
    assert excess <= 1.0, f"off by {excess:.2f} of what is allowed"


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    """NaN and the sign of 0 included."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    integers = {2: torch.int16, 4: torch.int32}[a.dtype.itemsize]
    different = a.contiguous().view(integers) != b.contiguous().view(integers)
    assert not different.any(), f"{int(different.sum())} of {different.numel()} elements have other bits"


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """x Wᵀ + bias in float64, and what float32 may be off."""
    x, weight = x.double(), weight.double()
    exact, magnitude = x @ weight.T, x.abs() @ weight.abs().T
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    return exact, sum_bound(magnitude, x.shape[1])


def activation(name: str, x: torch.Tensor) -> torch.Tensor:
    """float64 → float64."""
    if name == "silu":
        return x / (1 + torch.exp(-x))
    if name == "gelu":
        return x / 2 * (1 + torch.erf(x / math.sqrt(2)))
    if name == "gelu_tanh":
        return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x.clamp(min=0)


ACTIVATION_SLOPE = 1.2
"""no activation is steeper: gelu's derivative peaks at 1.13"""
FUNCTION_BOUND = 8 * UNIT
"""error of a float32 exp, tanh or activation, relative to max(1, |x|): a few roundings"""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    x = x.double()
    centred = x - x.mean(-1, keepdim=True)
    out = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return out if bias is None else out + bias.double()


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x float64 [T, heads, head_dim]; cosines and sines [T, rotary_dim / 2]: each pair as a complex number turned."""
    half = cosines.shape[1]
    turn = torch.complex(cosines.double(), sines.double())[:, None]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    pairs = turned.unflatten(-1, (half, 2)) if interleaved else turned.unflatten(-1, (2, half)).transpose(-1, -2)
    result = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    result = result if interleaved else result.transpose(-1, -2)
    return torch.cat((result.flatten(-2), rest), dim=-1)


def attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One row: queries float64 [n, num_heads, D] at `positions`, keys and values [context, kv_heads, D] → [n, ...]."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,chd->hnc", queries, keys) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    distance = positions[:, None] - torch.arange(len(keys))
    scores[:, (distance < 0) | (distance >= (window or len(keys)))] = -torch.inf
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(positions), 1)), dim=-1)
    return torch.einsum("hnc,chd->nhd", scores.softmax(-1)[..., : len(values)], values)
