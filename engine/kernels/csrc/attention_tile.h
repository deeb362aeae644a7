// The arithmetic of attention: a few queries against one tile of 64 keys.
//
//     scores    [rows][64]       row r, key k:  Σ_d q[r][d] · k[k][d]        lanes are keys
//     weights   [rows][64]       e^(score − peak), hidden keys 0; bfloat16 where that is what is multiplied
//     values    [rows][columns]  += Σ_k weight[r][k] · v[k][d]               lanes are dims; columns are head_dim
//                                                                            rounded up to whole vectors
//
// A row is one head of one token. Rows share loads of keys and values and nothing else: each operation is one lane-wise
// chain per row in a fixed order (dims ascending for scores, keys ascending for values), so a row has the same bits
// in any company. How many rows and vectors are in registers at a time decides only speed.
//
// A peak is the highest score so far; when it rises, what was summed under the old one is multiplied by
// e^(old − new) (online softmax; Milakov & Gimelshein, arXiv:1805.02867). A tile of which a row sees nothing leaves the
// row as it is: the peak stays, the factor is exactly 1, and what is added is exactly 0.
#pragma once

#include <limits>
#include <type_traits>

#include "activations.h"
#include "attention_blocks.h"

namespace tandem::TANDEM_LEVEL {

constexpr int kTile = 64;
constexpr int kTileChunks = kTile / kChunk;
constexpr int kChunkVectors = kChunk / kLanes;
constexpr int kAccumulators = kLanes == 16 ? 24 : 12;  // vectors of sums that leave registers for operands
constexpr int kMaxRows = kLanes == 16 ? 8 : 6;
constexpr int kQueryStride = kMaxHeadDim + 16;  // not a power of two, which would crowd rows into the same cache sets
constexpr float kHidden = -std::numeric_limits<float>::infinity();

// How words of the cache are multiplied with what queries and weights are kept as: `Factor`s, one per element.
template <class T>
struct Words;

template <>
struct Words<float> {
  using Vector = Lanes;
  using Factor = float;
  static Vector load(const float* from) { return TANDEM_LEVEL::load(from); }
  static Lanes add_products(Lanes sum, Vector words, const float* factor) { return fma(words, fill(*factor), sum); }
};

template <>
struct Words<bf16> {
  using Vector = Pairs;
  static Vector load(const bf16* from) { return load_pairs(from); }
#if TANDEM_LEVEL_NUMBER == TANDEM_avx512bf16
  using Factor = bf16;
  static Lanes add_products(Lanes sum, Vector words, const bf16* pair) {
    return add_pair_products(sum, words, fill_pair(pair));
  }
#else
  using Factor = float;  // widened once, and weights keep their bits
  static Lanes add_products(Lanes sum, Vector words, const float* pair) {
    return fma(second_of(words), fill(pair[1]), fma(first_of(words), fill(pair[0]), sum));
  }
#endif
};

template <class T>
using Factor = typename Words<T>::Factor;

constexpr int largest_power_of_two_within(int n) {
  int power = 1;
  while (2 * power <= n) power *= 2;
  return power;
}

// Where a tile's keys and values lie, chunk by chunk; beyond num_chunks keys repeat the last.
template <class T>
struct TileSources {
  const T* keys[kTileChunks];
  const T* values[kTileChunks];
  int num_chunks;
};

// A tile, and the one that will be read next: it is fetched from memory meanwhile, a line for each line that is read.
template <class T>
struct Tiles {
  TileSources<T> now;
  TileSources<T> next;
  int64_t dim_words;
  int64_t value_words;  // of one row of values
};

inline void fetch(const void* line) { _mm_prefetch(static_cast<const char*>(line), _MM_HINT_T1); }
constexpr bool begins_line(int vector) { return vector * kLanes % 16 == 0; }

// Which keys of a tile a row sees: first … end - 1.
struct Seen {
  int first;
  int end;
};

// kChunks chunks of kRows rows: scores [rows][kTile]; queries [rows][kQueryStride] elements.
template <class T, int kRows, int kChunks>
void score_chunks(const Factor<T>* queries, const T* const* keys, const T* const* next_keys, int64_t dim_words,
                  float* scores) {
  constexpr int kVectors = kChunks * kChunkVectors, kPerWord = CacheOf<T>::kPerWord;
  Lanes sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; row++) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v++) sums[row][v] = zero();
  }
  for (int64_t word = 0; word < dim_words; word++) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v++) {
      const int64_t at = word * kChunk + v % kChunkVectors * kLanes;
      const auto part = Words<T>::load(keys[v / kChunkVectors] + at * kPerWord);
      if (begins_line(v)) fetch(next_keys[v / kChunkVectors] + at * kPerWord);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; row++) {
        const Factor<T>* query = queries + row * kQueryStride + word * kPerWord;
        sums[row][v] = Words<T>::add_products(sums[row][v], part, query);
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; row++) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v++) store(scores + row * kTile + v * kLanes, sums[row][v]);
  }
}

template <class T, int kRows>
void score_tile(const Factor<T>* queries, const Tiles<T>& tiles, float* scores) {
  constexpr int kChunks =
      std::min(kTileChunks, std::max(1, largest_power_of_two_within(kAccumulators / kRows / kChunkVectors)));
  for (int chunk = 0; chunk < tiles.now.num_chunks; chunk += kChunks) {
    score_chunks<T, kRows, kChunks>(queries, tiles.now.keys + chunk, tiles.next.keys + chunk, tiles.dim_words,
                                    scores + chunk * kChunk);
  }
}

