// The token of each row, read from an int8 copy of the head (screen.h) and a few tiles of the head itself.
//
//     screened logits    a_v ± E_v, from ŵ_v and x̂: half of the bytes, and exact integer sums
//     candidates         tiles whose best a_v + E_v reaches the best a_v − E_v of all, the highest first
//     the head's tiles   multiplied by linear.cpp itself, so with the bits that the whole product has, until the next
//                        candidate's a_v + E_v is below the best logit found
//
// The token is therefore the one that all logits would give: of a tile that is passed over, no logit reaches the best.
//
// Why |l_v − a_v| ≤ E_v. l_v is the logit that linear.cpp gives, x and w finite, K ≤ 2^16, ‖·‖ Euclidean.
//
//   1  |x·w − x̂·ŵ| ≤ |x·(w − ŵ)| + |(x − x̂)·ŵ| ≤ ‖x‖ ‖w − ŵ‖ + ‖x − x̂‖ ‖ŵ‖                       (Cauchy–Schwarz)
//   2  x̂·ŵ is scale times integer sums (screen_row.h), which fit an int32 and so are exact: |Σ p q| ≤ 127² K < 2^31. To
//      float32, with their factors, added and times scale: fewer than ten roundings, each of 2^-24 or less, of terms
//      of at most 2 ‖x̂‖ ‖ŵ‖.
//   3  linear.cpp sums K products, in any order, by instructions that round each product and each sum at most once and
//      may cut instead of rounding: 2K errors of at most 2^-23, so the sum is off by less than 1.02 · K · 2^-22 ·
//      Σ|x_k w_k|, and Σ|x_k w_k| ≤ ‖x‖ ‖w‖. The head's scale rounds once more.
//   4  a ± E rounds once more: 2^-24 of |a| and of E.
//   5  Numbers below 2^-126 may be taken for 0. In each of fewer than 2^20 places this changes a term or a factor by
//      2^-126, so all together by less than 2^-80 (1 + ‖x‖) (1 + ‖w‖).
//
//   2 to 4 together are less than (K + 8) · 2^-21 · (‖x‖ + ‖x − x̂‖) · (‖w‖ + ‖w − ŵ‖): each factor bounds its x̂ or ŵ as
//   well. On everything that makes E is a factor 1 + 2^-20, more than its own roundings and the one of 4 take.
//
// No logit can overflow, or be NaN, where ‖x‖ ‖w‖ < 1e37; a row of x or a column where that isn't known gives up. A row
// that gives up, as one does of whose head too many tiles are candidates, gets all its logits as without a screen.
//
// Noise. With T > 0 the likeliest token is found first, as above. Then the highest score plus noise is looked for:
// from the upper bound u_v = min(a_v + E_v, peak) of a logit follows one of its score plus noise,
//
//     (l_v − peak) / T + g_v  ≤  (u_v − peak) / T + g_v       computed by the same operations, each of them monotone
//
// and again tiles are multiplied, the highest first, until the next upper bound is below the best sum found.
#include "screen.h"

#include <vector>

#include "choose_noise.h"
#include "screen_row.h"
#include "screen_tile.h"
#include "threads.h"

#if TANDEM_LEVEL_NUMBER == TANDEM_avx512bf16 && !defined(__AVX512VNNI__)
#error "this level's integer products need -mavx512vnni"
#endif

namespace tandem::TANDEM_LEVEL {
namespace {

constexpr int64_t kItemBytes = 64 << 10;
// A row of whose tiles more are candidates gives up: by then half of what screening gains is spent.
constexpr int64_t kTilesPerCandidate = 16;
constexpr int64_t kFewTiles = 4;
constexpr int64_t kSkipped = 64;

// The bounds of one row's logits in one tile.
struct Bounds {
  float low = kMinusInfinity;   // some logit of the tile is this or more
  float high = kMinusInfinity;  // none is more
  bool usable = true;
};

struct Winner {
  float value = kMinusInfinity;
  int64_t id = -1;

  // In any order of ids.
  void take(float other, int64_t other_id) {
    if (other > value || (other == value && other_id < id)) value = other, id = other_id;
  }
};

struct Candidate {
  float high;
  int64_t index;  // a tile's
  bool operator<(const Candidate& other) const { return high < other.high; }
};

struct NoisyCandidate {
  float high;  // of score plus noise
  float noise;
  int64_t id;
  bool operator<(const NoisyCandidate& other) const { return high < other.high; }
};

// One call on its way.
class Screening {
 public:
  explicit Screening(const ScreenArguments& a)
      : a_(a),
        num_rows_(a.head.num_rows),
        num_quads_(num_quads_of(a.head.in_features)),
        num_fine_(num_fine_of(a.head.in_features)),
        num_tiles_((a.head.out_features + kTileColumns - 1) / kTileColumns),
        tile_bytes_(screen_tile_bytes(a.head.in_features)),
        p_(num_rows_ * num_quads_ * kQuad),
        fine_(num_rows_ * num_fine_),
        rows_(num_rows_),
        firsts_(num_rows_),
        bounds_(num_rows_ * num_tiles_) {}

