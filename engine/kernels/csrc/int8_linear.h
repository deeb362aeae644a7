// Matrix products in 8-bit integers, for models whose numbers are nobody's concern: a draft's.
//
// A row of W [N, K] is stored as int8 with a scale of its own; a row of x [T, K] is rounded likewise as it comes:
//
//     w ≈ scale · q,  x ≈ unit · p       |q|, |p| ≤ 127
//     x · w  ≈  unit · (scale · Σ p q)   the sum is an integer, exact at every level
//
// A packed weight is a row of tiles, 32 columns wide and K deep, in the order in which a product reads it:
//
//     uint8  [ceil(K / 4)][32][4]    q + 128, quads along k; beyond N or K, q = 0
//     f32    [32]                    scale
//
// As in linear.h, a gated weight's tile holds 16 columns of the gate and then the 16 matching ones of `up`.
#pragma once

#include "linear.h"
#include "screen.h"

namespace tandem {

constexpr int64_t kInt8ScaleBytes = kTileColumns * sizeof(float);
constexpr int64_t kMaxInt8Depth = kMaxScreenDepth;  // of K: sums fit an int32

constexpr int64_t int8_tile_bytes(int64_t depth) { return (depth + kQuad - 1) / kQuad * kScreenStepBytes + kInt8ScaleBytes; }

}  // namespace tandem

// Of linear.h's arguments, `weight` is packed as above. A row of x that isn't finite gives NaN.
TANDEM_KERNEL(int8_linear, const LinearArguments&)