// One row's products, which are overwritten, → weights. Raises the peak, adds to sums [kLanes], and returns what the
// row's earlier values are to be multiplied by. softcap 0: none.
template <class W>
float weigh(float* scores, int num_vectors, Seen seen, float scale, float softcap, float& peak, float* sums,
            W* weights) {
  if (seen.first >= seen.end) {
    for (int v = 0; v < num_vectors; v++) store(weights + v * kLanes, zero());
    return 1.0f;
  }
  Lanes top = fill(kHidden);
  const bool partly = seen.first > 0 || seen.end < num_vectors * kLanes;
  const float inverse = softcap > 0 ? 1.0f / softcap : 0.0f;
  for (int v = 0; v < num_vectors; v++) {
    Lanes score = mul(load(scores + v * kLanes), fill(scale));
    if (softcap > 0) score = mul(fill(softcap), tanh(mul(score, fill(inverse))));
    if (partly) {
      score = select(below(seen.end - v * kLanes), score, fill(kHidden));
      score = select(below(seen.first - v * kLanes), fill(kHidden), score);
    }
    store(scores + v * kLanes, score);
    top = max(top, score);
  }
  const float highest = peak_of(top), before = peak;
  float factor = 1.0f;
  Lanes sum = load(sums);
  if (highest > before) {
    peak = highest;
    const Lanes factors = exp(fill(before - highest));
    factor = peak_of(factors);  // they are all one number
    sum = mul(sum, factors);
  }
  for (int v = 0; v < num_vectors; v++) {
    const Lanes score = load(scores + v * kLanes);
    const Lanes weight = exp(sub(score, fill(peak)));
    store(weights + v * kLanes, select(less(fill(kHidden), score), weight, zero()));
    sum = add(sum, load(weights + v * kLanes));
  }
  store(sums, sum);
  return factor;
}

// values[row][…kColumns vectors] = factor · itself + Σ weights · values; weights [rows][kTile], records by a stride.
template <class T, int kRows, int kColumns>
void add_columns(const Factor<T>* weights, const Tiles<T>& tiles, int64_t column, const float* factors,
                 float* values, int64_t stride) {
  constexpr int kPerWord = CacheOf<T>::kPerWord;
  Lanes sums[kRows][kColumns];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; row++) {
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; c++) {
      sums[row][c] = mul(load(values + row * stride + column + c * kLanes), fill(factors[row]));
    }
  }
  for (int chunk = 0; chunk < tiles.now.num_chunks; chunk++) {
    const T* from = tiles.now.values[chunk] + column * kPerWord;
    const T* next = tiles.next.values[chunk] + column * kPerWord;
    const int64_t step = tiles.value_words * kPerWord;
    const Factor<T>* weight = weights + chunk * kChunk;
    for (int word = 0; word < kChunk / kPerWord; word++, from += step, next += step, weight += kPerWord) {
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; c++) {
        const auto part = Words<T>::load(from + c * kLanes * kPerWord);
        if (begins_line(c)) fetch(next + c * kLanes * kPerWord);
#pragma GCC unroll 8
        for (int row = 0; row < kRows; row++) {
          sums[row][c] = Words<T>::add_products(sums[row][c], part, weight + row * kTile);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; row++) {
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; c++) store(values + row * stride + column + c * kLanes, sums[row][c]);
  }
}

template <class T, int kRows, int kColumns>
void add_from_column(const Factor<T>* weights, const Tiles<T>& tiles, int64_t column, int64_t columns,
                     const float* factors, float* values, int64_t stride) {
  for (; column + kColumns * kLanes <= columns; column += kColumns * kLanes) {
    add_columns<T, kRows, kColumns>(weights, tiles, column, factors, values, stride);
  }
  if constexpr (kColumns > 1) {
    add_from_column<T, kRows, kColumns / 2>(weights, tiles, column, columns, factors, values, stride);
  }
}

template <class T, int kRows>
void add_values(const Factor<T>* weights, const Tiles<T>& tiles, int64_t columns, const float* factors,
                float* values, int64_t stride) {
  constexpr int kColumns = std::min(8, largest_power_of_two_within(kAccumulators / kRows));
  add_from_column<T, kRows, kColumns>(weights, tiles, 0, columns, factors, values, stride);
}

// Call body with the number of rows as a constant.
template <class Body>
void with_rows(int num_rows, Body&& body) {
  static_assert(kMaxRows <= 8);
  switch (num_rows) {
    case 1:
      return body(std::integral_constant<int, 1>{});
    case 2:
      return body(std::integral_constant<int, 2>{});
    case 3:
      return body(std::integral_constant<int, 3>{});
    case 4:
      return body(std::integral_constant<int, 4>{});
    case 5:
      return body(std::integral_constant<int, 5>{});
    case 6:
      return body(std::integral_constant<int, 6>{});
  }
  if constexpr (kMaxRows > 6) {
    num_rows == 7 ? body(std::integral_constant<int, 7>{}) : body(std::integral_constant<int, 8>{});
  }
}

}  // namespace tandem::TANDEM_LEVEL
