"""exp, log and sums that have the same bits on every device, in every batch and with any number of threads.

Library functions differ in the last bit between a CPU's vector body and its tail, between CPUs and between GPUs, and a
float sum depends on how a reduction was split. Here a function is a fixed chain of float32 operations that IEEE 754
rounds one by one (torch runs each elementwise operation by itself: nothing is fused or contracted; nothing on the way
is subnormal, so flushing changes nothing), and a sum adds integers, which has no order.

    log x   = e·ln2 + f − f²/2 + f³·P(f)      x = 2^e·(1 + f),  √½ ≤ 1 + f < √2
    exp x   = 2^n·(1 + r + r²·Q(r))           n = round(x / ln2),  r = x − n·ln2
    ln2     = HI + LO, HI short enough for n·HI to be exact

P (degree 7) and Q (degree 4) are minimax fits, made by Lawson iteration, of relative error below 6e-9. Sums of
probabilities count units of 2^-42 of the likeliest one, so that 2^20 of them fit an int64.
"""

from __future__ import annotations

import torch

P = (
    0.33333316445350647,
    -0.25000810623168945,
    0.2000228613615036,
    -0.16624553501605988,
    0.14181190729141235,
    -0.13128754496574402,
    0.12881654500961304,
    -0.07859619706869125,
)
"""ascending powers; each is a float32"""
Q = (0.4999999403953552, 0.1666652113199234, 0.04166838899254799, 0.008368710055947304, 0.001381461275741458)
"""ascending powers; each is a float32"""
LN2_HI = 0.693359375
LN2_LO = -0.00021219444170128554
LOG2_E = 1.4426950216293335
ROOT_HALF_BITS = 0x3F3504F3
"""√½ as a float32, read as an integer"""
EXP_FLOOR = -87.0
"""the least argument whose exponential is not subnormal"""
UNIT_BITS = 42
MAX_TERMS = 1 << 20
"""how many weights a sum may hold"""


def log(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of positive, normal, finite float32, elementwise; absolute error below 1 ulp of the result or
    1e-7, whichever is more."""
    exponent, fraction = _split(x)
    return _log_sum(exponent, fraction)


def neg_log1p_neg(u: torch.Tensor) -> torch.Tensor:
    """-log(1 - u) for float32 0 < u < 1, elementwise, to 2e-7 of the result however small u is."""
    exponent, fraction = _split(1.0 - u)
    # Near u = 0 the subtraction has lost u's low bits, but there f is -u itself.
    fraction = torch.where(exponent == 0, -u, fraction)
    return -_log_sum(exponent, fraction)


def exp(x: torch.Tensor) -> torch.Tensor:
    """exp of float32 x ≤ 0, elementwise, to 2e-7 of the result; below EXP_FLOOR, -inf included, exp(EXP_FLOOR)."""
    x = x.clamp(min=EXP_FLOOR)
    power = torch.mul(x, LOG2_E).round_()
    r = x.sub_(torch.mul(power, LN2_HI)).sub_(torch.mul(power, LN2_LO))
    series = torch.mul(r, Q[-1])
    for coefficient in reversed(Q[1:-1]):
        series.add_(coefficient).mul_(r)
    series.add_(Q[0]).mul_(r).mul_(r).add_(r).add_(1.0)
    scale = power.to(torch.int32).add_(127).bitwise_left_shift_(23).view(torch.float32)
    return series.mul_(scale)


def weights_of(probabilities: torch.Tensor) -> torch.Tensor:
    """Float32 exp(x), x ≤ 0, in units of 2^-UNIT_BITS, as int64. Sums of up to MAX_TERMS are exact."""
    return (probabilities * 2.0**UNIT_BITS).round_().to(torch.int64)


def log_of_sum(total: torch.Tensor) -> torch.Tensor:
    """Float32 logarithm of a positive int64 sum of weights, elementwise."""
    return log(total.to(torch.float32).mul_(2.0**-UNIT_BITS))


def _split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Exponent (int32) and fraction f (float32) of x = 2^e·(1 + f)."""
    bits = x.contiguous().view(torch.int32)
    exponent = (bits - ROOT_HALF_BITS) >> 23
    return exponent, (bits - (exponent << 23)).view(torch.float32) - 1.0


def _log_sum(exponent: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    e = exponent.to(torch.float32)
    square = f * f
    series = f * P[-1]
    for coefficient in reversed(P[1:-1]):
        series = (series + coefficient) * f
    tail = (series + P[0]) * f * square
    tail = tail - square * 0.5
    tail = tail + e * LN2_LO
    return (f + tail) + e * LN2_HI
