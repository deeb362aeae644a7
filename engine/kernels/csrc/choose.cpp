// Chooses the token of each row: argmax over v of s_v + g_v, where s = (l − peak) / T and g is noise from a hash.
//
//     peak          a maximum over the row; at T = 0 its id is the answer
//     cut           top-k and top-p: the last token that they leave, by falling score and rising id
//     noise         the best sum of score and noise over what is left
//
// Noise is computed only where it can matter. If B is a sum that some token reaches for sure, then v can win only with
//
//     s_v + g_v ≥ B;   g_v = −log E_v and u_v ≤ E_v,   so only if   u_v ≤ exp(s_v − B)
//
// and as no noise exceeds kNoiseMax, only if s_v ≥ B − kNoiseMax: a floor under the raw logits (choose_row.h). First B
// comes from the likeliest token, then from the best sum found so far. The room for rounding in these tests, 1e-3, is
// far above what rounding amounts to, 1e-5, so they leave out losers only, and the answer doesn't depend on B.
//
// Items are whole rows, or pieces of rows where there are few; of equal sums the first piece's wins: the lowest id.
#include "choose.h"

#include "choose_noise.h"
#include "choose_row.h"
#include "threads.h"

namespace tandem::TANDEM_LEVEL {
namespace {

constexpr int64_t kPiece = 16384;  // tokens; about 10 µs of work
constexpr float kLogprobFloor = -9999.0f;
// Scores at and above which the tokens that a cut leaves are looked for, the narrowest first.
constexpr float kWindows[] = {-4.0f, -8.0f, -16.0f};
constexpr int64_t kFew = 2048;   // tokens that are worth being put in order
constexpr int kMaxHalvings = 10;  // scores that are all alike never become few

// What the cuts leave: tokens before `last_id` at `score` by falling score and rising id, it included, and of these the
// ones whose exponential reaches min_p.
struct Kept {
  float score = kMinusInfinity;
  int64_t last_id = std::numeric_limits<int64_t>::max();
  float min_p = 0.0f;
};

struct Best {
  float total = kMinusInfinity;
  int64_t id = -1;

