// Steps of one token per row whose rows want nothing but the next: from a few numbers per row to tokens, in one call.
//
// Such a step's arrays are made here, into tensors that stay where they are, so that a run of a recorded program needs
// no tensor of its own: with caches that the weights have just swept, everything that Python would touch is fetched
// from memory again.
//
//     numbers   [ slot  position  token id  seed  output index ]   per row
//     tables    the block table of every slot
//          ↓
//     token_ids, positions, slots, context_lens, block_tables, temperatures, keys  →  program  →  chosen
#pragma once

#include <c10/core/InferenceMode.h>
#include <torch/custom_class.h>
#include <unistd.h>

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "program.h"
#include "tensors.h"

namespace tandem {

// engine/noise.py's mix64 and row_key
inline uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

inline uint64_t row_key(uint64_t seed, uint64_t output_index) {
  return mix64(mix64(seed) + (output_index + 1) * 0x9E3779B97F4A7C15u);
}

class DecodeSteps : public torch::CustomClassHolder {
 public:
  DecodeSteps(c10::intrusive_ptr<Program> program, int64_t block_size)
      : program_(std::move(program)), block_size_(block_size) {
    TORCH_CHECK(block_size > 0, "a block has at least one token");
  }

  // What a step of so many rows works in. `inputs` are the program's; of them the arrays above, in their order, are at
  // `places`, and `chosen`, int64 [rows] or some per row, comes last. Replaces what was bound for this number.
  void bind(int64_t num_rows, std::vector<at::Tensor> inputs, std::vector<int64_t> places) {
    TORCH_CHECK(num_rows > 0 && places.size() == kNumArrays, "arrays of at least one row");
    Bound bound{std::move(inputs), {}};
    for (const int64_t place : places) bound.arrays.push_back(bound.inputs.at(place));
    check(bound.arrays, num_rows);
    bound_[num_rows] = std::move(bound);
  }

  // The numbers that were chosen; -1 as `choose` says. `numbers` are kNumbers per row; `bell` is an eventfd that is
  // raised first, or -1: the interpreter's lock isn't held here.
  std::vector<int64_t> run(const std::vector<int64_t>& numbers, const std::vector<double>& temperatures,
                           const at::Tensor& tables, int64_t bell) {
    if (bell >= 0) ring(static_cast<int>(bell));
    const int64_t num_rows = static_cast<int64_t>(temperatures.size());
    const auto found = bound_.find(num_rows);
    TORCH_CHECK(found != bound_.end(), "nothing is bound for ", num_rows, " rows");
    TORCH_CHECK(static_cast<int64_t>(numbers.size()) == kNumbers * num_rows, kNumbers, " numbers per row");
    TORCH_CHECK(tables.scalar_type() == at::kInt && tables.is_contiguous() && tables.dim() == 2,
                "tables must be contiguous int32 [slots, blocks]");
    const Bound& bound = found->second;
    for (int64_t row = 0; row < num_rows; row++) {
      fill(bound.arrays, row, numbers.data() + kNumbers * row, static_cast<float>(temperatures[row]), tables);
    }
    const c10::InferenceMode guard;
    program_->run(bound.inputs);
    const at::Tensor& chosen = bound.arrays.back();
    const int64_t* begin = chosen.const_data_ptr<int64_t>();
    return {begin, begin + chosen.numel()};
  }

 private:
  static constexpr size_t kNumArrays = 8;
  static constexpr int64_t kNumbers = 5;

  struct Bound {
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> arrays;
  };

  // One that can't be raised, since its reader is far behind, has been raised already.
  static void ring(int bell) {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(bell, &one, sizeof one);
  }

  static void check(const std::vector<at::Tensor>& arrays, int64_t num_rows) {
    constexpr at::ScalarType types[kNumArrays] = {at::kInt, at::kInt,   at::kLong, at::kInt,
                                                  at::kInt, at::kFloat, at::kLong, at::kLong};
    for (size_t i = 0; i < kNumArrays; i++) {
      TORCH_CHECK(arrays[i].scalar_type() == types[i] && arrays[i].is_contiguous() && arrays[i].dim() >= 1 &&
                      arrays[i].size(0) == num_rows,
                  "array ", i, " has the wrong type or shape");
    }
    TORCH_CHECK(arrays[4].dim() == 2 && arrays[6].dim() == 2 && arrays[6].size(1) == 2, "block tables and keys");
  }

  void fill(const std::vector<at::Tensor>& arrays, int64_t row, const int64_t* numbers, float temperature,
            const at::Tensor& tables) const {
    const int64_t slot = numbers[0], position = numbers[1], num_blocks = position / block_size_ + 1;
    const int64_t width = arrays[4].size(1);
    TORCH_CHECK_INDEX(0 <= slot && slot < tables.size(0), "slot ", slot, " of ", tables.size(0));
    TORCH_CHECK_INDEX(0 <= position && num_blocks <= tables.size(1) && num_blocks <= width, "position ", position,
                      " lies beyond the block table");
    const int32_t* table = tables.const_data_ptr<int32_t>() + slot * tables.size(1);
    arrays[0].data_ptr<int32_t>()[row] = static_cast<int32_t>(numbers[2]);
    arrays[1].data_ptr<int32_t>()[row] = static_cast<int32_t>(position);
    arrays[2].data_ptr<int64_t>()[row] = table[num_blocks - 1] * block_size_ + position % block_size_;
    arrays[3].data_ptr<int32_t>()[row] = static_cast<int32_t>(position + 1);
    std::copy_n(table, num_blocks, arrays[4].data_ptr<int32_t>() + row * width);
    arrays[5].data_ptr<float>()[row] = temperature;
    const uint64_t key = row_key(static_cast<uint64_t>(numbers[3]), static_cast<uint64_t>(numbers[4]));
    int64_t* keys = arrays[6].data_ptr<int64_t>() + 2 * row;
    keys[0] = static_cast<int64_t>(key & 0xFFFFFFFFu), keys[1] = static_cast<int64_t>(key >> 32);
  }

  const c10::intrusive_ptr<Program> program_;
  const int64_t block_size_;
  std::unordered_map<int64_t, Bound> bound_;
};

}  // namespace tandem
