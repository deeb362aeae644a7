// A pass: up to kPassRows rows of x times one tile of a packed weight, its sums in registers (linear.cpp draws it).
#pragma once

#include <array>
#include <utility>

#include "lanes.h"
#include "linear.h"

namespace tandem::TANDEM_LEVEL {

constexpr int kTileVectors = kTileColumns / kLanes;
constexpr bool kWideRegisters = kLanes == 16;  // 32 registers of 16 lanes; else 16 of 8
constexpr int kPassRows = kWideRegisters ? 8 : 4;

template <class T>
constexpr int kDepthPerStep = sizeof(T) == 2 ? 2 : 1;

template <class T>
constexpr int64_t kStepElements = kTileColumns * kDepthPerStep<T>;

inline Lanes add_product(Lanes sum, const float* weights, const float* x) { return fma(load(weights), fill(*x), sum); }
inline Lanes add_product(Lanes sum, const bf16* weights, const bf16* x) {
  return add_pair_products(sum, load_pairs(weights), fill_pair(x));
}

// The sums of kVectors vectors of a tile's columns, from vector `first` on.
template <class T, int kRows, int kVectors>
void multiply_vectors(const T* x, int64_t stride, const T* tile, int64_t depth, int first, float* sums) {
  constexpr int kVectorElements = kLanes * kDepthPerStep<T>;
  Lanes sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; row++) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) sum[row][v] = zero();
  }
  const T* weights = tile + first * kVectorElements;
  const int64_t num_steps = depth / kDepthPerStep<T>;
  for (int64_t step = 0; step < num_steps; step++, weights += kStepElements<T>) {
#pragma GCC unroll 8
    for (int row = 0; row < kRows; row++) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) {
        const T* value = x + row * stride + step * kDepthPerStep<T>;
        sum[row][v] = add_product(sum[row][v], weights + v * kVectorElements, value);
      }
    }
  }
  if constexpr (kDepthPerStep<T> == 2) {
    if (depth % 2) {  // the last pair's second half belongs to the next row, or to nobody
      for (int row = 0; row < kRows; row++) {
        const T last[2] = {x[row * stride + depth - 1], T{}};
        for (int v = 0; v < kVectors; v++) sum[row][v] = add_product(sum[row][v], weights + v * kVectorElements, last);
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; row++) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) store(sums + row * kTileColumns + (first + v) * kLanes, sum[row][v]);
  }
}

// sums [kRows][32] of kRows rows and one tile
template <class T, int kRows>
void multiply(const T* x, int64_t stride, const T* tile, int64_t depth, float* sums) {
  // As many vectors at once as leave registers for the weights: a whole tile, or half of one in 16 registers.
  constexpr int kVectors = kWideRegisters || kRows == 1 ? kTileVectors : kTileVectors / 2;
  multiply_vectors<T, kRows, kVectors>(x, stride, tile, depth, 0, sums);
  if constexpr (kVectors < kTileVectors) {
    multiply_vectors<T, kRows, kVectors>(x, stride, tile, depth, kVectors, sums);
  }
}

template <class T>
using Multiply = void (*)(const T*, int64_t, const T*, int64_t, float*);

template <class T, int... kRowsMinusOne>
constexpr std::array<Multiply<T>, sizeof...(kRowsMinusOne)> multiply_table(
    std::integer_sequence<int, kRowsMinusOne...>) {
  return {multiply<T, kRowsMinusOne + 1>...};
}

// kMultiply<T>[n - 1] multiplies n rows
template <class T>
constexpr auto kMultiply = multiply_table<T>(std::make_integer_sequence<int, kPassRows>{});

}  // namespace tandem::TANDEM_LEVEL