  void merge(const Best& next) {
    if (next.total > total) *this = next;
  }
};

// The least integer that is top_p · total or more, exactly: top_p is a 53-bit integer times a power of two.
int64_t share(double top_p, int64_t total) {
  int exponent;
  const auto mantissa = static_cast<unsigned __int128>(std::ldexp(std::frexp(top_p, &exponent), 53));
  const int shift = 53 - exponent;  // at least 53, as top_p < 1
  const unsigned __int128 product = mantissa * static_cast<unsigned __int128>(total);
  if (shift >= 120) return 1;
  return static_cast<int64_t>((product + ((static_cast<unsigned __int128>(1) << shift) - 1)) >> shift);
}

// The token, by falling score and rising id, at which the count or the weight of it and all before it reaches `needed`,
// which that of all tokens from `lowest` on does. First a range of scores that holds it and few others, then itself.
Token find_boundary(const Row& row, bool by_weight, int64_t needed, float lowest, std::vector<Token>& tokens) {
  const auto reached = [&](const Sums& sums) { return by_weight ? sums.weight : sums.count; };
  float below = kInfinity, least = lowest;
  Sums above{0, 0}, found{0, 0};  // from `below` and from `least` on
  for (const float window : kWindows) {
    found = sums_from(row, window, by_weight);
    if (reached(found) >= needed) {
      least = window;
      break;
    }
    below = window, above = found;
  }
  if (least == lowest) found = sums_from(row, lowest, by_weight);
  for (int halving = 0; found.count - above.count > kFew && halving < kMaxHalvings; halving++) {
    const float middle = 0.5f * (std::min(below, 0.0f) + least);
    const Sums half = sums_from(row, middle, by_weight);
    if (reached(half) >= needed) {
      least = middle, found = half;
    } else {
      below = middle, above = half;
    }
  }
  gather(row, least, below, tokens);
  return boundary(tokens, needed - reached(above), by_weight);
}

// Where top-k and top-p cut the row.
Kept find_cut(const Row& row, int64_t top_k, double top_p, float min_p) {
  static thread_local std::vector<Token> tokens;
  Kept kept;
  kept.min_p = min_p;
  const auto cut_after = [&](const Token& last) { kept.score = last.score, kept.last_id = last.id; };
  if (0 < top_k && top_k < row.vocab_size) {
    // A banned token, at -inf, is never left.
    const int64_t num_left = std::min(top_k, sums_from(row, kLeastFinite, false).count);
    const Token last = find_boundary(row, false, num_left, kLeastFinite, tokens);
    cut_after(last);
    if (top_p >= 1) return kept;
    gather(row, last.score, kInfinity, tokens);
    std::erase_if(tokens, [&](const Token& token) { return score_before(last, token); });
    int64_t total = 0;
    for (const Token& token : tokens) total += token.weight;
    cut_after(boundary(tokens, share(top_p, total), true));
  } else if (top_p < 1) {
    const int64_t needed = share(top_p, sums_from(row, kWeightless, true).weight);
    cut_after(find_boundary(row, true, needed, kWeightless, tokens));
  }
  return kept;
}

// The best sum of score and noise of the tokens begin … end − 1 that are kept. Some token of the row reaches `bound`.
Best find_best(const Row& row, const Noise& noise, const Kept& kept, float bound, int64_t begin, int64_t end) {
  const float kept_floor = kept.score == kMinusInfinity ? kMinusInfinity : raw_floor(row, kept.score);
  Lanes floor = fill(std::max(kept_floor, raw_floor(row, bound - kNoiseMax)));
  Best best;
  for (int64_t at = begin; at < end; at += kLanes) {
    const Lanes x = load_until(row.logits, at, end);
    if (bits_of(at_least(x, floor)) == 0) continue;
    const Lanes s = scores_of(row, x);
    const Words bits = noise.bits(at);
    uint32_t left = possible(s, bits, bound) & bits_of(at_least(s, fill(kept.score)));
    if (left != 0 && kept.min_p > 0) left &= bits_of(at_least(portable_exp(s), fill(kept.min_p)));
    if (left == 0) continue;
    float scores[kLanes], totals[kLanes];
    store(scores, s);
    store(totals, add(s, gumbel_of_bits(bits)));
    for (; left != 0; left &= left - 1) {
      const int lane = __builtin_ctz(left);
      if (scores[lane] == kept.score && at + lane > kept.last_id) continue;
      best.merge({totals[lane], at + lane});
    }
    if (best.total > bound) {
      bound = best.total;
      floor = fill(std::max(kept_floor, raw_floor(row, bound - kNoiseMax)));
    }
  }
  return best;
}

// One row on its way.
struct Choice {
  Row row;
  Noise noise;
  Peak peak;
  Kept kept;
  float bound = kNoiseMin;  // the likeliest token reaches it, whatever its noise
  Best best;

  Choice(const ChooseArguments& a, int64_t index)
      : row{a.logits.data + index * a.logits.stride, a.logits.vocab_size, a.temperatures[index], 0.0f},
        noise(a.keys + 2 * index) {}

