// A row x of what the head reads, in 8-bit integers, and how far a screened logit may be from the head's own; the proof
// is in screen.cpp.
//
// A few elements of x are far larger than the rest, and would leave the rest few of the 256 steps. So the quads with the
// largest elements are *fine*, in 16 bits and with a unit of their own:
//
//     x   [ a b c d | e f g h | i j k l | … ]      coarse:  x̂ = coarse_unit · p                    |p| ≤ 127, 0 where fine
//                     ‾‾‾‾‾‾‾  fine               fine:    x̂ = fine_unit · (256 · high + low)
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "screen.h"
#include "screen_tile.h"

namespace tandem::TANDEM_LEVEL {

constexpr int64_t kQuadsPerFine = 16;
constexpr int kMostCoarse = 127;
constexpr int kMostFine = 127 * 256;
// Above this no bound is claimed: a sum of the head's could exceed float32.
constexpr double kLargestLogit = 1e37;

// With these the screened logit of a column and its bound are
//
//     scale · (coarse · Σ q p + fine · (256 · Σ q high + Σ q low))
//     along · ‖w − ŵ‖ + apart · (‖w‖ + ‖w − ŵ‖) + least
struct ScreenRow {
  float coarse = 0;
  float fine = 0;
  float along = 0;
  float apart = 0;
  float least = 0;
  float most_norm = 0;  // columns with a greater ‖w‖ + ‖w − ŵ‖ may have logits that aren't finite
  int32_t first = 0;    // what the sums start from
  int32_t first_high = 0;
  int32_t first_low = 0;
  bool usable = false;
};

inline float element(const float* x, int64_t k) { return x[k]; }
inline float element(const bf16* x, int64_t k) { return widen(x[k]); }

inline int64_t num_quads_of(int64_t depth) { return (depth + kQuad - 1) / kQuad; }
inline int64_t num_fine_of(int64_t depth) { return (num_quads_of(depth) + kQuadsPerFine - 1) / kQuadsPerFine; }

inline bool usable_unit(float peak, float unit) { return peak == 0 || std::isnormal(unit); }

// Splits the quads: the fine ones' numbers, and the largest element of the coarse ones.
inline float choose_fine(const std::vector<float>& peaks, Fine* fine, int64_t num_fine) {
  std::vector<int32_t> order(peaks.size());
  std::iota(order.begin(), order.end(), 0);
  const auto larger = [&](int32_t a, int32_t b) { return peaks[a] > peaks[b]; };
  std::nth_element(order.begin(), order.begin() + (num_fine - 1), order.end(), larger);
  for (int64_t i = 0; i < num_fine; i++) fine[i].quad = order[i];
  float rest = 0;
  for (size_t i = num_fine; i < order.size(); i++) rest = std::max(rest, peaks[order[i]]);
  return rest;
}

// p [4 · quads] and fine [num_fine_of] of x [K]; `scale` is the head's.
template <class T>
ScreenRow screen_row(const T* x, int64_t depth, float scale, int8_t* p, Fine* fine) {
  const int64_t num_quads = num_quads_of(depth), num_fine = num_fine_of(depth);
  std::vector<float> values(num_quads * kQuad), peaks(num_quads);
  double squares = 0;
  for (int64_t k = 0; k < depth; k++) {
    values[k] = element(x, k);
    squares += static_cast<double>(values[k]) * values[k];  // infinite or NaN if a value is
  }
  ScreenRow row;
  if (!std::isfinite(squares)) return row;
  for (int64_t k = 0; k < depth; k++) peaks[k / kQuad] = std::max(peaks[k / kQuad], std::abs(values[k]));
  const float peak = *std::max_element(peaks.begin(), peaks.end());
  const float rest = choose_fine(peaks, fine, num_fine);
  const float coarse_unit = rest / kMostCoarse, fine_unit = peak / kMostFine;
  if (!usable_unit(rest, coarse_unit) || !usable_unit(peak, fine_unit)) return row;

  double errors = 0;
  int64_t total = 0, total_high = 0, total_low = 0;
  const auto nearest = [&](float value, float unit, int most) -> int64_t {
    if (unit == 0) return 0;
    const double steps = std::clamp<double>(std::nearbyint(static_cast<double>(value) / unit), -most, most);
    const double error = value - steps * unit;
    errors += error * error;
    return static_cast<int64_t>(steps);
  };
  for (int64_t i = 0; i < num_fine; i++) {
    float* from = values.data() + fine[i].quad * kQuad;
    for (int k = 0; k < kQuad; k++) {
      const int64_t number = nearest(from[k], fine_unit, kMostFine), high = (number + 128) >> 8;
      fine[i].high[k] = static_cast<int8_t>(high), fine[i].low[k] = static_cast<int8_t>(number - 256 * high);
      total_high += fine[i].high[k], total_low += fine[i].low[k];
      from[k] = 0;  // the coarse part has nothing of it
    }
  }
  for (int64_t k = 0; k < num_quads * kQuad; k++) {
    p[k] = static_cast<int8_t>(nearest(values[k], coarse_unit, kMostCoarse));
    total += p[k];
  }
  const double room = scale * (1 + 0x1p-20), norm = std::sqrt(squares), distance = std::sqrt(errors);
  const double least = room * 0x1p-80 * (1 + norm);
  row.coarse = coarse_unit * scale, row.fine = fine_unit * scale;
  row.along = static_cast<float>(room * norm);
  row.apart = static_cast<float>(room * (distance + (depth + 8) * 0x1p-21 * (norm + distance)) + least);
  row.least = static_cast<float>(least);
  row.most_norm = static_cast<float>(kLargestLogit / (1 + norm) / std::max(scale, 1.0f));
  row.first = first_sum(total), row.first_high = first_sum(total_high), row.first_low = first_sum(total_low);
  row.usable = std::isfinite(row.along) && std::isfinite(row.apart) && usable_unit(rest, row.coarse) &&
               usable_unit(peak, row.fine);
  return row;
}

}  // namespace tandem::TANDEM_LEVEL
