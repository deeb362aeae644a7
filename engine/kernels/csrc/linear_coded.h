// Coded weights: bfloat16 tiles in three quarters of their bytes, from which every bit comes back.
//
// The upper byte of a bfloat16 is its sign and most of its exponent, of which a tile of trained weights uses few values:
// a tile names its sixteen most frequent ones in a table, and four bits per weight say which. A weight with any other
// upper byte is an *exception*, spelt out beside the tiles. Two steps along k, 128 weights, are a *pair* of 192 bytes:
//
//     lower bytes of step 0      64     │ line 0        in the order in which unpacking the lanes of 16 bytes yields
//     lower bytes of step 1      64     │ line 1        the steps as linear.h draws them: in lane i of 4, columns
//     codes: step 0 in the low   64     │ line 2        4i … 4i + 3 and then 16 + 4i … 16 + 4i + 3
//     half of each byte, 1 high
//
//     tile     [ table 16 | first exception 4 | number of exceptions 4 | 0 … ] 64 bytes, then its pairs
//     weight   [ tiles | exceptions: (place of the element in its tile 4, its bits 2, 0) ]     places rise within a tile
//
// A product of few rows costs what reading its weights costs, so it takes three quarters of the time; decoding hides
// behind that. With many rows each pass decodes anew, which takes 1 to 2 percent longer: shuffles run beside
// multiplications, while a decoded copy would have to be written, and took 6 to 30 percent. The sums are those of the
// plain weight, term by term.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "linear_tile.h"

namespace tandem::TANDEM_LEVEL {

constexpr int kPairBytes = kCodedPairBytes;
constexpr int kPairElements = 2 * kTileColumns * 2;
constexpr int kVectorBytes = kLanes * 4;
constexpr int kParts = kLineBytes / kVectorBytes;  // vectors in a line; part p yields the tile's vectors p and p + kParts

// One tile of a coded weight.
class CodedTile {
 public:
  CodedTile(const CodedWeight& weight, int64_t tile)
      : head_(reinterpret_cast<const CodedHead*>(weight.tiles + tile * weight.tile_bytes)),
        pairs_(weight.tiles + tile * weight.tile_bytes + sizeof(CodedHead)) {
    // Whatever a file may hold: nothing beyond the weight is read.
    const int64_t first = std::clamp<int64_t>(head_->first_exception, 0, weight.num_exceptions);
    exceptions_ = weight.exceptions + first;
    end_ = exceptions_ + std::clamp<int64_t>(head_->num_exceptions, 0, weight.num_exceptions - first);
  }

  const uint8_t* table() const { return head_->table; }
  const uint8_t* pair(int64_t index) const { return pairs_ + index * kPairBytes; }
  const CodedException* begin() const { return exceptions_; }
  const CodedException* end() const { return end_; }

 private:
  const CodedHead* head_;
  const uint8_t* pairs_;
  const CodedException* exceptions_;
  const CodedException* end_;
};

#if TANDEM_LEVEL_NUMBER >= TANDEM_avx512
using Bytes = __m512i;
inline Bytes load_bytes(const uint8_t* from) { return _mm512_loadu_si512(from); }
inline Bytes load_table(const uint8_t* from) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Bytes low_codes(Bytes codes) { return _mm512_and_si512(codes, _mm512_set1_epi8(15)); }
inline Bytes high_codes(Bytes codes) { return low_codes(_mm512_srli_epi16(codes, 4)); }
inline Bytes looked_up(Bytes table, Bytes codes) { return _mm512_shuffle_epi8(table, codes); }
inline Pairs first_pairs(Bytes low, Bytes high) { return _mm512_unpacklo_epi8(low, high); }
inline Pairs second_pairs(Bytes low, Bytes high) { return _mm512_unpackhi_epi8(low, high); }
inline void store_pairs(bf16* to, Pairs pairs) { _mm512_storeu_si512(to, pairs); }
#else
using Bytes = __m256i;
inline Bytes load_bytes(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline Bytes load_table(const uint8_t* from) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Bytes low_codes(Bytes codes) { return _mm256_and_si256(codes, _mm256_set1_epi8(15)); }
inline Bytes high_codes(Bytes codes) { return low_codes(_mm256_srli_epi16(codes, 4)); }
inline Bytes looked_up(Bytes table, Bytes codes) { return _mm256_shuffle_epi8(table, codes); }
inline Pairs first_pairs(Bytes low, Bytes high) { return _mm256_unpacklo_epi8(low, high); }
inline Pairs second_pairs(Bytes low, Bytes high) { return _mm256_unpackhi_epi8(low, high); }
inline void store_pairs(bf16* to, Pairs pairs) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), pairs); }
#endif

