// Attention of one step's queries against a layer's blocks; see attention.cpp.
#pragma once

#include <cstdint>

#include "attention_cache.h"
#include "levels.h"

namespace tandem {

struct AttendArguments {
  Type type;
  Cache cache;

  const void* queries;  // [tokens, num_heads, head_dim] by these strides, in elements
  int64_t query_token_stride;
  int64_t query_head_stride;
  void* out;  // [tokens, num_heads, head_dim], contiguous
  int64_t num_heads;

  int64_t num_rows;
  const int32_t* query_starts;  // [num_rows + 1]
  const int32_t* positions;     // [tokens], rising by one within a row
  const int32_t* block_tables;  // [num_rows, table_width]
  int64_t table_width;

  float scale;
  int64_t window;      // 0: none
  float softcap;       // 0: none
  const float* sinks;  // [num_heads], or null
};

}  // namespace tandem

TANDEM_KERNEL(attend, const ::tandem::AttendArguments&)
