// What torch knows of linear.cpp: packing, products, embedding.
#include <ATen/ops/empty.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "linear.h"
#include "tensors.h"
#include "threads.h"

namespace tandem {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t pair_length(Type type) { return type == Type::bf16 ? 2 : 1; }

// Memory for num_tiles tiles: on huge pages where the system has them, as a product reads all of it in one stream.
at::Tensor empty_tiles(const at::Tensor& like, int64_t num_tiles) {
  const int64_t pair = pair_length(type_of(like, "weight"));
  const int64_t num_steps = ceil_div(like.size(1), pair);
  at::Tensor out = pair == 2 ? at::empty({num_tiles, num_steps, kTileColumns, pair}, like.options())
                             : at::empty({num_tiles, num_steps, kTileColumns}, like.options());
  constexpr uintptr_t kHugePage = 2 << 20;
  const auto start = reinterpret_cast<uintptr_t>(out.data_ptr());
  const uintptr_t first = (start + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (start + out.nbytes()) / kHugePage * kHugePage;
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);  // a hint: failing is fine
  return out;
}

// Columns first … first + count of a tile, from as many rows of `weight` [N, K]; the rest of those columns becomes 0.
void pack_columns(const at::Tensor& weight, int64_t first_row, int64_t count, char* tile, int64_t first) {
  const int64_t size = weight.element_size();
  const int64_t pair = size == 2 ? 2 : 1;
  const int64_t depth = weight.size(1);
  const int64_t num_steps = ceil_div(depth, pair);
  constexpr int64_t kWord = 4;  // a pair, or a float32
  const int64_t num_rows = std::clamp<int64_t>(weight.size(0) - first_row, 0, count);
  for (int64_t column = 0; column < count; column++) {
    char* to = tile + (first + column) * kWord;
    const char* from = static_cast<const char*>(weight.data_ptr()) + (first_row + column) * depth * size;
    for (int64_t step = 0; step < num_steps; step++, to += kTileColumns * kWord) {
      uint32_t word = 0;
      if (column < num_rows) std::memcpy(&word, from + step * kWord, std::min(kWord, depth * size - step * kWord));
      std::memcpy(to, &word, kWord);
    }
  }
}

at::Tensor pack(const at::Tensor& weight) {
  check_matrix(weight, "weight");
  const at::Tensor rows = weight.contiguous();
  const int64_t num_tiles = ceil_div(rows.size(0), kTileColumns);
  at::Tensor out = empty_tiles(rows, num_tiles);
  const int64_t tile_bytes = num_tiles ? out.nbytes() / num_tiles : 0;
  parallel_for(num_tiles, [&](int64_t tile) {
    pack_columns(rows, tile * kTileColumns, kTileColumns, static_cast<char*>(out.data_ptr()) + tile * tile_bytes, 0);
  });
  return out;
}

at::Tensor pack_gated(const at::Tensor& gate, const at::Tensor& up) {
  check_matrix(gate, "gate");
  TORCH_CHECK(gate.sizes() == up.sizes() && gate.scalar_type() == up.scalar_type(),
              "gate and up differ in shape or type");
  const at::Tensor gates = gate.contiguous();
  const at::Tensor ups = up.contiguous();
  const int64_t num_tiles = ceil_div(gates.size(0), kGatedColumns);
  at::Tensor out = empty_tiles(gates, num_tiles);
  const int64_t tile_bytes = num_tiles ? out.nbytes() / num_tiles : 0;
  parallel_for(num_tiles, [&](int64_t index) {
    char* tile = static_cast<char*>(out.data_ptr()) + index * tile_bytes;
    pack_columns(gates, index * kGatedColumns, kGatedColumns, tile, 0);
    pack_columns(ups, index * kGatedColumns, kGatedColumns, tile, kGatedColumns);
  });
  return out;
}

// What a coded weight of so many tiles consists of; null tiles if it isn't one.
CodedWeight coded_of(const at::Tensor& weight, int64_t num_tiles, int64_t depth) {
  if (weight.scalar_type() != at::kByte) return {};
  const int64_t tile_bytes = coded_tile_bytes(depth), rest = weight.numel() - num_tiles * tile_bytes;
  constexpr int64_t kException = sizeof(CodedException);
  TORCH_CHECK(weight.is_contiguous() && weight.dim() == 1 && rest >= 0 && rest % kException == 0, "a coded weight of ",
              weight.sizes(), " doesn't take x of ", depth, " columns to ", num_tiles, " tiles");
  const auto* tiles = weight.const_data_ptr<uint8_t>();
  return {tiles, tile_bytes, reinterpret_cast<const CodedException*>(tiles + num_tiles * tile_bytes), rest / kException};
}

// The arguments that all products share. `out`'s columns say how many there are.
LinearArguments arguments(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                          const at::Tensor& out, Finish finish) {
  check_rows(x, "x");
  check_rows(out, "out");
  TORCH_CHECK(out.size(0) == x.size(0), "x has ", x.size(0), " rows, out has ", out.size(0));
  const Type type = type_of(x, "x");
  const int64_t width = finish == Finish::gate ? kGatedColumns : kTileColumns;
  const int64_t num_tiles = ceil_div(out.size(1), width);
  const CodedWeight coded = type == Type::bf16 ? coded_of(weight, num_tiles, x.size(1)) : CodedWeight{};
  if (!coded.tiles) {
    TORCH_CHECK(weight.scalar_type() == x.scalar_type() && weight.is_contiguous() && weight.dim() >= 3,
                "weight isn't a packed one of x's type");
    const int64_t num_steps = ceil_div(x.size(1), pair_length(type));
    TORCH_CHECK(weight.size(0) == num_tiles && weight.size(1) == num_steps,
                "a packed weight of ", weight.sizes(), " doesn't take x ", x.sizes(), " to out ", out.sizes());
  }
  const float* bias_data = nullptr;
  if (bias) {
    check_vector(*bias, num_tiles * kTileColumns, "bias");
    bias_data = bias->const_data_ptr<float>();
  }
  return {.type = type,
          .x = x.const_data_ptr(),
          .x_stride = x.stride(0),
          .num_rows = x.size(0),
          .in_features = x.size(1),
          .out_features = out.size(1),
          .weight = coded.tiles ? nullptr : weight.const_data_ptr(),
          .coded = coded,
          .bias = bias_data,
          .finish = finish,
          .activation = Activation::silu,
          .scale = 1.0f,
          .softcap = 0.0f,
          .out_type = type_of(out, "out"),
          .out = out.data_ptr(),
          .out_stride = out.stride(0)};
}

Activation activation_of(int64_t number) {
  TORCH_CHECK(number >= 0 && number < kNumActivations, "no activation has the number ", number);
  return static_cast<Activation>(number);
}

void linear_write(int64_t level, const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  double scale, double softcap, at::Tensor& out) {
  LinearArguments a = arguments(x, weight, bias, out, Finish::write);
  a.scale = static_cast<float>(scale);
  a.softcap = static_cast<float>(softcap);
  TANDEM_CALL(level, linear, a);
}

void linear_add(int64_t level, const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                double scale, at::Tensor& out) {
  LinearArguments a = arguments(x, weight, bias, out, Finish::add);
  TORCH_CHECK(a.out_type == Type::f32, "out must be float32");
  a.scale = static_cast<float>(scale);
  TANDEM_CALL(level, linear, a);
}

void linear_gated(int64_t level, const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  int64_t activation, at::Tensor& out) {
  LinearArguments a = arguments(x, weight, bias, out, Finish::gate);
  a.activation = activation_of(activation);
  TANDEM_CALL(level, linear, a);
}

void linear_activation(int64_t level, const at::Tensor& x, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, int64_t activation, at::Tensor& out) {
  LinearArguments a = arguments(x, weight, bias, out, Finish::activate);
  a.activation = activation_of(activation);
  TANDEM_CALL(level, linear, a);
}

void embed_tokens(int64_t level, const at::Tensor& token_ids, const at::Tensor& table, int64_t num_rows, double scale,
                  at::Tensor& hidden) {
  const bool packed = table.dim() > 2;
  check_rows(hidden, "hidden");
  TORCH_CHECK(hidden.scalar_type() == at::kFloat && hidden.is_contiguous(), "hidden must be contiguous and float32");
  TORCH_CHECK(token_ids.scalar_type() == at::kInt && token_ids.is_contiguous() && token_ids.dim() == 1,
              "token_ids must be a contiguous vector of int32");
  TORCH_CHECK(token_ids.size(0) == hidden.size(0), "as many token_ids as rows of hidden");
  const Type type = type_of(table, "table");
  const int64_t width = hidden.size(1);
  TORCH_CHECK(table.is_contiguous() && table.size(1) == (packed ? ceil_div(width, pair_length(type)) : width) &&
                  table.size(0) == (packed ? ceil_div(num_rows, kTileColumns) : num_rows),
              "a table of ", table.sizes(), " has no ", num_rows, " rows of ", width);
  const int32_t* ids = token_ids.const_data_ptr<int32_t>();
  for (int64_t t = 0; t < token_ids.size(0); t++) {
    TORCH_CHECK_INDEX(ids[t] >= 0 && ids[t] < num_rows, "token id ", ids[t], " is outside 0 … ", num_rows - 1);
  }
  const EmbedArguments a{.type = type,
                         .table = table.const_data_ptr(),
                         .packed = packed,
                         .token_ids = ids,
                         .num_tokens = token_ids.size(0),
                         .width = width,
                         .scale = static_cast<float>(scale),
                         .hidden = hidden.data_ptr<float>()};
  TANDEM_CALL(level, embed, a);
}

}  // namespace
}  // namespace tandem

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  const auto cpu = [](auto function) { return torch::dispatch(c10::DispatchKey::CPU, function); };
  m.def("pack(Tensor weight) -> Tensor");
  m.impl("pack", cpu(TORCH_FN(tandem::pack)));
  m.def("pack_gated(Tensor gate, Tensor up) -> Tensor");
  m.impl("pack_gated", cpu(TORCH_FN(tandem::pack_gated)));
  m.def(
      "linear(int level, Tensor x, Tensor weight, Tensor? bias, float scale, float softcap, Tensor(a!) out) -> ()");
  m.impl("linear", cpu(TORCH_FN(tandem::linear_write)));
  m.def("linear_add(int level, Tensor x, Tensor weight, Tensor? bias, float scale, Tensor(a!) out) -> ()");
  m.impl("linear_add", cpu(TORCH_FN(tandem::linear_add)));
  m.def("linear_gated(int level, Tensor x, Tensor weight, Tensor? bias, int activation, Tensor(a!) out) -> ()");
  m.impl("linear_gated", cpu(TORCH_FN(tandem::linear_gated)));
  m.def("linear_activation(int level, Tensor x, Tensor weight, Tensor? bias, int activation, Tensor(a!) out) -> ()");
  m.impl("linear_activation", cpu(TORCH_FN(tandem::linear_activation)));
  m.def("embed(int level, Tensor token_ids, Tensor table, int num_rows, float scale, Tensor(a!) hidden) -> ()");
  m.impl("embed", cpu(TORCH_FN(tandem::embed_tokens)));
}
