// What torch knows of choose.cpp.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

#include "choose.h"
#include "choose_tensors.h"

namespace tandem {
namespace {

at::Tensor longs(at::IntArrayRef shape) { return at::empty(shape, at::TensorOptions().dtype(at::kLong)); }

ChooseArguments arguments(const at::Tensor& logits, const at::Tensor& temperatures, const at::Tensor& keys,
                          at::Tensor& token_ids) {
  const int64_t num_rows = logits.size(0);
  return {.logits = logits_of(logits),
          .temperatures = numbers_of<float>(temperatures, num_rows, "temperatures"),
          .keys = numbers_of<int64_t>(keys, 2 * num_rows, "keys"),
          .top_k = nullptr,
          .top_p = nullptr,
          .min_p = nullptr,
          .token_ids = token_ids.data_ptr<int64_t>()};
}

at::Tensor choose(int64_t level, const at::Tensor& logits, const at::Tensor& temperatures, const at::Tensor& keys) {
  at::Tensor token_ids = longs({logits.size(0)});
  TANDEM_CALL(level, choose, arguments(logits, temperatures, keys, token_ids));
  return token_ids;
}

at::Tensor choose_truncated(int64_t level, const at::Tensor& logits, const at::Tensor& temperatures,
                            const at::Tensor& keys, const at::Tensor& top_k, const at::Tensor& top_p,
                            const at::Tensor& min_p) {
  at::Tensor token_ids = longs({logits.size(0)});
  ChooseArguments a = arguments(logits, temperatures, keys, token_ids);
  a.top_k = numbers_of<int64_t>(top_k, a.logits.num_rows, "top_k");
  a.top_p = numbers_of<double>(top_p, a.logits.num_rows, "top_p");
  a.min_p = numbers_of<float>(min_p, a.logits.num_rows, "min_p");
  TANDEM_CALL(level, choose, a);
  return token_ids;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> logprobs(int64_t level, const at::Tensor& logits,
                                                        const at::Tensor& token_ids, int64_t num_top) {
  const Logits rows = logits_of(logits);
  TORCH_CHECK(0 <= num_top && num_top <= rows.vocab_size, num_top, " of ", rows.vocab_size, " ids");
  const int64_t* ids = numbers_of<int64_t>(token_ids, rows.num_rows, "token_ids");
  for (int64_t row = 0; row < rows.num_rows; row++) {
    TORCH_CHECK(0 <= ids[row] && ids[row] < rows.vocab_size, "token id ", ids[row], " is outside the vocabulary");
  }
  at::Tensor numbers = at::empty({rows.num_rows, 1 + num_top}, logits.options());
  at::Tensor ranks = longs({rows.num_rows}), top_ids = longs({rows.num_rows, num_top});
  const LogprobsArguments a{.logits = rows,
                            .token_ids = ids,
                            .num_top = num_top,
                            .numbers = numbers.data_ptr<float>(),
                            .ranks = ranks.data_ptr<int64_t>(),
                            .top_ids = top_ids.data_ptr<int64_t>()};
  TANDEM_CALL(level, logprobs, a);
  return {numbers, ranks, top_ids};
}

at::Tensor gumbels(int64_t level, const at::Tensor& bits) {
  const int64_t* from = numbers_of<int64_t>(bits, bits.numel(), "bits");
  const std::vector<uint32_t> words(from, from + bits.numel());
  at::Tensor noise = at::empty(bits.sizes(), bits.options().dtype(at::kFloat));
  const GumbelArguments a{words.data(), bits.numel(), noise.data_ptr<float>()};
  TANDEM_CALL(level, gumbels, a);
  return noise;
}

}  // namespace
}  // namespace tandem

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  const auto cpu = [](auto function) { return torch::dispatch(c10::DispatchKey::CPU, function); };
  m.def("choose(int level, Tensor logits, Tensor temperatures, Tensor keys) -> Tensor");
  m.impl("choose", cpu(TORCH_FN(tandem::choose)));
  m.def(
      "choose_truncated(int level, Tensor logits, Tensor temperatures, Tensor keys, Tensor top_k, Tensor top_p, "
      "Tensor min_p) -> Tensor");
  m.impl("choose_truncated", cpu(TORCH_FN(tandem::choose_truncated)));
  m.def("logprobs(int level, Tensor logits, Tensor token_ids, int num_top) -> (Tensor, Tensor, Tensor)");
  m.impl("logprobs", cpu(TORCH_FN(tandem::logprobs)));
  m.def("gumbels(int level, Tensor bits) -> Tensor");
  m.impl("gumbels", cpu(TORCH_FN(tandem::gumbels)));
}