  // Returns the rows that gave up; the others have their token.
  std::vector<int64_t> run() {
    parallel_for(num_rows_, [&](int64_t row) {
      rows_[row] = prepared(row);
      firsts_[row] = rows_[row].first;
    });
    const int64_t per_item = std::max<int64_t>(1, kItemBytes / tile_bytes_);
    parallel_for((num_tiles_ + per_item - 1) / per_item, [&](int64_t item) {
      const int64_t end = std::min((item + 1) * per_item, num_tiles_);
      for (int64_t tile = item * per_item; tile < end; tile++) screen(tile);
    });
    std::vector<char> settled(num_rows_);
    parallel_for(num_rows_, [&](int64_t row) { settled[row] = settle(row); });
    std::vector<int64_t> given_up;
    for (int64_t row = 0; row < num_rows_; row++) {
      if (!settled[row]) given_up.push_back(row);
    }
    return given_up;
  }

 private:
  // Logits of the head's own, tile by tile as they are asked for.
  class Tiles {
   public:
    Tiles(const Screening& screening, int64_t row) : screening_(screening), row_(row) {}
    const float* of(int64_t tile) {
      for (size_t i = 0; i < numbers_.size(); i++) {
        if (numbers_[i] == tile) return logits_.data() + i * kTileColumns;
      }
      numbers_.push_back(tile);
      logits_.resize(numbers_.size() * kTileColumns);
      float* logits = logits_.data() + (numbers_.size() - 1) * kTileColumns;
      screening_.multiply_head(row_, tile, logits);
      return logits;
    }
    // Those that were asked for.
    const std::vector<int64_t>& numbers() const { return numbers_; }
    // One more would cost too much.
    bool full() const {
      return static_cast<int64_t>(numbers_.size()) >= std::max(kFewTiles, screening_.num_tiles_ / kTilesPerCandidate);
    }

   private:
    const Screening& screening_;
    const int64_t row_;
    std::vector<int64_t> numbers_;
    std::vector<float> logits_;
  };

  ScreenRow prepared(int64_t row) {
    if (a_.head.type == Type::bf16) return prepared_from(static_cast<const bf16*>(a_.head.x), row);
    return prepared_from(static_cast<const float*>(a_.head.x), row);
  }
  template <class T>
  ScreenRow prepared_from(const T* x, int64_t row) {
    return screen_row(x + row * a_.head.x_stride, a_.head.in_features, a_.head.scale, p_.data() + row * p_stride(),
                      fine_.data() + row * num_fine_);
  }
  int64_t p_stride() const { return num_quads_ * kQuad; }

  bool noisy(int64_t row) const { return a_.choices.temperatures[row] > 0; }
  int64_t columns_of(int64_t tile) const {
    return std::min<int64_t>(kTileColumns, a_.head.out_features - tile * kTileColumns);
  }
  // Where the logits will lie that nobody has asked for: upper bounds of them, for rows with noise.
  float* highs(int64_t row) const { return static_cast<float*>(a_.head.out) + row * a_.head.out_stride; }

  // The logits of one row and tile, as linear.cpp gives them.
  void multiply_head(int64_t row, int64_t tile, float* logits) const {
    const int64_t size = a_.head.type == Type::bf16 ? sizeof(bf16) : sizeof(float);
    const int64_t pair = a_.head.type == Type::bf16 ? 2 : 1;
    const int64_t depth = (a_.head.in_features + pair - 1) / pair * pair;
    LinearArguments part = a_.head;
    part.x = static_cast<const char*>(a_.head.x) + row * a_.head.x_stride * size;
    part.num_rows = 1;
    part.out_features = columns_of(tile);
    part.weight = static_cast<const char*>(a_.head.weight) + tile * kTileColumns * depth * size;
    part.out = logits;
    part.out_stride = kTileColumns;
    linear(part);
  }

  // Bounds of all rows in one tile.
  void screen(int64_t tile) {
    const char* data = a_.tiles + tile * tile_bytes_;
    const float norm = greatest_norm(tile, data);
    alignas(64) int32_t sums[kMaxScreenRows * kTileColumns];
    for (int64_t first = 0; first < num_rows_; first += kMaxScreenRows) {
      const int64_t count = std::min<int64_t>(kMaxScreenRows, num_rows_ - first);
      kScreenRows[count - 1](p_.data() + first * p_stride(), p_stride(), firsts_.data() + first, data, num_quads_, sums);
      for (int64_t i = 0; i < count; i++) {
        bounds_[(first + i) * num_tiles_ + tile] = bound(first + i, tile, data, norm, sums + i * kTileColumns);
      }
    }
  }

