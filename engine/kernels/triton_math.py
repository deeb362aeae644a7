"""What several Triton kernels share: activations, and the noise's logarithm in separately rounded operations.

Functions here are inlined into kernels. Whether `a * b + c` becomes one fused operation is the kernel's affair: it is
decided at launch (`enable_fp_fusion`), and those that promise bits switch it off.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine import portable

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Kernels run in Triton's interpreter, on tensors of the CPU: TRITON_INTERPRET=1 before triton is first imported.

In release 3.7 it does two things with bfloat16 that no GPU does, which `operand` and `rounded` make good: it multiplies
the integers that hold the bits, and it cuts where it should round."""

_INTERPRETED = tl.constexpr(INTERPRETED)
_ROOT_HALF_BITS = tl.constexpr(portable.ROOT_HALF_BITS)
_LN2_HI = tl.constexpr(portable.LN2_HI)
_LN2_LO = tl.constexpr(portable.LN2_LO)
_P0 = tl.constexpr(portable.P[0])
_P1 = tl.constexpr(portable.P[1])
_P2 = tl.constexpr(portable.P[2])
_P3 = tl.constexpr(portable.P[3])
_P4 = tl.constexpr(portable.P[4])
_P5 = tl.constexpr(portable.P[5])
_P6 = tl.constexpr(portable.P[6])
_P7 = tl.constexpr(portable.P[7])


@triton.jit
def operand(x):
    """x as `tl.dot` takes it. A product of two bfloat16 is exact in float32, so that widening first changes nothing."""
    return x.to(tl.float32) if _INTERPRETED else x


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 x as dtype, to the nearest, ties to even."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        up = bits + 0x7FFF + ((bits >> 16) & 1)
        x = tl.where(x == x, (up & 0xFFFF0000).to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def tanh(x):
    """To 3e-7 of the result: near 0 the odd series, elsewhere (1 − e) / (1 + e) with e = exp(−2|x|)."""
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
    e = tl.exp(-2.0 * tl.abs(x))
    magnitude = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -magnitude, magnitude))


@triton.jit
def softcapped(x, cap):
    """cap · tanh(x / cap)."""
    return cap * tanh(x / cap)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """ACTIVATION is one of `ops.ACTIVATIONS`, or "" for none."""
    if ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        x = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "relu":
        x = tl.maximum(x, 0.0)
    return x


@triton.jit
def mixed(x):
    """`noise`'s mix32 of uint32."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def _log_sum(exponent, f):
    """`portable._log_sum`, operation by operation."""
    e = exponent.to(tl.float32)
    square = f * f
    series = f * _P7
    series = (series + _P6) * f
    series = (series + _P5) * f
    series = (series + _P4) * f
    series = (series + _P3) * f
    series = (series + _P2) * f
    series = (series + _P1) * f
    tail = (series + _P0) * f * square
    tail = tail - square * 0.5
    tail = tail + e * _LN2_LO
    return (f + tail) + e * _LN2_HI


@triton.jit
def gumbel(k0, k1, token_ids):
    """`engine.noise`'s g, bit for bit, where the kernel runs without fusion; all arguments uint32."""
    bits = mixed(mixed(token_ids ^ k0) + k1)
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)
    rest = (1.0 - u).to(tl.int32, bitcast=True)
    exponent = (rest - _ROOT_HALF_BITS) >> 23
    fraction = (rest - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    # Near u = 0 the subtraction has lost u's low bits, but there f is −u itself.
    fraction = tl.where(exponent == 0, -u, fraction)
    scale = -_log_sum(exponent, fraction)
    scale_bits = scale.to(tl.int32, bitcast=True)
    exponent = (scale_bits - _ROOT_HALF_BITS) >> 23
    fraction = (scale_bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    return -_log_sum(exponent, fraction)
