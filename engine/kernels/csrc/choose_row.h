// One row of logits l: its peak, and its tokens in order of their scores s = (l − peak) / T ≤ 0.
//
// Most tokens of a row are so unlikely that they can neither win nor weigh anything. They are passed over by comparing
// the raw logit with a floor, a load and a comparison per vector:
//
//     logits   [ . . . . | . . x . | . . . . | . . . . | x . x . | . . . . ]      x: at or above the floor
//                           └─ only here are scores, weights, hashes computed ──┘
//
// A floor may let through too much, never too little: whoever uses it looks at the scores themselves.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "choose.h"
#include "choose_portable.h"

namespace tandem::TANDEM_LEVEL {

constexpr float kInfinity = std::numeric_limits<float>::infinity(), kMinusInfinity = -kInfinity;
constexpr float kLeastFinite = -std::numeric_limits<float>::max();
// Below this score a weight is 0: exp(-30)·2^42 = 0.41.
constexpr float kWeightless = -30.0f;

struct Row {
  const float* logits;
  int64_t vocab_size;
  float temperature;  // above 0
  float peak;
};

// kLanes logits from `at` on; beyond the end they are -inf.
inline Lanes load_until(const float* logits, int64_t at, int64_t end) {
  if (at + kLanes <= end) return load(logits + at);
  float padded[kLanes];
  std::fill_n(padded, kLanes, kMinusInfinity);
  std::copy(logits + at, logits + end, padded);
  return load(padded);
}

inline Lanes scores_of(const Row& row, Lanes logits) {
  return div(sub(logits, fill(row.peak)), fill(row.temperature));
}

struct Peak {
  float value = kMinusInfinity;
  int64_t id = -1;  // the lowest that has it
  bool has_nan = false;

  bool usable() const { return !has_nan && std::isfinite(value); }
  // Pieces of one row, in order.
  void merge(const Peak& next) {
    has_nan |= next.has_nan;
    if (next.value > value) value = next.value, id = next.id;
  }
};

// Block by block, so that only the block with the peak is searched for its place.
inline Peak find_peak(const float* logits, int64_t begin, int64_t end) {
  constexpr int64_t kBlock = 1024;
  constexpr int kChains = 4;  // maxima that don't wait for each other
  Peak peak;
  int64_t place = begin;
  for (int64_t block = begin; block < end; block += kBlock) {
    const int64_t block_end = std::min(block + kBlock, end);
    Lanes tops[kChains];
    std::fill_n(tops, kChains, fill(kMinusInfinity));
    uint32_t nans = 0;
    for (int64_t at = block; at < block_end; at += kChains * kLanes) {
      for (int chain = 0; chain < kChains; chain++) {
        const int64_t start = std::min(at + chain * kLanes, block_end);
        const Lanes x = load_until(logits, start, block_end);
        tops[chain] = max(tops[chain], x);
        nans |= bits_of(unordered(x, x));
      }
    }
    const float top = peak_of(max(max(tops[0], tops[1]), max(tops[2], tops[3])));
    peak.has_nan |= nans != 0;
    if (top > peak.value) peak.value = top, place = block;
  }
  if (!peak.usable()) return peak;
  while (logits[place] != peak.value) place++;
  peak.id = place;
  return peak;
}

// A logit whose score, as computed, is `score` ≤ 0 or more, is this or more. Subtracting and dividing each err by 2^-24
// of the result, which is far less than the room left here.
inline float raw_floor(const Row& row, double score) {
  const double floor = row.peak + row.temperature * (score * (1 + 1e-6) - 1e-40);
  if (!(floor > kLeastFinite)) return kMinusInfinity;
  return std::nextafterf(static_cast<float>(floor), kMinusInfinity);
}

struct Sums {
  int64_t count;
  int64_t weight;
};

// Of all tokens with this score or more; the weight is 0 unless wanted.
inline Sums sums_from(const Row& row, float score, bool want_weight) {
  const Lanes floor = fill(raw_floor(row, score)), least = fill(score);
  Words weight = fill_longs(0);
  int64_t count = 0;
  for (int64_t at = 0; at < row.vocab_size; at += kLanes) {
    const Lanes x = load_until(row.logits, at, row.vocab_size);
    if (bits_of(at_least(x, floor)) == 0) continue;
    const Lanes s = scores_of(row, x);
    const Mask found = at_least(s, least);
    count += __builtin_popcount(bits_of(found));
    if (!want_weight || bits_of(found) == 0) continue;
    const Weights weights = weights_of(select(found, portable_exp(s), zero()));
    weight = add_longs(weight, add_longs(weights.low, weights.high));
  }
  int64_t parts[kLanes / 2], total = 0;
  store_longs(parts, weight);
  for (const int64_t part : parts) total += part;
  return {count, total};
}

struct Token {
  float logit;
  float score;
  int64_t id;
  int64_t weight;
};

// By falling score and rising id, and by falling logit and rising id: two logits may have one score.
inline bool score_before(const Token& a, const Token& b) {
  return a.score != b.score ? a.score > b.score : a.id < b.id;
}
inline bool logit_before(const Token& a, const Token& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

// All tokens with least ≤ score < below, by rising id.
inline void gather(const Row& row, float least, float below, std::vector<Token>& tokens) {
  tokens.clear();
  const Lanes floor = fill(least == kMinusInfinity ? least : raw_floor(row, least));
  for (int64_t at = 0; at < row.vocab_size; at += kLanes) {
    const Lanes x = load_until(row.logits, at, row.vocab_size);
    if (bits_of(at_least(x, floor)) == 0) continue;
    const Lanes s = scores_of(row, x);
    uint32_t found = bits_of(at_least(s, fill(least))) & bits_of(less(s, fill(below)));
    if (at + kLanes > row.vocab_size) found &= (1u << (row.vocab_size - at)) - 1;
    if (found == 0) continue;
    float scores[kLanes];
    int64_t weights[kLanes];
    store(scores, s);
    store_weights(weights, weights_of(portable_exp(s)));
    for (; found != 0; found &= found - 1) {
      const int lane = __builtin_ctz(found);
      tokens.push_back({row.logits[at + lane], scores[lane], at + lane, weights[lane]});
    }
  }
}

// The first token, by falling score and rising id, at which the count or the weight of it and all before it reaches
// `needed`, which that of all together does. Halves what is left around its median; reorders the tokens.
inline Token boundary(std::vector<Token>& tokens, int64_t needed, bool by_weight) {
  auto begin = tokens.begin(), end = tokens.end();
  int64_t before = 0;
  while (end - begin > 1) {
    const auto middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end, score_before);
    int64_t half = middle - begin;
    if (by_weight) {
      half = 0;
      for (auto token = begin; token != middle; ++token) half += token->weight;
    }
    if (before + half >= needed) {
      end = middle;
    } else {
      before += half;
      begin = middle;
    }
  }
  return *begin;
}

}  // namespace tandem::TANDEM_LEVEL