  const float* facts_of(const char* data) const {
    return reinterpret_cast<const float*>(data + num_quads_ * kScreenStepBytes);
  }

  // The greatest ‖w‖ + ‖w − ŵ‖ of a tile.
  float greatest_norm(int64_t tile, const char* data) const {
    const float* norms = facts_of(data) + 2 * kTileColumns;
    return *std::max_element(norms, norms + columns_of(tile));
  }

  Bounds bound(int64_t row, int64_t tile, const char* data, float greatest_norm, const int32_t* sums) const {
    const ScreenRow& r = rows_[row];
    if (!r.usable || !(greatest_norm <= r.most_norm)) return {.usable = false};
    alignas(64) int32_t fine_highs[kTileColumns], fine_lows[kTileColumns];
    screen_fine(fine_.data() + row * num_fine_, num_fine_, r.first_high, r.first_low, data, fine_highs, fine_lows);
    const float* facts = facts_of(data);
    const int64_t num_columns = columns_of(tile);
    float* to = noisy(row) ? highs(row) + tile * kTileColumns : nullptr;
    Lanes low = fill(kMinusInfinity), high = low;
    for (int64_t column = 0; column < num_columns; column += kLanes) {
      const Lanes scale = load(facts + column);
      const Lanes error = load(facts + kTileColumns + column), norm = load(facts + 2 * kTileColumns + column);
      const Lanes upper = to_float(load_integers(fine_highs + column)), lower = to_float(load_integers(fine_lows + column));
      const Lanes coarse = mul(fill(r.coarse), to_float(load_integers(sums + column)));
      const Lanes logit = mul(fma(fill(r.fine), fma(fill(256.0f), upper, lower), coarse), scale);
      const Lanes reach = fma(fill(r.along), error, fma(fill(r.apart), norm, fill(r.least)));
      const int left = static_cast<int>(std::min<int64_t>(kLanes, num_columns - column));
      const Mask there = below(left);
      const Lanes top = select(there, add(logit, reach), fill(kMinusInfinity));
      low = max(low, select(there, sub(logit, reach), fill(kMinusInfinity)));
      high = max(high, top);
      if (to != nullptr) store_some(to + column, top, left);
    }
    return {.low = peak_of(low), .high = peak_of(high)};
  }

  // Chooses the row's token. False: the row gave up.
  bool settle(int64_t row) {
    const Bounds* bounds = bounds_.data() + row * num_tiles_;
    float least = kMinusInfinity;
    for (int64_t tile = 0; tile < num_tiles_; tile++) {
      if (!bounds[tile].usable) return false;
      least = std::max(least, bounds[tile].low);
    }
    std::vector<Candidate> candidates;
    for (int64_t tile = 0; tile < num_tiles_; tile++) {
      if (bounds[tile].high >= least) candidates.push_back({bounds[tile].high, tile});
    }
    std::make_heap(candidates.begin(), candidates.end());
    Tiles tiles(*this, row);
    Winner peak;
    for (; !candidates.empty() && candidates.front().high >= peak.value; candidates.pop_back()) {
      if (tiles.full()) return false;
      const int64_t tile = candidates.front().index, first = tile * kTileColumns;
      const float* logits = tiles.of(tile);
      for (int64_t column = 0; column < columns_of(tile); column++) peak.take(logits[column], first + column);
      std::pop_heap(candidates.begin(), candidates.end());
    }
    if (peak.id < 0) return false;
    a_.choices.token_ids[row] = peak.id;
    return !noisy(row) || settle_noisy(row, peak, tiles);
  }

  bool settle_noisy(int64_t row, const Winner& peak, Tiles& tiles) {
    const Row scores{highs(row), a_.head.out_features, a_.choices.temperatures[row], peak.value};
    const Noise noise(a_.choices.keys + 2 * row);
    Winner best{noise.of(peak.id), peak.id};
    // The likeliest tokens are known already; the higher the sum to reach, the fewer are left that may.
    for (const int64_t tile : std::vector<int64_t>(tiles.numbers())) take_all(scores, noise, tile, tiles.of(tile), best);
    std::vector<NoisyCandidate> candidates = noisy_candidates(row, scores, noise, best.value);
    std::make_heap(candidates.begin(), candidates.end());
    for (; !candidates.empty() && candidates.front().high >= best.value; candidates.pop_back()) {
      if (tiles.full()) return false;
      const NoisyCandidate& next = candidates.front();
      const float logit = tiles.of(next.id / kTileColumns)[next.id % kTileColumns];
      best.take((logit - peak.value) / scores.temperature + next.noise, next.id);
      std::pop_heap(candidates.begin(), candidates.end());
    }
    a_.choices.token_ids[row] = best.id;
    return true;
  }

