// Attention over blocks, for decoded tokens, chunks of prompts and verifications in one call.
//
// Keys are reduced in *partitions* of 512 positions counted from the sequence's start, tile after tile of 64
// (attention_tile.h). A partition gives a row, which is one query head of one token, a *record*: the peak m of its
// scores, the sum l of weights and the weighted sum o of values. Records are merged from the first to the last,
//
//     M = max(m, m'),   l ← l e^(m − M) + l' e^(m' − M),   o ← o e^(m − M) + o' e^(m' − M)
//
// where a partition of which the row sees nothing is left out. The result is o / l; a sink adds e^(sink − M) to l.
//
// A row's own sequence of operations is the same however the work is shared out (attention_work.h) and whichever rows
// it is multiplied with. It never reads what lies beyond a context: keys there may give scores, which are discarded,
// and values there are replaced by zeros. Denormal numbers count as zero, so that adding zero leaves a sum as it is,
// whichever instruction adds.
#include "attention.h"

#include <cmath>

#include "attention_tile.h"
#include "attention_work.h"

namespace tandem::TANDEM_LEVEL {
namespace {

// A record is the peak, the sum of weights, padding to a vector's boundary, then a value per column.
constexpr int64_t kRecordValues = 16;
constexpr int64_t kMaxRecord = kRecordValues + kMaxHeadDim;

class FlushDenormals {
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kResultsAndOperands); }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  static constexpr unsigned kResultsAndOperands = 0x8040;
  const unsigned before_;
};

void clear(float* record, int64_t columns) {
  std::memset(record, 0, (kRecordValues + columns) * sizeof(float));
  record[0] = kHidden;
}

void merge(float* total, const float* record, int64_t columns) {
  if (record[0] == kHidden) return;
  if (total[0] == kHidden) {
    std::memcpy(total, record, (kRecordValues + columns) * sizeof(float));
    return;
  }
  const float peak = std::max(total[0], record[0]);
  const Lanes ours = exp(fill(total[0] - peak)), theirs = exp(fill(record[0] - peak));
  total[0] = peak;
  total[1] = peak_of(add(mul(fill(total[1]), ours), mul(fill(record[1]), theirs)));  // all lanes are one number
  for (int64_t at = kRecordValues; at < kRecordValues + columns; at += kLanes) {
    store(total + at, add(mul(load(total + at), ours), mul(load(record + at), theirs)));
  }
}

// A total → out [head_dim].
template <class T>
void finish(const float* total, const float* sink, T* out, int64_t head_dim) {
  float peak = total[0];
  Lanes factor = fill(1.0f), sum = fill(total[1]);
  if (sink) {
    peak = std::max(total[0], *sink);
    factor = exp(fill(total[0] - peak));
    sum = add(mul(sum, factor), exp(fill(*sink - peak)));
  }
  // Without a finite peak (an overflow) there is no result; NaN says so where a quotient might look like one.
  if (!(std::abs(peak) <= std::numeric_limits<float>::max())) sum = fill(std::numeric_limits<float>::quiet_NaN());
  for (int64_t dim = 0; dim < head_dim; dim += kLanes) {
    // + 0: a sum of zeros may be -0 or +0, as many as there happen to be
    const Lanes value = add(div(mul(load(total + kRecordValues + dim), factor), sum), zero());
    const int64_t left = head_dim - dim;
    left >= kLanes ? store(out + dim, value) : store_some(out + dim, value, static_cast<int>(left));
  }
}

// What a thread needs while it attends.
template <class T>
struct Scratch {
  TileSources<T> next_unit;  // the first tile of what comes after this unit
  alignas(64) Factor<T> queries[kMaxRows * kQueryStride];
  alignas(64) float scores[kMaxRows * kTile];
  alignas(64) Factor<T> weights[kMaxRows * kTile];
  alignas(64) float sums[kMaxRows * kLanes];
  alignas(64) float totals[kMaxRows * kMaxRecord];
  alignas(64) float records[kMaxRows * kMaxRecord];
  alignas(64) T last_values[kChunk * kMaxHeadDim + kChunk];
  alignas(64) T gathered_keys[kTile * kMaxHeadDim];  // only where blocks don't hold whole chunks
  alignas(64) T gathered_values[kTile * kMaxHeadDim + kChunk];
};

