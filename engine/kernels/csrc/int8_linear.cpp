// How a product in 8-bit integers is computed: int8_linear.h says what.
//
// All rows of x are rounded first, by the caller; then threads share out the tiles. A tile is read once from memory,
// whatever the number of rows: passes of a few rows (screen_tile.h) go over it while it lies in the cache.
#include "int8_linear.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "linear_finish.h"
#include "screen_tile.h"
#include "threads.h"

namespace tandem::TANDEM_LEVEL {
namespace {

constexpr int64_t kItemBytes = 32 << 10;  // weights that make an item long enough to be worth claiming
constexpr int64_t kRowAlignment = 64;
constexpr float kMost = 127.0f;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Whole numbers, none beyond ±127.
inline void store_bytes(int8_t* to, Lanes values) {
#if TANDEM_LEVEL_NUMBER >= TANDEM_avx512
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(values)));
#else
  const __m256i words = _mm256_cvtps_epi32(values);
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(halves, halves));
#endif
}

template <class T>
inline Lanes load_next(const T* from, int64_t left) {
  return left >= kLanes ? load(from) : load_some(from, static_cast<int>(left));
}

// The rows of x as integers; kept from call to call, so that a step allocates nothing.
struct Rounded {
  std::vector<int8_t> p;         // [rows, stride], 0 beyond a row's end
  std::vector<float> units;      // [rows]
  std::vector<int32_t> firsts;   // [rows]: what the sums start from
  int64_t stride = 0;

  template <class T>
  void take(const T* x, int64_t x_stride, int64_t num_rows, int64_t depth) {
    stride = ceil_div(depth, kRowAlignment) * kRowAlignment;
    if (static_cast<int64_t>(p.size()) < num_rows * stride) p.resize(num_rows * stride);
    if (static_cast<int64_t>(units.size()) < num_rows) units.resize(num_rows), firsts.resize(num_rows);
    for (int64_t row = 0; row < num_rows; row++) take_row(x + row * x_stride, depth, row);
  }

 private:
  template <class T>
  void take_row(const T* x, int64_t depth, int64_t row) {
    int8_t* to = p.data() + row * stride;
    Lanes tops = zero(), faults = zero();
    for (int64_t k = 0; k < depth; k += kLanes) {
      const Lanes value = load_next(x + k, depth - k);
      tops = max(tops, abs(value));
      faults = fma(value, zero(), faults);  // NaN once a value isn't finite
    }
    const float peak = peak_of(tops), unit = peak / kMost;
    firsts[row] = 0;
    if (sum_of(faults) != 0 || !std::isnormal(unit)) {
      std::fill_n(to, stride, int8_t{0});
      units[row] = sum_of(faults) != 0 ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
      return;
    }
    const Lanes steps = fill(kMost / peak);
    Lanes total = zero();  // of whole numbers below 2^24: exact
    for (int64_t k = 0; k < depth; k += kLanes) {
      const Lanes number = round_nearest(mul(load_next(x + k, depth - k), steps));
      store_bytes(to + k, number);
      total = add(total, number);
    }
    units[row] = unit;
    firsts[row] = first_sum(static_cast<int64_t>(sum_of(total)));
  }
};

// Integer sums [num_rows][32] of a tile, with its columns' scales and the rows' units.
void scale_sums(const int32_t* integers, const float* scales, const float* units, int num_rows, float* sums) {
  for (int row = 0; row < num_rows; row++) {
    const Lanes unit = fill(units[row]);
    for (int column = 0; column < kTileColumns; column += kLanes) {
      const int at = row * kTileColumns + column;
      store(sums + at, mul(unit, mul(load(scales + column), to_float(load_integers(integers + at)))));
    }
  }
}

void multiply(const LinearArguments& a, const Rounded& x) {
  const int64_t width = a.finish == Finish::gate ? kGatedColumns : kTileColumns;
  const int64_t num_tiles = ceil_div(a.out_features, width), num_quads = ceil_div(a.in_features, kQuad);
  const int64_t tile_bytes = int8_tile_bytes(a.in_features);
  const int64_t per_item = std::max<int64_t>(1, kItemBytes / tile_bytes);
  parallel_for(ceil_div(num_tiles, per_item), [&](int64_t item) {
    alignas(64) int32_t integers[kMaxScreenRows * kTileColumns];
    alignas(64) float sums[kMaxScreenRows * kTileColumns];
    for (int64_t tile = item * per_item; tile < std::min((item + 1) * per_item, num_tiles); tile++) {
      const char* data = static_cast<const char*>(a.weight) + tile * tile_bytes;
      const auto* scales = reinterpret_cast<const float*>(data + num_quads * kScreenStepBytes);
      for (int64_t row = 0; row < a.num_rows;) {
        // Passes of even size, as in linear.cpp.
        const int64_t num_passes = ceil_div(a.num_rows - row, kMaxScreenRows);
        const int num_rows = static_cast<int>(ceil_div(a.num_rows - row, num_passes));
        fetch_out(a, row, num_rows, tile * width, std::min(width, a.out_features - tile * width));
        kScreenRows[num_rows - 1](x.p.data() + row * x.stride, x.stride, x.firsts.data() + row, data, num_quads,
                                  integers);
        scale_sums(integers, scales, x.units.data() + row, num_rows, sums);
        finish(a, sums, row, num_rows, tile);
        row += num_rows;
      }
    }
  });
}

}  // namespace

void int8_linear(const LinearArguments& a) {
  if (a.num_rows == 0 || a.out_features == 0) return;
  static thread_local Rounded of_thread;
  Rounded& rounded = of_thread;  // the other threads read the caller's
  if (a.type == Type::bf16) {
    rounded.take(static_cast<const bf16*>(a.x), a.x_stride, a.num_rows, a.in_features);
  } else {
    rounded.take(static_cast<const float*>(a.x), a.x_stride, a.num_rows, a.in_features);
  }
  multiply(a, rounded);
}

}  // namespace tandem::TANDEM_LEVEL
