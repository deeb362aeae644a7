// Heads of queries and keys are normalised and rotated; queries, keys and values are rounded once and put in place.
//
//     a token's row   [ q0 … qH-1 | k0 … kG-1 | v0 … vG-1 ]  float32, one head after another
//
//     norm       x · w / √(mean x² + eps), over a head (RMS)
//     rotation   a pair (a, b) of a head's first rotary_dim elements at angle θ(position, pair):
//                    a' = a cos θ − b sin θ,   b' = b cos θ + a sin θ
//                halves: pairs are (i, i + rotary_dim / 2); interleaved: (2i, 2i + 1)
//
// A head's arithmetic is a fixed sequence, so a token's result doesn't depend on its neighbours. Tokens are shared out
// in runs; two tokens may lie in one word of the cache's values, but each writes its own half only.
#include "rotary.h"

#include <algorithm>
#include <cmath>

#include "attention_blocks.h"
#include "lanes.h"
#include "threads.h"

namespace tandem::TANDEM_LEVEL {
namespace {

constexpr int64_t kElementsPerItem = 1024;  // some microseconds

int64_t tokens_per_item(int64_t elements_per_token) {
  return std::max<int64_t>(1, kElementsPerItem / elements_per_token);
}

// Of the `left` elements from here on, as many as there are lanes.
template <class T>
Lanes load_next(const T* from, int64_t left) {
  return left >= kLanes ? load(from) : load_some(from, static_cast<int>(left));
}
template <class T>
void store_next(T* to, Lanes value, int64_t left) {
  left >= kLanes ? store(to, value) : store_some(to, value, static_cast<int>(left));
}

template <class Body>
void for_runs_of_tokens(int64_t num_tokens, int64_t elements_per_token, Body&& body) {
  const int64_t size = tokens_per_item(elements_per_token);
  parallel_for((num_tokens + size - 1) / size, [&](int64_t item) {
    for (int64_t token = item * size; token < std::min(num_tokens, (item + 1) * size); token++) body(token);
  });
}

void normalise(float* x, int64_t size, const float* weight, float eps) {
  Lanes squares = zero();
  for (int64_t i = 0; i < size; i += kLanes) {
    const Lanes part = load_next(x + i, size - i);
    squares = fma(part, part, squares);
  }
  const float inverse = 1.0f / std::sqrt(sum_of(squares) / static_cast<float>(size) + eps);
  for (int64_t i = 0; i < size; i++) x[i] = x[i] * inverse * weight[i];
}

// Pairs (from[i], from[i + half]) of whole vectors; `to` may be `from`.
void rotate_halves(float* to, const float* from, const float* cosines, const float* sines, int64_t half) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const Lanes a = load(from + i), b = load(from + half + i), cosine = load(cosines + i), sine = load(sines + i);
    store(to + i, sub(mul(a, cosine), mul(b, sine)));
    store(to + half + i, add(mul(b, cosine), mul(a, sine)));
  }
}

// Pairs (first[i · step], second[i · step]) in place.
void rotate_pairs(float* first, float* second, int64_t step, const float* cosines, const float* sines, int64_t num) {
  for (int64_t i = 0; i < num; i++) {
    const float a = first[i * step], b = second[i * step];
    first[i * step] = a * cosines[i] - b * sines[i];
    second[i * step] = b * cosines[i] + a * sines[i];
  }
}

template <bool kFinite, class T>
void round_to(T* to, const float* from, int64_t size) {
  for (int64_t i = 0; i < size; i += kLanes) {
    Lanes part = load_next(from + i, size - i);
    if (kFinite) {
      // A float32 that is finite may round to an infinite bfloat16, so the rounded value is what is judged.
      T rounded[kLanes];
      store(rounded, part);
      part = finite_or_zero(load(rounded));
    }
    store_next(to + i, part, size - i);
  }
}

template <class T>
struct Buffers {
  alignas(64) float head[kMaxHeadDim];
  alignas(64) T key[kMaxHeadDim];
  alignas(64) T value[kMaxHeadDim];
};

