// Rows of logits, and numbers of theirs, as the bindings get them.
#pragma once

#include "choose.h"
#include "tensors.h"

namespace tandem {

constexpr int64_t kMaxVocab = 1 << 20;

inline Logits logits_of(const at::Tensor& logits) {
  check_rows(logits, "logits");
  TORCH_CHECK(logits.scalar_type() == at::kFloat, "logits must be float32");
  TORCH_CHECK(0 < logits.size(1) && logits.size(1) <= kMaxVocab, "a vocabulary of ", logits.size(1), " ids");
  return {logits.const_data_ptr<float>(), logits.stride(0), logits.size(0), logits.size(1)};
}

template <class T>
const T* numbers_of(const at::Tensor& tensor, int64_t count, const char* name) {
  TORCH_CHECK(tensor.scalar_type() == c10::CppTypeToScalarType<T>::value && tensor.is_contiguous() &&
                  tensor.numel() == count,
              name, " must be ", c10::CppTypeToScalarType<T>::value, ", ", count, " of them");
  return tensor.const_data_ptr<T>();
}

}  // namespace tandem
