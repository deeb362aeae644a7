"""Noise in plain Python: its own integers, and float32 by rounding float64 results one by one.

A sum, difference, product or quotient of two float32 rounded first to float64 and then to float32 is the float32 result
(53 bits are more than 2 · 24 + 1), so the oracle needs neither numpy nor torch.
"""

from __future__ import annotations

import struct

M64 = 2**64 - 1
M32 = 2**32 - 1
EDGES = [0, 1, 2, 3, 2**23, 2**24 - 1, 2**24, 2**24 + 1, 2**31 - 1, 2**31, M32 - 255, M32 - 128, M32 - 1, M32]
"""bits where something changes"""

# ascending powers of log(1 + f) = f − f²/2 + f³·(…), written out independently of the code under test
LOG_SERIES = [
    "0x1.55554ap-2",
    "-0x1.000220p-2",
    "0x1.99a596p-3",
    "-0x1.54788ap-3",
    "0x1.226e48p-3",
    "-0x1.0ce07cp-3",
    "0x1.07d0f8p-3",
    "-0x1.41ee16p-4",
]


def f32(x: float) -> float:
    return struct.unpack("<f", struct.pack("<f", x))[0]


def read_bits(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


def read_float(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def mix64(x: int) -> int:
    x = ((x ^ x >> 30) * 13787848793156543929) % 2**64
    x = ((x ^ x >> 27) * 10723151780598845931) % 2**64
    return x ^ x >> 31


def mix32(x: int) -> int:
    x = ((x ^ x >> 16) * 569420461) % 2**32
    x = ((x ^ x >> 15) * 1935289751) % 2**32
    return x ^ x >> 15


def oracle_bits(seed: int, index: int, token_id: int) -> int:
    key = mix64((mix64(seed) + (index + 1) * 11400714819323198485) % 2**64)
    return mix32((mix32(token_id ^ key % 2**32) + key // 2**32) % 2**32)


def oracle_log(exponent: int, f: float) -> float:
    square = f32(f * f)
    coefficients = [float.fromhex(c) for c in LOG_SERIES]
    series = f32(f * coefficients[-1])
    for c in reversed(coefficients[1:-1]):
        series = f32(f32(series + c) * f)
    tail = f32(f32(f32(series + coefficients[0]) * f) * square)
    tail = f32(tail - f32(square * 0.5))
    tail = f32(tail + f32(exponent * f32(-2.12194440e-4)))
    return f32(f32(f + tail) + f32(exponent * 0.693359375))


def split(x: float) -> tuple[int, float]:
    bits = read_bits(x)
    exponent = (bits - 0x3F3504F3) >> 23
    return exponent, f32(read_float(bits - (exponent << 23)) - 1.0)


def oracle_gumbel(bits: int) -> float:
    u = min(f32(f32(f32(bits) + 0.5) * 2.0**-32), 1.0 - 2.0**-24)
    exponent, f = split(f32(1.0 - u))
    if exponent == 0:
        f = -u
    return -oracle_log(*split(-oracle_log(exponent, f)))