template <class T>
class Rotation {
 public:
  explicit Rotation(const RotateArguments& arguments) : in_(arguments), cache_(arguments.cache) {}

  void of_token(int64_t token) const {
    Buffers<T> buffers;
    const float* row = in_.qkv + token * in_.row_stride;
    T* query = static_cast<T*>(in_.queries) + token * in_.num_heads * in_.cache.head_dim;
    for (int64_t head = 0; head < in_.num_heads; head++, row += in_.cache.head_dim, query += in_.cache.head_dim) {
      turn(buffers.head, row, in_.query_norm, token);
      round_to<false>(query, buffers.head, in_.cache.head_dim);
    }
    const float* value = row + in_.cache.kv_heads * in_.cache.head_dim;
    for (int64_t head = 0; head < in_.cache.kv_heads; head++, row += in_.cache.head_dim, value += in_.cache.head_dim) {
      turn(buffers.head, row, in_.key_norm, token);
      round_to<true>(buffers.key, buffers.head, in_.cache.head_dim);
      round_to<true>(buffers.value, value, in_.cache.head_dim);
      cache_.write(in_.slots[token], head, buffers.key, buffers.value);
    }
  }

 private:
  // head [head_dim] = a head as it comes, normalised and rotated.
  void turn(float* head, const float* from, const float* norm, int64_t token) const {
    const int64_t size = in_.cache.head_dim, half = in_.rotary_dim / 2;
    const float* cosines = in_.table ? in_.table + in_.positions[token] * in_.rotary_dim : nullptr;
    const bool whole_vectors = cosines && !in_.interleaved && half % kLanes == 0;
    if (norm) {
      std::copy_n(from, size, head);
      normalise(head, size, norm, in_.eps);
      from = head;
    }
    if (whole_vectors) {
      rotate_halves(head, from, cosines, cosines + half, half);
      if (from != head) std::copy(from + 2 * half, from + size, head + 2 * half);
      return;
    }
    if (from != head) std::copy_n(from, size, head);
    if (!cosines) return;
    const int64_t step = in_.interleaved ? 2 : 1;
    rotate_pairs(head, head + (in_.interleaved ? 1 : half), step, cosines, cosines + half, half);
  }

  const RotateArguments& in_;
  const CacheOf<T> cache_;
};

template <class T>
void rotate_write_of(const RotateArguments& in) {
  const Rotation<T> rotation(in);
  for_runs_of_tokens(in.num_tokens, (in.num_heads + 2 * in.cache.kv_heads) * in.cache.head_dim,
                     [&](int64_t token) { rotation.of_token(token); });
}

template <class T>
void copy_finite(T* to, const T* from, int64_t size) {
  for (int64_t i = 0; i < size; i += kLanes) {
    store_next(to + i, finite_or_zero(load_next(from + i, size - i)), size - i);
  }
}

template <class T>
void write_cache_of(const WriteArguments& in) {
  const CacheOf<T> cache(in.cache);
  for_runs_of_tokens(in.num_tokens, 2 * in.cache.kv_heads * in.cache.head_dim, [&](int64_t token) {
    Buffers<T> buffers;
    const T* key = static_cast<const T*>(in.keys) + token * in.key_token_stride;
    const T* value = static_cast<const T*>(in.values) + token * in.value_token_stride;
    for (int64_t head = 0; head < in.cache.kv_heads; head++) {
      copy_finite(buffers.key, key + head * in.key_head_stride, in.cache.head_dim);
      copy_finite(buffers.value, value + head * in.value_head_stride, in.cache.head_dim);
      cache.write(in.slots[token], head, buffers.key, buffers.value);
    }
  });
}

}  // namespace

void rotate_write(const RotateArguments& in) {
  in.type == Type::bf16 ? rotate_write_of<bf16>(in) : rotate_write_of<float>(in);
}

void write_cache(const WriteArguments& in) {
  in.type == Type::bf16 ? write_cache_of<bf16>(in) : write_cache_of<float>(in);
}

}  // namespace tandem::TANDEM_LEVEL