// What is asked for beyond a pair. The hardware runs ahead of a stream by itself up to the end of a page, and begins anew in
// the next. With few rows the processor's own window reaches over several pairs, and each line that is asked for takes the
// place of one under way: only a page's beginning is, a page ahead. With many rows a pair is long, the window sees little
// beyond it, and every line is worth asking for. In between every line is as well, if it comes past the second-level cache;
// of a tile that is gone over part by part none may.
constexpr int kMiddlePassRows = 4;
constexpr int kLongPassRows = 5;
constexpr uintptr_t kAheadBytes = 4096;  // a page, and what arrives while so much is multiplied

template <_mm_hint kHint>
[[gnu::always_inline]] inline void fetch_pair(const char* pair) {
  for (int line = 0; line < kPairBytes / kLineBytes; line++) _mm_prefetch(pair + line * kLineBytes, kHint);
}

template <int kRows>
[[gnu::always_inline]] inline void fetch_ahead(const uint8_t* pair) {
  const char* ahead = reinterpret_cast<const char*>(pair) + kAheadBytes;
  const uintptr_t in_page = reinterpret_cast<uintptr_t>(pair) % kAheadBytes;
  if constexpr (kRows >= kLongPassRows) {
    fetch_pair<_MM_HINT_T1>(ahead);
  } else if constexpr (kRows >= kMiddlePassRows && kParts == 1) {
    fetch_pair<_MM_HINT_NTA>(ahead);
  } else if (in_page < kPairBytes) {
    fetch_pair<_MM_HINT_T1>(ahead - in_page);
  }
}

// Two steps of a part's two vectors of columns.
struct Decoded {
  Pairs steps[2][2];
};

[[gnu::always_inline]] inline Decoded decode(const uint8_t* pair, int part, Bytes table) {
  const Bytes codes = load_bytes(pair + 2 * kLineBytes + part * kVectorBytes);
  const Bytes highs[2] = {looked_up(table, low_codes(codes)), looked_up(table, high_codes(codes))};
  Decoded out;
  for (int step = 0; step < 2; step++) {
    const Bytes lows = load_bytes(pair + step * kLineBytes + part * kVectorBytes);
    out.steps[step][0] = first_pairs(lows, highs[step]);
    out.steps[step][1] = second_pairs(lows, highs[step]);
  }
  return out;
}

// A pair as plain steps [2][32][2], its exceptions still as they are coded.
inline void decode_to(bf16* to, const uint8_t* pair, Bytes table) {
  for (int part = 0; part < kParts; part++) {
    const Decoded decoded = decode(pair, part, table);
    for (int step = 0; step < 2; step++) {
      for (int half = 0; half < 2; half++) {
        const int vector = part + half * kParts;
        store_pairs(to + step * kStepElements<bf16> + vector * 2 * kLanes, decoded.steps[step][half]);
      }
    }
  }
}

// Sums of some rows and of the two vectors of columns of each of some parts.
template <int kRows, int kTogether>
using Sums = Lanes[kRows][2 * kTogether];

// Adds the products of one step of a part, of which a row of x has the pair at `value`. Always inlined, as what follows:
// sums whose address is handed on would be in memory.
template <int kRows, int kTogether>
[[gnu::always_inline]] inline void add_step(Sums<kRows, kTogether>& sums, int part, const Pairs* weights,
                                            const bf16* value, int64_t stride) {
#pragma GCC unroll 8
  for (int row = 0; row < kRows; row++) {
    const Pairs x = fill_pair(value + row * stride);
    sums[row][2 * part] = add_pair_products(sums[row][2 * part], weights[0], x);
    sums[row][2 * part + 1] = add_pair_products(sums[row][2 * part + 1], weights[1], x);
  }
}