  bool noisy() const { return peak.usable() && row.temperature > 0; }
  void cut(const ChooseArguments& a, int64_t index) {
    if (!noisy()) return;
    row.peak = peak.value;
    if (a.top_k != nullptr) kept = find_cut(row, a.top_k[index], a.top_p[index], a.min_p[index]);
    // Where scores are so small that several are 0, a cut may leave another of them than the likeliest.
    if (kept.score == kMinusInfinity) bound = noise.of(peak.id);
  }
  Best search(int64_t begin, int64_t end) const {
    return noisy() ? find_best(row, noise, kept, bound, begin, end) : Best{};
  }
  int64_t token_id() const { return !peak.usable() ? -1 : noisy() ? best.id : peak.id; }
};

void choose_whole_rows(const ChooseArguments& a) {
  parallel_for(a.logits.num_rows, [&](int64_t index) {
    Choice choice(a, index);
    choice.peak = find_peak(choice.row.logits, 0, choice.row.vocab_size);
    choice.cut(a, index);
    choice.best = choice.search(0, choice.row.vocab_size);
    a.token_ids[index] = choice.token_id();
  });
}

void choose_in_pieces(const ChooseArguments& a) {
  const int64_t num_rows = a.logits.num_rows, end = a.logits.vocab_size, num_pieces = (end + kPiece - 1) / kPiece;
  std::vector<Choice> choices;
  for (int64_t index = 0; index < num_rows; index++) choices.emplace_back(a, index);
  std::vector<Peak> peaks(num_rows * num_pieces);
  std::vector<Best> bests(num_rows * num_pieces);
  parallel_for(num_rows * num_pieces, [&](int64_t i) {
    const int64_t begin = i % num_pieces * kPiece;
    peaks[i] = find_peak(choices[i / num_pieces].row.logits, begin, std::min(begin + kPiece, end));
  });
  for (size_t i = 0; i < peaks.size(); i++) choices[i / num_pieces].peak.merge(peaks[i]);
  parallel_for(num_rows, [&](int64_t index) { choices[index].cut(a, index); });
  parallel_for(num_rows * num_pieces, [&](int64_t i) {
    const int64_t begin = i % num_pieces * kPiece;
    bests[i] = choices[i / num_pieces].search(begin, std::min(begin + kPiece, end));
  });
  for (size_t i = 0; i < bests.size(); i++) choices[i / num_pieces].best.merge(bests[i]);
  for (int64_t index = 0; index < num_rows; index++) a.token_ids[index] = choices[index].token_id();
}

}  // namespace

void choose(const ChooseArguments& a) {
  const bool few_rows = a.logits.num_rows < 2 * num_threads() && num_threads() > 1;
  few_rows && a.logits.vocab_size > kPiece ? choose_in_pieces(a) : choose_whole_rows(a);
}

void logprobs(const LogprobsArguments& a) {
  parallel_for(a.logits.num_rows, [&](int64_t index) {
    static thread_local std::vector<Token> tokens;
    const float* logits = a.logits.data + index * a.logits.stride;
    const int64_t vocab_size = a.logits.vocab_size, token_id = a.token_ids[index];
    const Peak peak = find_peak(logits, 0, vocab_size);
    a.ranks[index] = 0;
    if (!peak.usable()) return;
    const Row row{logits, vocab_size, 1.0f, peak.value};
    float lanes[kLanes];
    store(lanes, portable_log(fill(static_cast<float>(sums_from(row, kWeightless, true).weight) * 0x1p-42f)));
    const float log_sum = lanes[0];
    const auto number = [&](float logit) { return std::max((logit - peak.value) - log_sum, kLogprobFloor); };

    const Lanes own = fill(logits[token_id]);
    int64_t rank = 1;
    for (int64_t at = 0; at < vocab_size; at += kLanes) {
      const Lanes x = load_until(logits, at, vocab_size);
      rank += __builtin_popcount(bits_of(less(own, x)));
    }
    for (int64_t id = 0; id < token_id; id++) rank += logits[id] == logits[token_id];
    a.ranks[index] = rank;

    float* numbers = a.numbers + index * (1 + a.num_top);
    numbers[0] = number(logits[token_id]);
    if (a.num_top == 0) return;
    float least = kMinusInfinity;
    for (const float window : kWindows) {
      if (sums_from(row, window, false).count < a.num_top) continue;
      least = window;
      break;
    }
    gather(row, least, kInfinity, tokens);
    std::partial_sort(tokens.begin(), tokens.begin() + a.num_top, tokens.end(), logit_before);
    for (int64_t place = 0; place < a.num_top; place++) {
      a.top_ids[index * a.num_top + place] = tokens[place].id;
      numbers[1 + place] = number(tokens[place].logit);
    }
  });
}

void gumbels(const GumbelArguments& a) {
  for (int64_t at = 0; at < a.count; at += kLanes) {
    const int count = static_cast<int>(std::min<int64_t>(kLanes, a.count - at));
    uint32_t bits[kLanes] = {};
    std::copy_n(a.bits + at, count, bits);
    store_some(a.noise + at, gumbel_of_bits(load_words(bits)), count);
  }
}

}  // namespace tandem::TANDEM_LEVEL
