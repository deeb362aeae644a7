// Places in a layer's memory (attention_cache.h), for kernels.
#pragma once

#include <cstdint>
#include <cstring>

#include "attention_cache.h"
#include "lanes.h"

namespace tandem::TANDEM_LEVEL {

// Where a position lies.
struct Place {
  int64_t block;
  int64_t offset;
};

// T is float or bf16.
template <class T>
class CacheOf {
 public:
  static constexpr int kPerWord = 4 / sizeof(T);

  explicit CacheOf(const Cache& cache) : shape(cache) {}

  // Where a head's part of a block begins, from an offset on; the offset of keys is that of a run's key.
  T* keys(int64_t block, int64_t head, int64_t offset) const {
    const int64_t words = (block * shape.kv_heads + head) * shape.block_size * shape.dim_words;
    const int64_t runs = offset / shape.run * shape.dim_words * shape.run;
    return static_cast<T*>(shape.keys) + (words + runs + offset % shape.run) * kPerWord;
  }
  T* values(int64_t block, int64_t head, int64_t offset) const {
    const int64_t elements = (block * shape.kv_heads + head) * shape.block_size * shape.head_dim;
    return static_cast<T*>(shape.values) + elements + offset / kPerWord * shape.head_dim * kPerWord + offset % kPerWord;
  }

  // Write one token's key and value of a head; both hold head_dim elements.
  void write(int64_t slot, int64_t head, const T* key, const T* value) const {
    const int64_t block = slot / shape.block_size, offset = slot % shape.block_size;
    T* to_key = keys(block, head, offset);
    if (shape.run == kChunk) {
      scatter<kChunk * kPerWord>(to_key, key);  // a constant stride needs no products
    } else {
      scatter<0>(to_key, key);
    }
    T* to_value = values(block, head, offset);
    for (int64_t dim = 0; dim < shape.head_dim; dim++) to_value[dim * kPerWord] = value[dim];
  }

  const Cache shape;

 private:
  // A key's words, so many elements apart; 0: a run's.
  template <int64_t kStride>
  void scatter(T* to, const T* key) const {
    const int64_t stride = kStride ? kStride : shape.run * kPerWord;
    for (int64_t word = 0; word < shape.dim_words; word++) std::memcpy(to + word * stride, key + word * kPerWord, 4);
  }
};

}  // namespace tandem::TANDEM_LEVEL