// The pair at depth k from a decoded copy: one with exceptions, or one that goes beyond the depth.
template <int kRows, int kTogether>
[[gnu::always_inline]] inline void add_copied(Sums<kRows, kTogether>& sums, int part, const bf16* copy, const bf16* x,
                                              int64_t stride, int64_t k, int64_t depth) {
  for (int step = 0; step < 2 && k < depth; step++, k += 2) {
    const bf16* from = copy + step * kStepElements<bf16>;
    const Pairs weights[2] = {load_pairs(from), load_pairs(from + kTileColumns)};
    if (k + 1 < depth) {
      add_step<kRows, kTogether>(sums, part, weights, x + k, stride);
      continue;
    }
    bf16 last[kRows][2];  // the last pair's second half belongs to the next row, or to nobody
    for (int row = 0; row < kRows; row++) last[row][0] = x[row * stride + k], last[row][1] = bf16{};
    add_step<kRows, kTogether>(sums, part, weights, &last[0][0], 2);
  }
}

// The sums of the columns of kTogether parts from `first` on.
template <int kRows, int kTogether>
void multiply_parts(const bf16* x, int64_t stride, const CodedTile& tile, int64_t depth, int first, float* out) {
  Sums<kRows, kTogether> sums;
#pragma GCC unroll 8
  for (int row = 0; row < kRows; row++) {
#pragma GCC unroll 4
    for (int v = 0; v < 2 * kTogether; v++) sums[row][v] = zero();
  }
  const Bytes table = load_table(tile.table());
  const int64_t num_whole = depth / 4, num_pairs = (depth + 3) / 4;
  const CodedException* exception = tile.begin();
  for (int64_t pair = 0; pair < num_pairs; pair++) {
    // Up to the next pair that needs a closer look.
    const int64_t next = exception != tile.end() ? exception->place / kPairElements : num_pairs;
    const int64_t plain_end = std::min(num_whole, next);
    for (; pair < plain_end; pair++) {
      fetch_ahead<kRows>(tile.pair(pair));
#pragma GCC unroll 2
      for (int part = 0; part < kTogether; part++) {
        const Decoded decoded = decode(tile.pair(pair), first + part, table);
        add_step<kRows, kTogether>(sums, part, decoded.steps[0], x + 4 * pair, stride);
        add_step<kRows, kTogether>(sums, part, decoded.steps[1], x + 4 * pair + 2, stride);
      }
    }
    if (pair == num_pairs) break;
    alignas(64) bf16 copy[kPairElements];
    decode_to(copy, tile.pair(pair), table);
    for (; exception != tile.end() && exception->place / kPairElements <= pair; exception++) {
      if (exception->place / kPairElements == pair) copy[exception->place % kPairElements].bits = exception->bits;
    }
#pragma GCC unroll 2
    for (int part = 0; part < kTogether; part++) {
      const bf16* columns = copy + (first + part) * 2 * kLanes;
      add_copied<kRows, kTogether>(sums, part, columns, x, stride, 4 * pair, depth);
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; row++) {
#pragma GCC unroll 2
    for (int part = 0; part < kTogether; part++) {
      store(out + row * kTileColumns + (first + part) * kLanes, sums[row][2 * part]);
      store(out + row * kTileColumns + (first + part + kParts) * kLanes, sums[row][2 * part + 1]);
    }
  }
}

// sums [kRows][32] of kRows rows and one tile
template <int kRows>
void multiply_coded(const bf16* x, int64_t stride, const CodedTile& tile, int64_t depth, float* sums) {
  // A single row's few sums would wait for each other.
  constexpr int kTogether = kRows == 1 ? kParts : 1;
  for (int part = 0; part < kParts; part += kTogether) {
    multiply_parts<kRows, kTogether>(x, stride, tile, depth, part, sums);
  }
}

using MultiplyCoded = void (*)(const bf16*, int64_t, const CodedTile&, int64_t, float*);

template <int... kRowsMinusOne>
constexpr std::array<MultiplyCoded, sizeof...(kRowsMinusOne)> multiply_coded_table(
    std::integer_sequence<int, kRowsMinusOne...>) {
  return {multiply_coded<kRowsMinusOne + 1>...};
}

// kMultiplyCoded[n - 1] multiplies n rows
constexpr auto kMultiplyCoded = multiply_coded_table(std::make_integer_sequence<int, kPassRows>{});

}  // namespace tandem::TANDEM_LEVEL