template <class T>
void copy_factors(T* to, const T* from, int64_t size) {
  std::memcpy(to, from, size * sizeof(T));
}
[[maybe_unused]] void copy_factors(float* to, const bf16* from, int64_t size) {
  for (int64_t i = 0; i < size; i++) to[i] = widen(from[i]);
}

// Some rows of a slab that are multiplied together; row i is token i / group and query head i % group of the slab's.
struct Rows {
  const Slab* slab;
  const Unit* unit;
  int64_t first;
  int num;
};

template <class T>
class Attention {
 public:
  Attention(const AttendArguments& arguments, Work& work)
      : in_(arguments),
        work_(work),
        cache_(arguments.cache),
        group_(arguments.num_heads / arguments.cache.kv_heads),
        columns_((arguments.cache.head_dim + kChunk - 1) / kChunk * kChunk),
        record_(kRecordValues + columns_) {}

  void run() {
    work_.plan(in_, record_);
    parallel_for(work_.items.size(), [this](int64_t item) {
      const FlushDenormals flush;
      Scratch<T> scratch;
      const auto [first, end] = work_.items[item];
      for (int64_t unit = first; unit < end; unit++) {
        // What the thread attends to next, if nobody takes it away.
        const size_t next = std::min<size_t>(unit + 1, work_.units.size() - 1);
        attend_unit(work_.units[unit], work_.units[next], scratch);
      }
    });
    parallel_for(work_.merges.size(), [this](int64_t index) {
      const FlushDenormals flush;
      merge_slab(work_.merges[index]);
    });
  }

 private:
  static constexpr int kPerWord = CacheOf<T>::kPerWord;

  void attend_unit(const Unit& unit, const Unit& next, Scratch<T>& scratch) const {
    const Slab& slab = work_.slabs[unit.slab];
    scratch.next_unit = locate(next, std::max(next.first_partition * kPartition, work_.slabs[next.slab].first_key));
    const int64_t num_rows = slab.num_tokens * group_, num_groups = (num_rows + kMaxRows - 1) / kMaxRows;
    for (int64_t i = 0; i < num_groups; i++) {
      const int64_t first = num_rows * i / num_groups, end = num_rows * (i + 1) / num_groups;
      attend_rows({&slab, &unit, first, static_cast<int>(end - first)}, scratch);
    }
  }

  void attend_rows(const Rows& rows, Scratch<T>& scratch) const {
    const Unit& unit = *rows.unit;
    load_queries(rows, scratch.queries);
    if (rows.slab->is_split) {
      attend_partition(rows, unit.first_partition, record_of(rows, unit.first_partition), scratch);
      return;
    }
    attend_partition(rows, unit.first_partition, scratch.totals, scratch);
    for (int64_t partition = unit.first_partition + 1; partition < unit.end_partition; partition++) {
      attend_partition(rows, partition, scratch.records, scratch);
      for (int row = 0; row < rows.num; row++) {
        merge(scratch.totals + row * record_, scratch.records + row * record_, columns_);
      }
    }
    for (int row = 0; row < rows.num; row++) finish_row(rows, row, scratch.totals + row * record_);
  }

