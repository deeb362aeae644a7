// Coding packed weights: linear_coded.h draws the layout.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <vector>

#include "linear.h"
#include "tensors.h"
#include "threads.h"

namespace tandem {
namespace {

constexpr int64_t kStepElements = 2 * kTileColumns;
constexpr int64_t kPairElements = 2 * kStepElements;
constexpr int64_t kMostExceptions = 64;  // one in so many weights; with more, coding takes more than it gives

// Where in a step's 64 lower bytes an element lies: unpacking the low half of a lane of 16 bytes yields columns
// 4 · lane …, unpacking the high half those 16 further on.
int64_t byte_of(int64_t element) {
  const int64_t column = element / 2 % kTileColumns, in_half = column % 16;
  return in_half / 4 * 16 + column / 16 * 8 + in_half % 4 * 2 + element % 2;
}

std::array<uint8_t, 16> most_frequent(const uint16_t* elements, int64_t size) {
  std::array<int64_t, 256> counts{};
  for (int64_t i = 0; i < size; i++) counts[elements[i] >> 8]++;
  std::array<int, 256> values;
  std::iota(values.begin(), values.end(), 0);
  std::stable_sort(values.begin(), values.end(), [&](int a, int b) { return counts[a] > counts[b]; });
  std::array<uint8_t, 16> table;
  std::copy_n(values.begin(), table.size(), table.begin());
  return table;
}

// Codes one tile of `size` elements into zeroed bytes; its exceptions.
std::vector<CodedException> code_tile(const uint16_t* elements, int64_t size, uint8_t* to) {
  auto* head = reinterpret_cast<CodedHead*>(to);
  const auto table = most_frequent(elements, size);
  std::copy(table.begin(), table.end(), head->table);
  std::array<int, 256> codes;
  codes.fill(-1);
  for (int code = 15; code >= 0; code--) codes[table[code]] = code;
  std::vector<CodedException> exceptions;
  for (int64_t place = 0; place < size; place++) {
    const uint16_t bits = elements[place];
    uint8_t* pair = to + sizeof(CodedHead) + place / kPairElements * kCodedPairBytes;
    const int64_t step = place / kStepElements % 2, byte = byte_of(place % kStepElements);
    const int code = codes[bits >> 8];
    if (code < 0) exceptions.push_back({static_cast<uint32_t>(place), bits, 0});
    pair[step * kStepElements + byte] = static_cast<uint8_t>(bits);
    pair[2 * kStepElements + byte] |= static_cast<uint8_t>(std::max(code, 0) << (4 * step));
  }
  return exceptions;
}

// A packed bfloat16 weight, coded: uint8 [bytes]; nothing where too many weights are exceptions.
at::Tensor code(const at::Tensor& packed) {
  TORCH_CHECK(packed.scalar_type() == at::kBFloat16 && packed.is_contiguous() && packed.dim() == 4 &&
                  packed.size(2) == kTileColumns && packed.size(3) == 2,
              "a packed bfloat16 weight is expected, not ", packed.scalar_type(), " ", packed.sizes());
  const int64_t num_tiles = packed.size(0), size = packed.size(1) * kStepElements;
  const int64_t tile_bytes = coded_tile_bytes(2 * packed.size(1));
  std::vector<uint8_t> tiles(num_tiles * tile_bytes);
  std::vector<std::vector<CodedException>> exceptions(num_tiles);
  const auto* elements = static_cast<const uint16_t*>(packed.const_data_ptr());
  parallel_for(num_tiles, [&](int64_t tile) {
    exceptions[tile] = code_tile(elements + tile * size, size, tiles.data() + tile * tile_bytes);
  });
  int64_t num_exceptions = 0;
  for (int64_t tile = 0; tile < num_tiles; tile++) {
    auto* head = reinterpret_cast<CodedHead*>(tiles.data() + tile * tile_bytes);
    head->first_exception = static_cast<int32_t>(num_exceptions);
    head->num_exceptions = static_cast<int32_t>(exceptions[tile].size());
    num_exceptions += head->num_exceptions;
  }
  const bool worthwhile = num_exceptions <= num_tiles * size / kMostExceptions && num_exceptions <= INT32_MAX;
  if (!worthwhile) return at::empty({0}, packed.options().dtype(at::kByte));
  const auto num_bytes = static_cast<int64_t>(tiles.size() + num_exceptions * sizeof(CodedException));
  at::Tensor out = at::empty({num_bytes}, packed.options().dtype(at::kByte));
  auto* to = out.data_ptr<uint8_t>();
  std::copy(tiles.begin(), tiles.end(), to);
  to += tiles.size();
  for (const auto& some : exceptions) {
    if (!some.empty()) std::memcpy(to, some.data(), some.size() * sizeof(CodedException));
    to += some.size() * sizeof(CodedException);
  }
  return out;
}

}  // namespace
}  // namespace tandem

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def("code(Tensor packed) -> Tensor");
  m.impl("code", torch::dispatch(c10::DispatchKey::CPU, TORCH_FN(tandem::code)));
}
