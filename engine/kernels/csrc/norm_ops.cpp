// What torch knows of norm.cpp.
#include <torch/library.h>

#include "norm.h"
#include "tensors.h"

namespace tandem {
namespace {

NormArguments arguments(const at::Tensor& x, const at::Tensor& weight, double eps, const at::Tensor& out) {
  check_rows(x, "x");
  check_rows(out, "out");
  TORCH_CHECK(x.scalar_type() == at::kFloat, "x must be float32");
  TORCH_CHECK(x.sizes() == out.sizes(), "x is ", x.sizes(), ", out is ", out.sizes());
  check_vector(weight, x.size(1), "weight");
  return {.x = x.const_data_ptr<float>(),
          .x_stride = x.stride(0),
          .num_rows = x.size(0),
          .width = x.size(1),
          .weight = weight.const_data_ptr<float>(),
          .bias = nullptr,
          .centred = false,
          .add = false,
          .scale = 1.0f,
          .eps = static_cast<float>(eps),
          .out_type = type_of(out, "out"),
          .out = out.data_ptr(),
          .out_stride = out.stride(0)};
}

void rms_norm(int64_t level, const at::Tensor& x, const at::Tensor& weight, double eps, at::Tensor& out) {
  TANDEM_CALL(level, norm, arguments(x, weight, eps, out));
}

void rms_norm_add(int64_t level, const at::Tensor& x, const at::Tensor& weight, double eps, double scale,
                  at::Tensor& out) {
  NormArguments a = arguments(x, weight, eps, out);
  TORCH_CHECK(a.out_type == Type::f32, "out must be float32");
  a.add = true;
  a.scale = static_cast<float>(scale);
  TANDEM_CALL(level, norm, a);
}

void layer_norm(int64_t level, const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                double eps, at::Tensor& out) {
  NormArguments a = arguments(x, weight, eps, out);
  a.centred = true;
  if (bias) {
    check_vector(*bias, a.width, "bias");
    a.bias = bias->const_data_ptr<float>();
  }
  TANDEM_CALL(level, norm, a);
}

}  // namespace
}  // namespace tandem

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  const auto cpu = [](auto function) { return torch::dispatch(c10::DispatchKey::CPU, function); };
  m.def("rms_norm(int level, Tensor x, Tensor weight, float eps, Tensor(a!) out) -> ()");
  m.impl("rms_norm", cpu(TORCH_FN(tandem::rms_norm)));
  m.def("rms_norm_add(int level, Tensor x, Tensor weight, float eps, float scale, Tensor(a!) out) -> ()");
  m.impl("rms_norm_add", cpu(TORCH_FN(tandem::rms_norm_add)));
  m.def("layer_norm(int level, Tensor x, Tensor weight, Tensor? bias, float eps, Tensor(a!) out) -> ()");
  m.impl("layer_norm", cpu(TORCH_FN(tandem::layer_norm)));
}