  // One record per row.
  void attend_partition(const Rows& rows, int64_t partition, float* records, Scratch<T>& scratch) const {
    for (int row = 0; row < rows.num; row++) clear(records + row * record_, columns_);
    std::memset(scratch.sums, 0, sizeof scratch.sums);
    const int64_t end = std::min((partition + 1) * kPartition, position_of(rows, rows.num - 1) + 1);
    const int64_t slab_end = std::min(rows.unit->end_partition * kPartition, rows.slab->end_key);
    const int64_t first = std::max(partition * kPartition, first_seen(position_of(rows, 0)) / kTile * kTile);
    Tiles<T> tiles{.dim_words = in_.cache.dim_words, .value_words = in_.cache.head_dim};
    for (int64_t key = first; key < end; key += kTile) {
      tiles.now = key == first ? locate(*rows.unit, key) : tiles.next;
      tiles.next = key + kTile < slab_end ? locate(*rows.unit, key + kTile) : scratch.next_unit;
      complete(tiles.now, rows, key, end, scratch);
      with_rows(rows.num, [&](auto num) { attend_tile<num>(rows, key, tiles, records, scratch); });
    }
    for (int row = 0; row < rows.num; row++) {
      records[row * record_ + 1] = sum_of(load(scratch.sums + row * kLanes));
    }
  }

  template <int kRows>
  void attend_tile(const Rows& rows, int64_t key, const Tiles<T>& tiles, float* records,
                   Scratch<T>& scratch) const {
    score_tile<T, kRows>(scratch.queries, tiles, scratch.scores);
    float factors[kRows];
    for (int row = 0; row < kRows; row++) {
      const int64_t position = position_of(rows, row);
      const Seen seen{static_cast<int>(std::clamp<int64_t>(first_seen(position) - key, 0, kTile)),
                      static_cast<int>(std::clamp<int64_t>(position + 1 - key, 0, kTile))};
      factors[row] =
          weigh(scratch.scores + row * kTile, tiles.now.num_chunks * kChunkVectors, seen, in_.scale, in_.softcap,
                records[row * record_], scratch.sums + row * kLanes, scratch.weights + row * kTile);
    }
    add_values<T, kRows>(scratch.weights, tiles, columns_, factors, records + kRecordValues, record_);
  }

  // Where the tile that begins with a key lies, as far as the slab's keys go.
  TileSources<T> locate(const Unit& unit, int64_t key) const {
    const Slab& slab = work_.slabs[unit.slab];
    TileSources<T> tile{};
    tile.num_chunks = num_chunks(key, slab.end_key);
    for (int chunk = 0; chunk < kTileChunks; chunk++) {
      const auto [block, offset] = place_of(slab, key + std::min(chunk, tile.num_chunks - 1) * kChunk);
      tile.keys[chunk] = cache_.keys(block, unit.head, offset);
      tile.values[chunk] = cache_.values(block, unit.head, offset);
    }
    return tile;
  }

  static int num_chunks(int64_t first, int64_t end) {
    return static_cast<int>((std::min<int64_t>(kTile, end - first) + kChunk - 1) / kChunk);
  }

  // Make a located tile readable: chunks together, and no values of keys from `end` on.
  void complete(TileSources<T>& tile, const Rows& rows, int64_t first, int64_t end, Scratch<T>& scratch) const {
    tile.num_chunks = num_chunks(first, end);
    const int last = tile.num_chunks - 1;
    if (in_.cache.run < kChunk) {
      for (int chunk = 0; chunk < kTileChunks; chunk++) {
        const int64_t size = std::min(chunk, last) * kChunk * kMaxHeadDim;
        tile.keys[chunk] = scratch.gathered_keys + size;
        tile.values[chunk] = scratch.gathered_values + size;
        if (chunk > last) continue;
        gather(rows, first + chunk * kChunk, end, scratch.gathered_keys + size, scratch.gathered_values + size);
      }
    }
    const int64_t num_left = end - first - last * kChunk;
    if (num_left < kChunk) {
      copy_values(tile.values[last], num_left, scratch.last_values);
      tile.values[last] = scratch.last_values;
    }
  }

  // The first num_keys of a chunk's values; then zeros, since 0 times an infinity would be NaN.
  void copy_values(const T* from, int64_t num_keys, T* to) const {
    const int64_t num_words = (num_keys + kPerWord - 1) / kPerWord, row = in_.cache.head_dim * kPerWord;
    std::memcpy(to, from, num_words * row * sizeof(T));
    std::memset(to + num_words * row, 0, (kChunk / kPerWord - num_words) * row * sizeof(T));
    if (num_keys % kPerWord) {
      for (int64_t at = (num_words - 1) * row + 1; at < num_words * row; at += kPerWord) to[at] = T{};
    }
  }