  // The best score plus noise of a tile whose logits are known.
  void take_all(const Row& scores, const Noise& noise, int64_t tile, const float* logits, Winner& best) const {
    const int64_t first = tile * kTileColumns, num_columns = columns_of(tile);
    for (int64_t column = 0; column < num_columns; column += kLanes) {
      const Lanes s = scores_of(scores, load_until(logits, column, num_columns));
      float totals[kLanes];
      store(totals, add(s, gumbel_of_bits(noise.bits(first + column))));
      const int64_t count = std::min<int64_t>(kLanes, num_columns - column);
      for (int64_t lane = 0; lane < count; lane++) best.take(totals[lane], first + column + lane);
    }
  }

  // The tokens that may reach a sum of `bound`, which some token does; `scores.logits` are upper bounds.
  std::vector<NoisyCandidate> noisy_candidates(int64_t row, const Row& scores, const Noise& noise, float bound) const {
    std::vector<NoisyCandidate> found;
    const float least = raw_floor(scores, bound - kNoiseMax);
    for (int64_t tile = 0; tile < num_tiles_; tile++) {
      if (bounds_[row * num_tiles_ + tile].high >= least) add_candidates(tile, least, scores, noise, bound, found);
    }
    return found;
  }

  void add_candidates(int64_t tile, float least, const Row& scores, const Noise& noise, float bound,
                      std::vector<NoisyCandidate>& found) const {
    const Lanes floor = fill(least), top = fill(scores.peak);
    const int64_t end = tile * kTileColumns + columns_of(tile);
    for (int64_t at = tile * kTileColumns; at < end; at += kLanes) {
      const Lanes highs = load_until(scores.logits, at, end);
      if (bits_of(at_least(highs, floor)) == 0) continue;
      const Lanes s = scores_of(scores, min(highs, top));
      const Words bits = noise.bits(at);
      uint32_t left = possible(s, bits, bound);
      if (left == 0) continue;
      const Lanes g = gumbel_of_bits(bits);
      float noises[kLanes], totals[kLanes];
      store(noises, g);
      store(totals, add(s, g));
      for (; left != 0; left &= left - 1) {
        const int lane = __builtin_ctz(left);
        if (totals[lane] >= bound) found.push_back({totals[lane], noises[lane], at + lane});
      }
    }
  }

  const ScreenArguments& a_;
  const int64_t num_rows_, num_quads_, num_fine_, num_tiles_, tile_bytes_;
  std::vector<int8_t> p_;
  std::vector<Fine> fine_;
  std::vector<ScreenRow> rows_;
  std::vector<int32_t> firsts_;
  std::vector<Bounds> bounds_;
};

void choose_from_all(const ScreenArguments& a) {
  linear(a.head);
  choose(a.choices);
}

// The tokens of some rows, from all their logits.
void choose_some_from_all(const ScreenArguments& a, const std::vector<int64_t>& rows) {
  const int64_t row_bytes = a.head.in_features * (a.head.type == Type::bf16 ? sizeof(bf16) : sizeof(float));
  const int64_t stride_bytes = row_bytes / a.head.in_features * a.head.x_stride;
  const int64_t num_rows = static_cast<int64_t>(rows.size());
  std::vector<char> x(num_rows * row_bytes);
  std::vector<float> temperatures(num_rows);
  std::vector<int64_t> keys(2 * num_rows), token_ids(num_rows);
  for (int64_t i = 0; i < num_rows; i++) {
    std::memcpy(x.data() + i * row_bytes, static_cast<const char*>(a.head.x) + rows[i] * stride_bytes, row_bytes);
    temperatures[i] = a.choices.temperatures[rows[i]];
    std::copy_n(a.choices.keys + 2 * rows[i], 2, keys.data() + 2 * i);
  }
  ScreenArguments some = a;
  some.head.x = x.data(), some.head.x_stride = a.head.in_features, some.head.num_rows = num_rows;
  some.choices.logits.num_rows = num_rows;
  some.choices.temperatures = temperatures.data(), some.choices.keys = keys.data();
  some.choices.token_ids = token_ids.data();
  choose_from_all(some);
  for (int64_t i = 0; i < num_rows; i++) a.choices.token_ids[rows[i]] = token_ids[i];
}

}  // namespace

void choose_head(const ScreenArguments& a) {
  if (*a.num_skipped > 0) {
    --*a.num_skipped;
    return choose_from_all(a);
  }
  const std::vector<int64_t> given_up = Screening(a).run();
  if (given_up.empty()) return;
  if (2 * static_cast<int64_t>(given_up.size()) > a.head.num_rows) *a.num_skipped = kSkipped;
  choose_some_from_all(a, given_up);
}

}  // namespace tandem::TANDEM_LEVEL
