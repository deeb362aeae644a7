// What torch knows of screen.cpp.
#include <torch/library.h>

#include <algorithm>

#include "choose_tensors.h"
#include "screen.h"

namespace tandem {
namespace {

constexpr float kLeastScale = 0x1p-20f;  // what the proof of the bounds assumes

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

LinearArguments head_of(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                        double scale, double softcap, at::Tensor& logits) {
  check_rows(x, "x");
  const Type type = type_of(x, "x");
  const int64_t num_tiles = ceil_div(logits.size(1), kTileColumns);
  TORCH_CHECK(logits.size(0) == x.size(0), "x has ", x.size(0), " rows, logits have ", logits.size(0));
  TORCH_CHECK(weight.scalar_type() == x.scalar_type() && weight.is_contiguous() && weight.dim() >= 3 &&
                  weight.size(0) == num_tiles && weight.size(1) == ceil_div(x.size(1), type == Type::bf16 ? 2 : 1),
              "a packed weight of ", weight.sizes(), " doesn't take x ", x.sizes(), " to logits ", logits.sizes());
  if (bias) check_vector(*bias, num_tiles * kTileColumns, "bias");
  return {.type = type,
          .x = x.const_data_ptr(),
          .x_stride = x.stride(0),
          .num_rows = x.size(0),
          .in_features = x.size(1),
          .out_features = logits.size(1),
          .weight = weight.const_data_ptr(),
          .coded = {},
          .bias = bias ? bias->const_data_ptr<float>() : nullptr,
          .finish = Finish::write,
          .activation = Activation::silu,
          .scale = static_cast<float>(scale),
          .softcap = static_cast<float>(softcap),
          .out_type = Type::f32,
          .out = logits.data_ptr(),
          .out_stride = logits.stride(0)};
}

// token_ids [L] of x [L, K], as `choose` gives them from the head's logits; `logits` [L, N] is room to work in. The
// screen is used for up to `most_rows` rows.
void choose_head(int64_t level, const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                 double scale, double softcap, const std::optional<at::Tensor>& screen, int64_t most_rows,
                 const at::Tensor& temperatures, const at::Tensor& keys, at::Tensor& num_skipped, at::Tensor& logits,
                 at::Tensor& token_ids) {
  const Logits rows = logits_of(logits);
  ScreenArguments a{.head = head_of(x, weight, bias, scale, softcap, logits),
                    .choices = {.logits = rows,
                                .temperatures = numbers_of<float>(temperatures, rows.num_rows, "temperatures"),
                                .keys = numbers_of<int64_t>(keys, 2 * rows.num_rows, "keys"),
                                .top_k = nullptr,
                                .top_p = nullptr,
                                .min_p = nullptr,
                                .token_ids = const_cast<int64_t*>(numbers_of<int64_t>(token_ids, rows.num_rows, "token_ids"))},
                    .tiles = nullptr,
                    .num_skipped = const_cast<int64_t*>(numbers_of<int64_t>(num_skipped, 1, "num_skipped"))};
  const bool screened = screen && rows.num_rows <= most_rows && !bias && a.head.softcap <= 0 &&
                        a.head.scale >= kLeastScale && x.size(1) <= kMaxScreenDepth;
  if (!screened) {
    TANDEM_CALL(level, linear, a.head);
    TANDEM_CALL(level, choose, a.choices);
    return;
  }
  TORCH_CHECK(screen->scalar_type() == at::kByte && screen->is_contiguous() && screen->dim() == 2 &&
                  screen->size(0) == weight.size(0) && screen->size(1) == screen_tile_bytes(x.size(1)),
              "a screen of ", screen->sizes(), " isn't one of a head of ", weight.sizes());
  a.tiles = static_cast<const char*>(screen->const_data_ptr());
  TANDEM_CALL(level, choose_head, a);
}

}  // namespace
}  // namespace tandem

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def(
      "choose_head(int level, Tensor x, Tensor weight, Tensor? bias, float scale, float softcap, Tensor? screen, "
      "int most_rows, Tensor temperatures, Tensor keys, Tensor(a!) num_skipped, Tensor(b!) logits, "
      "Tensor(c!) token_ids) -> ()");
  m.impl("choose_head", torch::dispatch(c10::DispatchKey::CPU, TORCH_FN(tandem::choose_head)));
}
