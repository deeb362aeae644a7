// A row's norm:
//
//     rms     x · 1 / √(mean(x²) + eps) · weight
//     layer   (x - m) · 1 / √(mean((x - m)²) + eps) · weight + bias,   m = mean(x)
//
// Exactness. A row is one thread's. Its sums have one fixed order, which depends on the width alone: kSums vectors take
// the row's vectors in turn, then are added pairwise, then lane by lane in a fixed tree (lanes.h).
#include "norm.h"

#include <algorithm>
#include <cmath>

#include "lanes.h"
#include "threads.h"

namespace tandem::TANDEM_LEVEL {
namespace {

constexpr int kSums = 4;  // enough to hide an addition's latency
constexpr int64_t kItemElements = 16384;  // about ten microseconds

inline Lanes load_up_to(const float* from, int64_t n) {
  return n >= kLanes ? load(from) : load_some(from, static_cast<int>(n));
}

// The sum of term(x) over a row. Lanes beyond its end count as term(0), so term is told how many lanes are real.
template <class Term>
inline float sum_over(const float* x, int64_t width, Term term) {
  Lanes sums[kSums] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + kSums * kLanes <= width; i += kSums * kLanes) {
    for (int s = 0; s < kSums; s++) sums[s] = add(sums[s], term(load(x + i + s * kLanes)));
  }
  for (int s = 0; i < width; i += kLanes, s++) {
    const int64_t left = width - i;
    const Lanes value = term(load_up_to(x + i, left));
    sums[s] = add(sums[s], left >= kLanes ? value : select(below(static_cast<int>(left)), value, zero()));
  }
  return sum_of(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

template <class Out>
void norm_row(const NormArguments& a, const float* x, Out* out) {
  const float width = static_cast<float>(a.width);
  const float mean = a.centred ? sum_over(x, a.width, [](Lanes v) { return v; }) / width : 0.0f;
  const Lanes centre = fill(mean);
  const float squares = sum_over(x, a.width, [&](Lanes v) {
    const Lanes centred = sub(v, centre);
    return mul(centred, centred);
  });
  const Lanes factor = fill(1.0f / std::sqrt(squares / width + a.eps));
  for (int64_t i = 0; i < a.width; i += kLanes) {
    const int64_t left = a.width - i;
    Lanes value = mul(mul(sub(load_up_to(x + i, left), centre), factor), load_up_to(a.weight + i, left));
    if (a.bias) value = add(value, load_up_to(a.bias + i, left));
    if constexpr (sizeof(Out) == sizeof(float)) {
      if (a.add) value = add(load_up_to(out + i, left), mul(fill(a.scale), value));
    }
    if (left >= kLanes) {
      store(out + i, value);
    } else {
      store_some(out + i, value, static_cast<int>(left));
    }
  }
}

template <class Out>
void norm_rows(const NormArguments& a) {
  const int64_t rows_per_item = std::max<int64_t>(1, kItemElements / a.width);
  const int64_t num_items = (a.num_rows + rows_per_item - 1) / rows_per_item;
  parallel_for(num_items, [&](int64_t item) {
    const int64_t end = std::min((item + 1) * rows_per_item, a.num_rows);
    for (int64_t row = item * rows_per_item; row < end; row++) {
      norm_row(a, a.x + row * a.x_stride, static_cast<Out*>(a.out) + row * a.out_stride);
    }
  });
}

}  // namespace

void norm(const NormArguments& arguments) {
  if (arguments.width == 0) return;
  arguments.out_type == Type::bf16 ? norm_rows<bf16>(arguments) : norm_rows<float>(arguments);
}

}  // namespace tandem::TANDEM_LEVEL
