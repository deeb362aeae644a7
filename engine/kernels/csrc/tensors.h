// Checks that the bindings make of their tensors; each raises with the tensor's name.
#pragma once

#include <ATen/core/Tensor.h>

#include "levels.h"

namespace tandem {

inline Type type_of(const at::Tensor& tensor, const char* name) {
  const at::ScalarType type = tensor.scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kBFloat16, name, " must be float32 or bfloat16, it is ", type);
  return type == at::kFloat ? Type::f32 : Type::bf16;
}

inline void check_matrix(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK(tensor.dim() == 2, name, " must have two dimensions, it has ", tensor.dim());
}

// A matrix whose rows are contiguous, wherever they lie.
inline void check_rows(const at::Tensor& tensor, const char* name) {
  check_matrix(tensor, name);
  TORCH_CHECK(tensor.stride(1) == 1 || tensor.size(1) == 1, name, "'s rows must be contiguous");
}

inline void check_vector(const at::Tensor& tensor, int64_t length, const char* name) {
  TORCH_CHECK(tensor.scalar_type() == at::kFloat && tensor.is_contiguous() && tensor.numel() == length, name,
              " must be float32 [", length, "]");
}

}  // namespace tandem
