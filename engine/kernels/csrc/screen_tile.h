// Sums Σ p q of a few rows and one tile of a screen, in int32 and exact.
#pragma once

#include <array>
#include <utility>

#include "screen.h"
#include "screen_lanes.h"

namespace tandem::TANDEM_LEVEL {

constexpr int kScreenVectors = kTileColumns / kLanes;
constexpr int64_t kVectorBytes = kQuad * kLanes;
constexpr int kMaxScreenRows = kLanes == 16 ? 8 : 2;  // whose sums fit the registers
constexpr int64_t kScreenFetchAheadBytes = 4096;      // about the latency of memory times one core's bandwidth

// What a sum of products with p, of this total, starts from.
inline int32_t first_sum(int64_t total) { return kOffsetWeights ? static_cast<int32_t>(-kWeightOffset * total) : 0; }

// sums [kRows][32] of p [kRows][4 · num_quads] and one tile; they start from firsts [kRows]
template <int kRows>
inline void screen_rows(const int8_t* p, int64_t stride, const int32_t* firsts, const char* tile, int64_t num_quads,
                        int32_t* sums) {
  Words sum[kRows][kScreenVectors];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; row++) {
#pragma GCC unroll 4
    for (int v = 0; v < kScreenVectors; v++) sum[row][v] = fill_words(static_cast<uint32_t>(firsts[row]));
  }
  for (int64_t quad = 0; quad < num_quads; quad++, tile += kScreenStepBytes) {
    _mm_prefetch(tile + kScreenFetchAheadBytes, _MM_HINT_T1);
    _mm_prefetch(tile + kScreenFetchAheadBytes + kScreenStepBytes / 2, _MM_HINT_T1);
    Words weights[kScreenVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kScreenVectors; v++) weights[v] = load_quads(tile + v * kVectorBytes);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; row++) {
      const Quad values(p + row * stride + kQuad * quad);
#pragma GCC unroll 4
      for (int v = 0; v < kScreenVectors; v++) sum[row][v] = add_quad_products(sum[row][v], weights[v], values);
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; row++) {
#pragma GCC unroll 4
    for (int v = 0; v < kScreenVectors; v++) store_integers(sums + row * kTileColumns + v * kLanes, sum[row][v]);
  }
}

using ScreenRows = void (*)(const int8_t*, int64_t, const int32_t*, const char*, int64_t, int32_t*);

template <int... kRowsMinusOne>
constexpr std::array<ScreenRows, sizeof...(kRowsMinusOne)> screen_table(std::integer_sequence<int, kRowsMinusOne...>) {
  return {screen_rows<kRowsMinusOne + 1>...};
}

// kScreenRows[n - 1] multiplies n rows
constexpr auto kScreenRows = screen_table(std::make_integer_sequence<int, kMaxScreenRows>{});

// A few quads of a row in two parts each, 256 · high + low.
struct Fine {
  int32_t quad;  // which
  int8_t high[kQuad];
  int8_t low[kQuad];
};

// highs and lows [32] of one row's fine quads and one tile
inline void screen_fine(const Fine* fine, int64_t num_fine, int32_t first_high, int32_t first_low, const char* tile,
                        int32_t* highs, int32_t* lows) {
  Words high[kScreenVectors], low[kScreenVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kScreenVectors; v++) {
    high[v] = fill_words(static_cast<uint32_t>(first_high));
    low[v] = fill_words(static_cast<uint32_t>(first_low));
  }
  for (const Fine* end = fine + num_fine; fine != end; fine++) {
    const char* weights = tile + fine->quad * kScreenStepBytes;
    const Quad upper(fine->high), lower(fine->low);
#pragma GCC unroll 4
    for (int v = 0; v < kScreenVectors; v++) {
      const Words q = load_quads(weights + v * kVectorBytes);
      high[v] = add_quad_products(high[v], q, upper);
      low[v] = add_quad_products(low[v], q, lower);
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < kScreenVectors; v++) {
    store_integers(highs + v * kLanes, high[v]);
    store_integers(lows + v * kLanes, low[v]);
  }
}

}  // namespace tandem::TANDEM_LEVEL
