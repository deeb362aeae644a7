// How the work of one call of attention is cut and shared out. Nothing here decides a bit of a result.
//
// Tokens that follow each other in one row of the batch, with all query heads of one KV head, share keys:
//
//     slab     up to 24 (token, query head) rows
//     unit     a slab × a KV head × all partitions of keys, merged as they come
//              or, where that would leave threads without work, × one partition, whose records are merged later
//     item     units that follow each other, together worth handing to a thread
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "attention.h"
#include "lanes.h"
#include "threads.h"

namespace tandem::TANDEM_LEVEL {

constexpr int64_t kPartition = 512;
constexpr int64_t kSlabRows = 24;
// In products of an element of a query and of a key.
constexpr int64_t kCostOfItem = 1 << 15;  // a few microseconds where keys come from memory
constexpr int64_t kCostOfPart = 1 << 18;  // worth a merge
constexpr int64_t kItemsPerThread = 8;

struct Slab {
  int64_t row;  // of the batch
  int64_t first_token;
  int64_t num_tokens;
  int64_t first_key;  // positions that any of its tokens sees
  int64_t end_key;
  bool is_split = false;
  int64_t records = 0;  // if split: the first of its records, [kv head][partition][row of the slab]

  int64_t first_partition() const { return first_key / kPartition; }
  int64_t end_partition() const { return (end_key + kPartition - 1) / kPartition; }
  int64_t num_partitions() const { return end_partition() - first_partition(); }
};

struct Unit {
  int64_t slab;
  int64_t head;
  int64_t first_partition;
  int64_t end_partition;
};

struct Item {
  int64_t first_unit;
  int64_t end_unit;
};

// Reused from call to call, so that a step allocates nothing.
struct Work {
  std::vector<Slab> slabs;
  std::vector<Unit> units;
  std::vector<Unit> merges;  // one per split slab and head
  std::vector<Item> items;
  std::unique_ptr<float[]> records;

  void plan(const AttendArguments& in, int64_t record_floats) {
    units.clear();
    merges.clear();
    items.clear();
    const int64_t threads = num_threads(), group = in.num_heads / in.cache.kv_heads;
    const int64_t total = cut_slabs(in, group) * in.cache.kv_heads;
    const int64_t item_cost = std::max(kCostOfItem, total / (threads * kItemsPerThread));
    // A unit that is a big part of the whole is cut, so that all threads have a part of it.
    const int64_t split_cost = std::max(kCostOfPart, total / (threads * 4));
    int64_t num_records = 0, collected = 0;
    for (int64_t index = 0; index < static_cast<int64_t>(slabs.size()); index++) {
      Slab& slab = slabs[index];
      const int64_t cost = cost_of(slab, in, group), parts = slab.num_partitions();
      slab.is_split = threads > 1 && parts > 1 && cost > split_cost;
      slab.records = num_records;
      if (slab.is_split) num_records += in.cache.kv_heads * parts * slab.num_tokens * group;
      for (int64_t head = 0; head < in.cache.kv_heads; head++) {
        const Unit whole{index, head, slab.first_partition(), slab.end_partition()};
        if (slab.is_split) merges.push_back(whole);
        const int64_t step = slab.is_split ? 1 : parts;
        for (int64_t first = whole.first_partition; first < whole.end_partition; first += step) {
          if (items.empty() || collected >= item_cost) {
            items.push_back({static_cast<int64_t>(units.size()), 0});
            collected = 0;
          }
          units.push_back({index, head, first, first + step});
          items.back().end_unit = units.size();
          collected += cost * step / parts;
        }
      }
    }
    reserve_records(num_records * record_floats);
  }

 private:
  int64_t num_record_floats_ = 0;

  static int64_t cost_of(const Slab& slab, const AttendArguments& in, int64_t group) {
    return slab.num_tokens * group * (slab.end_key - slab.first_key) * in.cache.head_dim;
  }

  // Returns what a KV head costs.
  int64_t cut_slabs(const AttendArguments& in, int64_t group) {
    const int64_t most_tokens = std::max<int64_t>(1, kSlabRows / group);
    int64_t total = 0;
    slabs.clear();
    for (int64_t row = 0; row < in.num_rows; row++) {
      for (int64_t token = in.query_starts[row]; token < in.query_starts[row + 1]; token += most_tokens) {
        const int64_t num_tokens = std::min<int64_t>(most_tokens, in.query_starts[row + 1] - token);
        const int64_t first = in.positions[token], end_key = in.positions[token + num_tokens - 1] + 1;
        const int64_t first_key = in.window ? std::max<int64_t>(0, first - in.window + 1) : 0;
        slabs.push_back({row, token, num_tokens, first_key, end_key});
        total += cost_of(slabs.back(), in, group);
      }
    }
    return total;
  }

  void reserve_records(int64_t num_floats) {
    if (num_floats <= num_record_floats_) return;
    num_record_floats_ = std::max(num_floats, 2 * num_record_floats_);
    records.reset(new float[num_record_floats_]);
  }
};

}  // namespace tandem::TANDEM_LEVEL
