// What torch knows of rotary.cpp.
#include <torch/library.h>

#include "attention_tensors.h"
#include "rotary.h"

namespace tandem {
namespace {

// Where tokens go; a wrong one would write to foreign memory.
const int64_t* checked_slots(const at::Tensor& slots, int64_t num_tokens, const Cache& cache) {
  const int64_t* first = indices<int64_t>(slots, num_tokens, "slots");
  const int64_t num_slots = cache.num_blocks * cache.block_size;
  for (int64_t i = 0; i < num_tokens; i++) {
    TORCH_CHECK(first[i] >= 0 && first[i] < num_slots, "slot ", first[i], " of token ", i, " isn't one of ", num_slots);
  }
  return first;
}

void set_rotation(RotateArguments& in, const at::Tensor& table, const at::Tensor& positions, bool interleaved) {
  TORCH_CHECK(table.dim() == 2 && table.is_contiguous() && table.scalar_type() == at::kFloat,
              "table must be float32 [positions, rotary_dim], contiguous");
  in.rotary_dim = table.size(1);
  TORCH_CHECK(in.rotary_dim % 2 == 0 && in.rotary_dim <= in.cache.head_dim, "rotary_dim ", in.rotary_dim,
              " must be even and within a head of ", in.cache.head_dim);
  in.table = table.const_data_ptr<float>();
  in.positions = indices<int32_t>(positions, in.num_tokens, "positions");
  in.interleaved = interleaved;
  for (int64_t i = 0; i < in.num_tokens; i++) {
    TORCH_CHECK(in.positions[i] >= 0 && in.positions[i] < table.size(0), "position ", in.positions[i], " of token ", i,
                " is beyond the table's ", table.size(0));
  }
}

void rotate_write(int64_t level, const at::Tensor& qkv, const std::optional<at::Tensor>& query_norm,
                  const std::optional<at::Tensor>& key_norm, double eps, const std::optional<at::Tensor>& table,
                  bool interleaved, const at::Tensor& positions, const at::Tensor& slots, at::Tensor& cache_keys,
                  at::Tensor& cache_values, at::Tensor& queries) {
  check_rows(qkv, "qkv");
  TORCH_CHECK(qkv.scalar_type() == at::kFloat, "qkv must be float32");
  TORCH_CHECK(queries.dim() == 3 && queries.is_contiguous() && queries.scalar_type() == cache_keys.scalar_type(),
              "queries must be [tokens, heads, head_dim] of the cache's type, contiguous");
  RotateArguments in{};
  in.type = type_of(queries, "queries");
  in.num_tokens = qkv.size(0);
  in.num_heads = queries.size(1);
  in.cache = cache_of(cache_keys, cache_values, queries.size(2));
  const int64_t width = (in.num_heads + 2 * in.cache.kv_heads) * in.cache.head_dim;
  TORCH_CHECK(queries.size(0) == in.num_tokens && qkv.size(1) == width, "qkv ", qkv.sizes(),
              " doesn't hold queries ", queries.sizes(), " and ", in.cache.kv_heads, " KV heads");
  in.qkv = qkv.const_data_ptr<float>();
  in.row_stride = qkv.stride(0);
  in.queries = queries.data_ptr();
  in.slots = checked_slots(slots, in.num_tokens, in.cache);
  TORCH_CHECK(query_norm.has_value() == key_norm.has_value(), "queries and keys are normalised together or not");
  if (query_norm) {
    check_vector(*query_norm, in.cache.head_dim, "query_norm");
    check_vector(*key_norm, in.cache.head_dim, "key_norm");
    in.query_norm = query_norm->const_data_ptr<float>();
    in.key_norm = key_norm->const_data_ptr<float>();
    in.eps = static_cast<float>(eps);
  }
  if (table) set_rotation(in, *table, positions, interleaved);
  TANDEM_CALL(level, rotate_write, in);
}

void write_cache(int64_t level, const at::Tensor& keys, const at::Tensor& values, const at::Tensor& slots,
                 at::Tensor& cache_keys, at::Tensor& cache_values) {
  check_heads(keys, "keys");
  check_heads(values, "values");
  TORCH_CHECK(keys.sizes() == values.sizes(), "keys are ", keys.sizes(), ", values are ", values.sizes());
  TORCH_CHECK(keys.scalar_type() == cache_keys.scalar_type() && values.scalar_type() == cache_keys.scalar_type(),
              "keys and values must be of the cache's type, ", cache_keys.scalar_type());
  const Cache cache = cache_of(cache_keys, cache_values, keys.size(2));
  TORCH_CHECK(keys.size(1) == cache.kv_heads, "the cache has ", cache.kv_heads, " KV heads, keys have ", keys.size(1));
  const WriteArguments in{.type = type_of(keys, "keys"),
                          .cache = cache,
                          .num_tokens = keys.size(0),
                          .keys = keys.const_data_ptr(),
                          .key_token_stride = keys.stride(0),
                          .key_head_stride = keys.stride(1),
                          .values = values.const_data_ptr(),
                          .value_token_stride = values.stride(0),
                          .value_head_stride = values.stride(1),
                          .slots = checked_slots(slots, keys.size(0), cache)};
  TANDEM_CALL(level, write_cache, in);
}

}  // namespace
}  // namespace tandem

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  const auto cpu = [](auto function) { return torch::dispatch(c10::DispatchKey::CPU, function); };
  m.def(
      "rotate_write(int level, Tensor qkv, Tensor? query_norm, Tensor? key_norm, float eps, Tensor? table, "
      "bool interleaved, Tensor positions, Tensor slots, Tensor(a!) cache_keys, Tensor(b!) cache_values, "
      "Tensor(c!) queries) -> ()");
  m.impl("rotate_write", cpu(TORCH_FN(tandem::rotate_write)));
  m.def(
      "write_cache(int level, Tensor keys, Tensor values, Tensor slots, Tensor(a!) cache_keys, "
      "Tensor(b!) cache_values) -> ()");
  m.impl("write_cache", cpu(TORCH_FN(tandem::write_cache)));
}
