// From a step's projections to queries and to keys and values in the cache; see rotary.cpp.
#pragma once

#include <cstdint>

#include "attention_cache.h"
#include "levels.h"

namespace tandem {

struct RotateArguments {
  Type type;
  Cache cache;

  const float* qkv;  // [tokens, (num_heads + 2 * kv_heads) * head_dim], rows by the stride
  int64_t row_stride;
  int64_t num_tokens;
  int64_t num_heads;
  void* queries;         // [tokens, num_heads, head_dim], contiguous
  const int64_t* slots;  // [tokens]

  const float* query_norm;  // [head_dim], or null for none
  const float* key_norm;
  float eps;

  const float* table;  // [positions, rotary_dim], or null for no rotation
  const int32_t* positions;
  int64_t rotary_dim;
  bool interleaved;
};

// Keys and values as they are, of the cache's type: [tokens, kv_heads, head_dim] by their strides, in elements.
struct WriteArguments {
  Type type;
  Cache cache;
  int64_t num_tokens;
  const void* keys;
  int64_t key_token_stride;
  int64_t key_head_stride;
  const void* values;
  int64_t value_token_stride;
  int64_t value_head_stride;
  const int64_t* slots;
};

}  // namespace tandem

TANDEM_KERNEL(rotate_write, const ::tandem::RotateArguments&)
TANDEM_KERNEL(write_cache, const ::tandem::WriteArguments&)
