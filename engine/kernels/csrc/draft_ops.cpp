// What torch knows of int8_linear.cpp and best_two.cpp.
#include <torch/library.h>

#include "best_two.h"
#include "choose_tensors.h"
#include "int8_linear.h"
#include "tensors.h"

namespace tandem {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t kNumFinishes = 4;

// `finish` and `activation` by number, in the order of linear.h.
void int8_linear(int64_t level, const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                 int64_t finish, int64_t activation, double scale, double softcap, at::Tensor& out) {
  check_rows(x, "x");
  check_rows(out, "out");
  TORCH_CHECK(out.size(0) == x.size(0), "x has ", x.size(0), " rows, out has ", out.size(0));
  TORCH_CHECK(0 <= finish && finish < kNumFinishes, "no finish has the number ", finish);
  TORCH_CHECK(0 <= activation && activation < kNumActivations, "no activation has the number ", activation);
  TORCH_CHECK(0 < x.size(1) && x.size(1) <= kMaxInt8Depth, "x has ", x.size(1), " columns");
  const auto how = static_cast<Finish>(finish);
  const int64_t width = how == Finish::gate ? kGatedColumns : kTileColumns;
  TORCH_CHECK(weight.scalar_type() == at::kByte && weight.is_contiguous() && weight.dim() == 2 &&
                  weight.size(0) == ceil_div(out.size(1), width) && weight.size(1) == int8_tile_bytes(x.size(1)),
              "an int8 weight of ", weight.sizes(), " doesn't take x ", x.sizes(), " to out ", out.sizes());
  const Type out_type = type_of(out, "out");
  TORCH_CHECK(how != Finish::add || out_type == Type::f32, "out must be float32");
  if (bias) check_vector(*bias, weight.size(0) * kTileColumns, "bias");
  const LinearArguments a{.type = type_of(x, "x"),
                          .x = x.const_data_ptr(),
                          .x_stride = x.stride(0),
                          .num_rows = x.size(0),
                          .in_features = x.size(1),
                          .out_features = out.size(1),
                          .weight = weight.const_data_ptr(),
                          .bias = bias ? bias->const_data_ptr<float>() : nullptr,
                          .finish = how,
                          .activation = static_cast<Activation>(activation),
                          .scale = static_cast<float>(scale),
                          .softcap = static_cast<float>(softcap),
                          .out_type = out_type,
                          .out = out.data_ptr(),
                          .out_stride = out.stride(0)};
  TANDEM_CALL(level, int8_linear, a);
}

// numbers int64 [L, 3]
void best_two(int64_t level, const at::Tensor& logits, const std::optional<at::Tensor>& ids,
              const at::Tensor& temperatures, const at::Tensor& keys, at::Tensor& numbers) {
  const Logits rows = logits_of(logits);
  const BestTwoArguments a{
      .logits = rows,
      .ids = ids ? numbers_of<int32_t>(*ids, rows.vocab_size, "ids") : nullptr,
      .temperatures = numbers_of<float>(temperatures, rows.num_rows, "temperatures"),
      .keys = numbers_of<int64_t>(keys, 2 * rows.num_rows, "keys"),
      .numbers = const_cast<int64_t*>(numbers_of<int64_t>(numbers, kNumbersOfTwo * rows.num_rows, "numbers"))};
  TANDEM_CALL(level, best_two, a);
}

}  // namespace
}  // namespace tandem

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  const auto cpu = [](auto function) { return torch::dispatch(c10::DispatchKey::CPU, function); };
  m.def(
      "int8_linear(int level, Tensor x, Tensor weight, Tensor? bias, int finish, int activation, float scale, "
      "float softcap, Tensor(a!) out) -> ()");
  m.impl("int8_linear", cpu(TORCH_FN(tandem::int8_linear)));
  m.def(
      "best_two(int level, Tensor logits, Tensor? ids, Tensor temperatures, Tensor keys, Tensor(a!) numbers) -> ()");
  m.impl("best_two", cpu(TORCH_FN(tandem::best_two)));
}
