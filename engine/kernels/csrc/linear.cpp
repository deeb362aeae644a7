// How a product is computed: linear.h says what and in which layout.
//
// Exactness. Every element of x Wᵀ is one float32 accumulator that takes the products of k = 0, 1, 2 … in this order
// (bfloat16: pair by pair). Which rows share a pass, a block or a thread therefore can't be seen in the bits.
//
// A pass multiplies up to kPassRows rows with one tile, its sums in registers:
//
//         tile, K deep      columns 0 … 15   16 … 31
//         x, row 0   ──▶     [ sum ]         [ sum ]         each step along k: a vector of weights is loaded once
//         x, row 1   ──▶     [ sum ]         [ sum ]         and multiplied with one broadcast value (or pair) of
//            …                                               every row
//
// With few rows the time is that of reading the weights. The hardware sees that one stream, which goes on from item to
// item of a thread (threads.h), and runs ahead of it; asking for each line by instructions as well takes the places of
// those it has under way, and was a quarter slower. With many
// rows the time is that of multiplying, and a tile stays in the second-level cache while the passes of a block of rows
// go over it:
//
//         item = (block of rows) × (a few tiles)             blocks small enough that x stays in that cache as well
#include "linear.h"

#include <algorithm>

#include "linear_coded.h"
#include "linear_finish.h"
#include "threads.h"

namespace tandem::TANDEM_LEVEL {
namespace {

constexpr int64_t kCacheBytes = 1 << 20;  // a core's own cache
constexpr int64_t kItemBytes = 32 << 10;  // weights that make an item long enough to be worth claiming

// How the rows and tiles of a product are cut into items.
struct Cut {
  int64_t rows_per_block;
  int64_t num_blocks;
  int64_t tiles_per_group;
  int64_t num_groups;
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

Cut cut(int64_t num_rows, int64_t num_tiles, int64_t row_bytes, int num_workers) {
  // Half of the cache for a block of x, the rest for weights and results.
  const int64_t most_rows = std::max<int64_t>(kPassRows, kCacheBytes / 2 / std::max<int64_t>(row_bytes, 1));
  int64_t num_blocks = ceil_div(num_rows, most_rows);
  // Enough items that the threads end together; below two passes a block only reads its weights more often.
  const int64_t wanted_items = num_workers > 1 ? 4 * num_workers : 1;
  const int64_t most_blocks = std::max<int64_t>(num_blocks, num_rows / (2 * kPassRows));
  num_blocks = std::clamp(ceil_div(wanted_items, num_tiles), num_blocks, most_blocks);
  const int64_t rows_per_block = ceil_div(ceil_div(num_rows, num_blocks), kPassRows) * kPassRows;
  // An item's cost in bytes of weights read: each pass reads them again, from a cache.
  const int64_t tile_cost = kTileColumns * row_bytes * ceil_div(std::min(rows_per_block, num_rows), kPassRows);
  const int64_t tiles_per_group = std::clamp<int64_t>(kItemBytes / std::max<int64_t>(tile_cost, 1), 1, num_tiles);
  return {rows_per_block, ceil_div(num_rows, rows_per_block), tiles_per_group, ceil_div(num_tiles, tiles_per_group)};
}

// Tiles as passes multiply with them, plain and coded.
template <class T>
struct PlainTiles {
  using Element = T;
  const LinearArguments& a;

  void multiply(int64_t tile, int num_rows, const T* x, float* sums) const {
    const int64_t tile_elements = ceil_div(a.in_features, kDepthPerStep<T>) * kStepElements<T>;
    const T* weights = static_cast<const T*>(a.weight) + tile * tile_elements;
    kMultiply<T>[num_rows - 1](x, a.x_stride, weights, a.in_features, sums);
  }
};

struct CodedTiles {
  using Element = bf16;
  const LinearArguments& a;

  void multiply(int64_t tile, int num_rows, const bf16* x, float* sums) const {
    kMultiplyCoded[num_rows - 1](x, a.x_stride, CodedTile(a.coded, tile), a.in_features, sums);
  }
};

template <class Tiles>
void run(const LinearArguments& a) {
  using T = typename Tiles::Element;
  const Tiles tiles{a};
  const int64_t width = a.finish == Finish::gate ? kGatedColumns : kTileColumns;
  const int64_t num_tiles = ceil_div(a.out_features, width);
  const Cut c = cut(a.num_rows, num_tiles, a.in_features * sizeof(T), num_threads());
  const T* x = static_cast<const T*>(a.x);

  parallel_for(c.num_blocks * c.num_groups, [&](int64_t item) {
    const int64_t first_row = item / c.num_groups * c.rows_per_block;
    const int64_t end_row = std::min(first_row + c.rows_per_block, a.num_rows);
    const int64_t first_tile = item % c.num_groups * c.tiles_per_group;
    const int64_t end_tile = std::min(first_tile + c.tiles_per_group, num_tiles);
    alignas(64) float sums[kPassRows * kTileColumns];
    for (int64_t tile = first_tile; tile < end_tile; tile++) {
      for (int64_t row = first_row; row < end_row;) {
        // Passes of even size: nine rows are 5 + 4, not 8 + 1.
        const int64_t num_passes = ceil_div(end_row - row, kPassRows);
        const int num_rows = static_cast<int>(ceil_div(end_row - row, num_passes));
        fetch_out(a, row, num_rows, tile * width, std::min(width, a.out_features - tile * width));
        tiles.multiply(tile, num_rows, x + row * a.x_stride, sums);
        finish(a, sums, row, num_rows, tile);
        row += num_rows;
      }
    }
  });
}

template <class T>
float as_float(T value) {
  if constexpr (sizeof(T) == 2) {
    return widen(value);
  } else {
    return value;
  }
}

// The element [token, k] of a table, where `place` is the token's first one and steps lie `step` elements apart.
template <class T>
void embed_rows(const EmbedArguments& a) {
  const int64_t depth = a.packed ? kDepthPerStep<T> : a.width;
  const int64_t step = a.packed ? kStepElements<T> : a.width;
  const int64_t tile_elements = ceil_div(a.width, kDepthPerStep<T>) * kStepElements<T>;
  constexpr int64_t kTokensPerItem = 4;

  parallel_for(ceil_div(a.num_tokens, kTokensPerItem), [&](int64_t item) {
    const int64_t end = std::min((item + 1) * kTokensPerItem, a.num_tokens);
    for (int64_t t = item * kTokensPerItem; t < end; t++) {
      const int64_t id = a.token_ids[t];
      const int64_t place =
          a.packed ? id / kTileColumns * tile_elements + id % kTileColumns * depth : id * a.width;
      const T* from = static_cast<const T*>(a.table) + place;
      float* to = a.hidden + t * a.width;
      for (int64_t k = 0; k < a.width; k += depth, from += step) {
        const int64_t here = std::min(depth, a.width - k);
        for (int64_t i = 0; i < here; i++) to[k + i] = a.scale * as_float(from[i]);
      }
    }
  });
}

}  // namespace

void linear(const LinearArguments& arguments) {
  if (arguments.num_rows == 0 || arguments.out_features == 0) return;
  if (arguments.coded.tiles) {
    run<CodedTiles>(arguments);
  } else {
    arguments.type == Type::bf16 ? run<PlainTiles<bf16>>(arguments) : run<PlainTiles<float>>(arguments);
  }
}

void embed(const EmbedArguments& arguments) {
  arguments.type == Type::bf16 ? embed_rows<bf16>(arguments) : embed_rows<float>(arguments);
}

}  // namespace tandem::TANDEM_LEVEL
