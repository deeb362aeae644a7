// Root-mean-square and layer norms of rows.
#pragma once

#include <cstdint>

#include "levels.h"

namespace tandem {

struct NormArguments {
  const float* x;
  int64_t x_stride;  // elements from row to row, as for out
  int64_t num_rows;
  int64_t width;
  const float* weight;
  const float* bias;  // or null
  bool centred;       // subtract the mean first: a layer norm
  bool add;           // out += scale · norm; out is float32
  float scale;        // for `add`
  float eps;
  Type out_type;
  void* out;
  int64_t out_stride;
};

}  // namespace tandem

TANDEM_KERNEL(norm, const NormArguments&)
