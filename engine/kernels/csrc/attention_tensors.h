// A layer's memory as the bindings get it: the two tensors that cpp_attention.CppCache holds.
#pragma once

#include "attention_cache.h"
#include "tensors.h"

namespace tandem {

// keys [num_blocks, kv_heads, block_size / run, dim_words, run, per word]
// values [num_blocks, kv_heads, block_size / per word, head_dim, per word]
inline Cache cache_of(const at::Tensor& keys, const at::Tensor& values, int64_t head_dim) {
  const Type type = type_of(keys, "cache_keys");
  const int64_t per_word = type == Type::bf16 ? 2 : 1;
  TORCH_CHECK(keys.dim() == 6 && values.dim() == 5, "the cache's tensors must be those of a CppCache");
  TORCH_CHECK(keys.is_contiguous() && values.is_contiguous(), "the cache must be contiguous");
  TORCH_CHECK(values.scalar_type() == keys.scalar_type(), "keys and values must be of one type");
  const Cache cache{.keys = keys.data_ptr(),
                    .values = values.data_ptr(),
                    .kv_heads = keys.size(1),
                    .num_blocks = keys.size(0),
                    .block_size = keys.size(2) * keys.size(4),
                    .run = keys.size(4),
                    .dim_words = keys.size(3),
                    .head_dim = values.size(3)};
  TORCH_CHECK(keys.size(5) == per_word && values.size(4) == per_word && values.size(0) == cache.num_blocks &&
                  values.size(1) == cache.kv_heads && values.size(2) * per_word == cache.block_size,
              "keys ", keys.sizes(), " and values ", values.sizes(), " aren't of one cache");
  TORCH_CHECK(cache.dim_words * per_word == head_dim && cache.head_dim == head_dim && head_dim <= kMaxHeadDim,
              "heads of ", head_dim, " elements don't fit the cache's ", keys.sizes());
  return cache;
}

template <class Integer>
const Integer* indices(const at::Tensor& tensor, int64_t length, const char* name) {
  TORCH_CHECK(tensor.scalar_type() == c10::CppTypeToScalarType<Integer>::value && tensor.dim() == 1 &&
                  tensor.is_contiguous() && tensor.size(0) >= length,
              name, " must be ", c10::CppTypeToScalarType<Integer>::value, " [", length, "]");
  return tensor.const_data_ptr<Integer>();
}

inline void check_heads(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK(tensor.dim() == 3 && (tensor.stride(2) == 1 || tensor.size(2) == 1), name,
              " must be [tokens, heads, head_dim] with contiguous heads");
}

}  // namespace tandem
