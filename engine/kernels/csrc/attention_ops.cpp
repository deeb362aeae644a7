// What torch knows of attention.cpp.
#include <torch/library.h>

#include "attention.h"
#include "attention_tensors.h"

namespace tandem {
namespace {

// A wrong number here would read foreign memory.
void check_rows(const AttendArguments& in, int64_t num_tokens) {
  TORCH_CHECK(in.query_starts[0] >= 0 && in.query_starts[in.num_rows] <= num_tokens, "query_starts must lie within ",
              num_tokens, " tokens");
  for (int64_t row = 0; row < in.num_rows; row++) {
    const int64_t first = in.query_starts[row], end = in.query_starts[row + 1];
    TORCH_CHECK(first <= end, "query_starts must not fall, row ", row);
    if (first == end) continue;
    const int64_t last = in.positions[end - 1];
    TORCH_CHECK(in.positions[first] >= 0 && last - in.positions[first] == end - 1 - first,
                "positions must rise by one within a row, row ", row);
    const int64_t blocks = last / in.cache.block_size + 1;
    TORCH_CHECK(blocks <= in.table_width, "the block table of row ", row, " is too short for position ", last);
    const int32_t* table = in.block_tables + row * in.table_width;
    bool is_inside = true;
    for (int64_t i = 0; i < blocks; i++) is_inside &= table[i] >= 0 && table[i] < in.cache.num_blocks;
    TORCH_CHECK(is_inside, "the block table of row ", row, " names a block outside the cache's ",
                in.cache.num_blocks);
  }
}

void attend(int64_t level, const at::Tensor& queries, const at::Tensor& cache_keys, const at::Tensor& cache_values,
            const at::Tensor& positions, const at::Tensor& query_starts, const at::Tensor& block_tables, double scale,
            int64_t window, double softcap, const std::optional<at::Tensor>& sinks, at::Tensor& out) {
  check_heads(queries, "queries");
  const int64_t num_tokens = queries.size(0), num_heads = queries.size(1), head_dim = queries.size(2);
  TORCH_CHECK(queries.scalar_type() == cache_keys.scalar_type() && out.scalar_type() == cache_keys.scalar_type(),
              "queries and out must be of the cache's type, ", cache_keys.scalar_type());
  TORCH_CHECK(out.is_contiguous() && out.numel() == queries.numel(), "out must be [", num_tokens, ", ",
              num_heads * head_dim, "], contiguous");
  TORCH_CHECK(query_starts.numel() >= 1, "query_starts is empty");
  TORCH_CHECK(block_tables.dim() == 2 && block_tables.is_contiguous() && block_tables.scalar_type() == at::kInt &&
                  block_tables.size(0) >= query_starts.numel() - 1,
              "block_tables must be int32 [rows, blocks]");
  TORCH_CHECK(window >= 0 && softcap >= 0, "window and softcap must not be negative");
  if (sinks) check_vector(*sinks, num_heads, "sinks");
  const AttendArguments in{.type = type_of(queries, "queries"),
                           .cache = cache_of(cache_keys, cache_values, head_dim),
                           .queries = queries.const_data_ptr(),
                           .query_token_stride = queries.stride(0),
                           .query_head_stride = queries.stride(1),
                           .out = out.data_ptr(),
                           .num_heads = num_heads,
                           .num_rows = query_starts.numel() - 1,
                           .query_starts = indices<int32_t>(query_starts, 1, "query_starts"),
                           .positions = indices<int32_t>(positions, num_tokens, "positions"),
                           .block_tables = block_tables.const_data_ptr<int32_t>(),
                           .table_width = block_tables.size(1),
                           .scale = static_cast<float>(scale),
                           .window = window,
                           .softcap = static_cast<float>(softcap),
                           .sinks = sinks ? sinks->const_data_ptr<float>() : nullptr};
  TORCH_CHECK(num_heads % in.cache.kv_heads == 0, num_heads, " query heads aren't a multiple of ", in.cache.kv_heads);
  check_rows(in, num_tokens);
  TANDEM_CALL(level, attend, in);
}

}  // namespace
}  // namespace tandem

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def(
      "attend(int level, Tensor queries, Tensor cache_keys, Tensor cache_values, Tensor positions, "
      "Tensor query_starts, Tensor block_tables, float scale, int window, float softcap, Tensor? sinks, "
      "Tensor(a!) out) -> ()");
  m.impl("attend", torch::dispatch(c10::DispatchKey::CPU, TORCH_FN(tandem::attend)));
}
