// Makes a screen of the output head: screen.h draws it, screen.cpp says why it may be trusted.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "screen.h"
#include "tensors.h"
#include "threads.h"

namespace tandem {
namespace {

// A float32 that is at least `value`, of which the rounding of a sum of doubles may have taken something.
float at_least(double value) { return static_cast<float>(value * (1 + 1e-6)) + 1e-44f; }

// A column of the head, w [K], becomes column `column` of a tile. False if it holds something that isn't finite, or
// is so small that its scale wouldn't be a normal number.
bool screen_column(const std::vector<float>& w, char* tile, int64_t column) {
  float peak = 0;
  for (const float value : w) {
    if (!std::isfinite(value)) return false;
    peak = std::max(peak, std::abs(value));
  }
  const float scale = peak / kMostWeight;
  if (peak > 0 && !std::isnormal(scale)) return false;
  const int64_t depth = static_cast<int64_t>(w.size());
  double squares = 0, errors = 0;
  for (int64_t k = 0; k < depth; k++) {
    const double exact = w[k];
    const double q = peak > 0 ? std::clamp(std::nearbyint(exact / scale), -1.0 * kMostWeight, 1.0 * kMostWeight) : 0;
    const double error = exact - q * scale;
    squares += exact * exact, errors += error * error;
    const auto stored = static_cast<uint8_t>(q + kWeightOffset);
    std::memcpy(tile + k / kQuad * kScreenStepBytes + kQuad * column + k % kQuad, &stored, 1);
  }
  const float facts[] = {scale, at_least(std::sqrt(errors)), at_least(std::sqrt(squares) + std::sqrt(errors))};
  char* to = tile + screen_tile_bytes(depth) - kScreenFactsBytes + column * sizeof(float);
  for (const float fact : facts) {
    std::memcpy(to, &fact, sizeof fact);
    to += kTileColumns * sizeof(float);
  }
  return true;
}

std::vector<float> column_of(const at::Tensor& rows, int64_t index) {
  const int64_t depth = rows.size(1);
  std::vector<float> column(depth);
  if (rows.scalar_type() == at::kFloat) {
    std::copy_n(rows.const_data_ptr<float>() + index * depth, depth, column.begin());
    return column;
  }
  const auto* from = static_cast<const uint16_t*>(rows.const_data_ptr()) + index * depth;
  for (int64_t k = 0; k < depth; k++) {
    const uint32_t bits = static_cast<uint32_t>(from[k]) << 16;
    std::memcpy(&column[k], &bits, sizeof bits);
  }
  return column;
}

// weight [N, K] → uint8 [ceil(N / 32), bytes of a tile]; [0, 0] for a head that can't be screened.
at::Tensor pack_screen(const at::Tensor& weight) {
  check_matrix(weight, "weight");
  type_of(weight, "weight");
  const at::Tensor rows = weight.contiguous();
  const int64_t num_columns = rows.size(0), depth = rows.size(1);
  const auto bytes = at::TensorOptions().dtype(at::kByte);
  if (num_columns == 0 || depth == 0 || depth > kMaxScreenDepth) return at::empty({0, 0}, bytes);
  const int64_t num_tiles = (num_columns + kTileColumns - 1) / kTileColumns, tile_bytes = screen_tile_bytes(depth);
  at::Tensor out = at::empty({num_tiles, tile_bytes}, bytes);
  std::atomic<bool> usable{true};
  parallel_for(num_tiles, [&](int64_t index) {
    char* tile = static_cast<char*>(out.data_ptr()) + index * tile_bytes;
    std::memset(tile, kWeightOffset, tile_bytes - kScreenFactsBytes);
    std::memset(tile + tile_bytes - kScreenFactsBytes, 0, kScreenFactsBytes);
    const int64_t first = index * kTileColumns, count = std::min<int64_t>(kTileColumns, num_columns - first);
    for (int64_t i = 0; i < count; i++) {
      if (!screen_column(column_of(rows, first + i), tile, i)) usable.store(false);
    }
  });
  return usable.load() ? out : at::empty({0, 0}, bytes);
}

}  // namespace
}  // namespace tandem

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def("pack_screen(Tensor weight) -> Tensor");
  m.impl("pack_screen", torch::dispatch(c10::DispatchKey::CPU, TORCH_FN(tandem::pack_screen)));
}