  // A chunk's keys and values from blocks that hold runs of fewer.
  void gather(const Rows& rows, int64_t first, int64_t end, T* keys, T* values) const {
    const int64_t run = in_.cache.run, row = in_.cache.head_dim * kPerWord;
    for (int64_t i = 0; i < kChunk && first + i < end; i += run) {
      const auto [block, offset] = place_of(*rows.slab, first + i);
      const T* key = cache_.keys(block, rows.unit->head, offset);
      for (int64_t word = 0; word < in_.cache.dim_words; word++) {
        std::memcpy(keys + (word * kChunk + i) * kPerWord, key + word * run * kPerWord, run * kPerWord * sizeof(T));
      }
      const int64_t num_bytes = run * in_.cache.head_dim * sizeof(T);
      std::memcpy(values + i / kPerWord * row, cache_.values(block, rows.unit->head, offset), num_bytes);
    }
  }

  void merge_slab(const Unit& unit) const {
    const Slab& slab = work_.slabs[unit.slab];
    const Rows rows{&slab, &unit, 0, static_cast<int>(slab.num_tokens * group_)};
    for (int row = 0; row < rows.num; row++) {
      float* total = record_of(rows, unit.first_partition) + row * record_;
      for (int64_t partition = unit.first_partition + 1; partition < unit.end_partition; partition++) {
        merge(total, record_of(rows, partition) + row * record_, columns_);
      }
      finish_row(rows, row, total);
    }
  }

  void load_queries(const Rows& rows, Factor<T>* queries) const {
    for (int row = 0; row < rows.num; row++) {
      const T* from = static_cast<const T*>(in_.queries) + token_of(rows, row) * in_.query_token_stride +
                      head_of(rows, row) * in_.query_head_stride;
      copy_factors(queries + row * kQueryStride, from, in_.cache.head_dim);
    }
  }

  void finish_row(const Rows& rows, int row, const float* total) const {
    const int64_t head = head_of(rows, row);
    T* out = static_cast<T*>(in_.out) + (token_of(rows, row) * in_.num_heads + head) * in_.cache.head_dim;
    finish(total, in_.sinks ? in_.sinks + head : nullptr, out, in_.cache.head_dim);
  }

  // A split slab's records of a partition, from the first of `rows` on.
  float* record_of(const Rows& rows, int64_t partition) const {
    const Slab& slab = *rows.slab;
    const int64_t part = rows.unit->head * slab.num_partitions() + partition - slab.first_partition();
    return work_.records.get() + (slab.records + part * slab.num_tokens * group_ + rows.first) * record_;
  }

  int64_t token_of(const Rows& rows, int row) const { return rows.slab->first_token + (rows.first + row) / group_; }
  int64_t head_of(const Rows& rows, int row) const { return rows.unit->head * group_ + (rows.first + row) % group_; }
  int64_t position_of(const Rows& rows, int row) const { return in_.positions[token_of(rows, row)]; }
  int64_t first_seen(int64_t position) const {
    return in_.window ? std::max<int64_t>(0, position - in_.window + 1) : 0;
  }

  Place place_of(const Slab& slab, int64_t key) const {
    const int64_t size = in_.cache.block_size;
    return {in_.block_tables[slab.row * in_.table_width + key / size], key % size};
  }

  const AttendArguments& in_;
  Work& work_;
  const CacheOf<T> cache_;
  const int64_t group_;  // query heads per KV head
  const int64_t columns_;  // head_dim in whole vectors
  const int64_t record_;  // floats of one
};

}  // namespace

void attend(const AttendArguments& in) {
  thread_local Work work;
  in.type == Type::bf16 ? Attention<bf16>(in, work).run() : Attention<float>(in, work).run();
}

}  // namespace tandem::TANDEM_LEVEL
