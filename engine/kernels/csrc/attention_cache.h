// How a layer's keys and values lie in memory: so that queries meet keys, and weights meet values, as whole vectors.
//
// A *word* is 32 bits: one float32, or a pair of bfloat16 (the low half first). Keys pair neighbouring dims, values
// pair neighbouring positions, since those are what a product sums over. Both are [num_blocks][kv_heads] times a block:
//
//     keys    [block_size / run][dim_words][run]      dim_words = head_dim, or head_dim / 2 as pairs
//
//             dims 0 1 │ k0  k1  …  k15 │          one word of sixteen keys: a vector for one word of the query
//             dims 2 3 │ k0  k1  …  k15 │
//
//     values  [block_size / per word][head_dim]
//
//             keys 0 1 │ d0  d1  …  d63 │          one word of all dims: vectors for one word of the weights
//             keys 2 3 │ d0  d1  …  d63 │
//
// A *run* is sixteen keys, or the largest power of two that divides a block_size that isn't a multiple of sixteen:
// attention then copies its keys together first.
//
// Memory begins as zeros and only finite values are written. It is readable for a vector beyond its end, since the last
// vector of a row of values reaches into what follows where head_dim isn't a multiple of the lanes.
#pragma once

#include <cstdint>

namespace tandem {

constexpr int kChunk = 16;  // keys that one vector, or two, hold
constexpr int kMaxHeadDim = 256;

// One layer's memory; keys and values are float or bf16 elements as the caller's type says.
struct Cache {
  void* keys;
  void* values;
  int64_t kv_heads;
  int64_t num_blocks;
  int64_t block_size;
  int64_t run;
  int64_t dim_words;
  int64_t head_dim;
};

}  // namespace tandem
