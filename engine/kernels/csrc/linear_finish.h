// From sums to results, for every kind of product: bias, scale, activation, rounding.
#pragma once

#include <algorithm>

#include "activations.h"
#include "lanes.h"
#include "linear.h"

namespace tandem::TANDEM_LEVEL {

// A vector of the result, from its column's place in a row of sums.
inline Lanes finished(const LinearArguments& a, const float* sums, int64_t packed_column) {
  const auto with_bias = [&](int offset) {
    const Lanes sum = load(sums + offset);
    return a.bias ? add(sum, load(a.bias + packed_column + offset)) : sum;
  };
  switch (a.finish) {
    case Finish::gate:
      return mul(activate(a.activation, with_bias(0)), with_bias(kGatedColumns));
    case Finish::activate:
      return activate(a.activation, with_bias(0));
    case Finish::add:
      return mul(fill(a.scale), with_bias(0));
    case Finish::write:
      break;
  }
  const Lanes value = mul(fill(a.scale), with_bias(0));
  return a.softcap > 0 ? mul(fill(a.softcap), tanh(div(value, fill(a.softcap)))) : value;
}

template <class Out>
inline void put(Out* to, Lanes value, int64_t num_columns) {
  if (num_columns >= kLanes) {
    store(to, value);
  } else {
    store_some(to, value, static_cast<int>(num_columns));
  }
}

inline void put_added(float* to, Lanes value, int64_t num_columns) {
  if (num_columns >= kLanes) {
    store(to, add(load(to), value));
  } else {
    store_some(to, add(load_some(to, static_cast<int>(num_columns)), value), static_cast<int>(num_columns));
  }
}

// Asks for the memory that a pass will write to while it multiplies. Rows of many logits lie far apart, and a store to
// each of them would wait for a line of its own.
inline void fetch_out(const LinearArguments& a, int64_t first_row, int num_rows, int64_t first_column, int64_t num_columns) {
  const int64_t size = a.out_type == Type::f32 ? sizeof(float) : sizeof(bf16);
  const char* start = static_cast<const char*>(a.out) + (first_row * a.out_stride + first_column) * size;
  for (int row = 0; row < num_rows; row++, start += a.out_stride * size) {
    for (int64_t at = 0; at < num_columns * size; at += kLineBytes) __builtin_prefetch(start + at, 1);
  }
}

// Writes what sums [num_rows][32] of a tile make of `out`.
inline void finish(const LinearArguments& a, const float* sums, int64_t first_row, int num_rows, int64_t tile) {
  const int64_t width = a.finish == Finish::gate ? kGatedColumns : kTileColumns;
  const int64_t first_column = tile * width;
  const int64_t num_columns = std::min(width, a.out_features - first_column);
  for (int row = 0; row < num_rows; row++) {
    const int64_t start = (first_row + row) * a.out_stride + first_column;
    for (int64_t column = 0; column < num_columns; column += kLanes) {
      const float* from = sums + row * kTileColumns + column;
      const Lanes value = finished(a, from, tile * kTileColumns + column);
      if (a.finish == Finish::add) {
        put_added(static_cast<float*>(a.out) + start + column, value, num_columns - column);
      } else if (a.out_type == Type::f32) {
        put(static_cast<float*>(a.out) + start + column, value, num_columns - column);
      } else {
        put(static_cast<bf16*>(a.out) + start + column, value, num_columns - column);
      }
    }
  }
}

}  // namespace tandem::TANDEM_LEVEL
