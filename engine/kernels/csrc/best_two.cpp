// best_two.h says what is computed. As in choose.cpp, noise is computed only where it can matter: the two likeliest
// tokens give a sum that the second reaches for sure, and only who may reach it as well is looked at.
#include "best_two.h"

#include <cmath>

#include "choose_noise.h"
#include "choose_row.h"
#include "threads.h"

namespace tandem::TANDEM_LEVEL {
namespace {

struct Entry {
  float total = kMinusInfinity;
  int64_t column = -1;

  bool before(const Entry& other) const {
    return total > other.total || (total == other.total && (other.column < 0 || column < other.column));
  }
};

// In any order of columns; each may be taken once.
struct Two {
  Entry first, second;

  void take(const Entry& entry) {
    if (entry.before(first)) {
      second = first, first = entry;
    } else if (entry.before(second)) {
      second = entry;
    }
  }
};

// The ids of kLanes columns from `at` on; beyond the end they are 0.
Words ids_at(const int32_t* ids, int64_t at, int64_t end) {
  if (ids == nullptr) return counting_from(at);
  if (at + kLanes <= end) return load_words(reinterpret_cast<const uint32_t*>(ids + at));
  uint32_t padded[kLanes] = {};
  std::copy(ids + at, ids + end, padded);
  return load_words(padded);
}

Peak second_peak(const float* logits, const Peak& first, int64_t end) {
  Peak second = find_peak(logits, 0, first.id);
  second.merge(find_peak(logits, first.id + 1, end));
  return second;
}

int64_t id_of(const BestTwoArguments& a, int64_t column) { return a.ids == nullptr ? column : a.ids[column]; }

// Of a row's tokens with noise; the two likeliest are known.
Two noisy_two(const BestTwoArguments& a, const Row& row, const Noise& noise, const Peak& first, const Peak& second) {
  const auto entry_of = [&](const Peak& peak) {
    const float score = (peak.value - row.peak) / row.temperature;
    float noises[kLanes];
    const auto id = static_cast<uint32_t>(id_of(a, peak.id));
    store(noises, gumbel_of_bits(uniform_bits(noise.k0, noise.k1, fill_words(id))));
    return Entry{score + noises[0], peak.id};
  };
  Two two;
  two.take(entry_of(first));
  if (second.id < 0) return two;
  two.take(entry_of(second));
  Lanes floor = fill(raw_floor(row, two.second.total - kNoiseMax));
  for (int64_t at = 0; at < row.vocab_size; at += kLanes) {
    const Lanes x = load_until(row.logits, at, row.vocab_size);
    if (bits_of(at_least(x, floor)) == 0) continue;
    const Lanes s = scores_of(row, x);
    const Words bits = uniform_bits(noise.k0, noise.k1, ids_at(a.ids, at, row.vocab_size));
    uint32_t left = possible(s, bits, two.second.total);
    if (left == 0) continue;
    float totals[kLanes];
    store(totals, add(s, gumbel_of_bits(bits)));
    const float before = two.second.total;
    for (; left != 0; left &= left - 1) {
      const int lane = __builtin_ctz(left);
      if (at + lane != first.id && at + lane != second.id) two.take({totals[lane], at + lane});
    }
    if (two.second.total > before) floor = fill(raw_floor(row, two.second.total - kNoiseMax));
  }
  return two;
}

void of_row(const BestTwoArguments& a, int64_t index) {
  int64_t* numbers = a.numbers + index * kNumbersOfTwo;
  numbers[0] = numbers[1] = -1, numbers[2] = 0;
  const float* logits = a.logits.data + index * a.logits.stride;
  const Peak first = find_peak(logits, 0, a.logits.vocab_size);
  if (!first.usable()) return;
  const Peak second = second_peak(logits, first, a.logits.vocab_size);
  Two two{{first.value, first.id}, {second.value, second.id}};
  const float temperature = a.temperatures[index];
  if (temperature > 0) {
    const Row row{logits, a.logits.vocab_size, temperature, first.value};
    two = noisy_two(a, row, Noise(a.keys + 2 * index), first, second);
  }
  numbers[0] = id_of(a, two.first.column);
  if (two.second.column < 0 || two.second.total == kMinusInfinity) return;
  numbers[1] = id_of(a, two.second.column);
  const double margin = static_cast<double>(two.first.total) - two.second.total;
  numbers[2] = std::llround(std::min(margin, kMostMargin) * kMarginUnits);
}

}  // namespace

void best_two(const BestTwoArguments& a) {
  parallel_for(a.logits.num_rows, [&](int64_t index) { of_row(a, index); });
}

}  // namespace tandem::TANDEM_LEVEL
