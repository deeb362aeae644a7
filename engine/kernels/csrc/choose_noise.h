// The noise of one row's tokens, and which of them it can make win; engine/noise.py and choose.cpp say how.
#pragma once

#include "choose_row.h"

namespace tandem::TANDEM_LEVEL {

constexpr float kNoiseMin = -2.8116f, kNoiseMax = 22.875f;
constexpr float kMargin = 1.001f;

struct Noise {
  Words k0, k1;

  explicit Noise(const int64_t* key)
      : k0(fill_words(static_cast<uint32_t>(key[0]))), k1(fill_words(static_cast<uint32_t>(key[1]))) {}
  Words bits(int64_t first_id) const { return uniform_bits(k0, k1, counting_from(first_id)); }
  float of(int64_t id) const {
    float noise[kLanes];
    store(noise, gumbel_of_bits(bits(id)));
    return noise[0];
  }
};

// Which lanes can reach a sum of `bound`. 2^y ≤ 2^⌊y⌋ · (1 + frac y), and the right side is what y · 2^23 reads as,
// once the exponent's bias is added.
inline uint32_t possible(Lanes scores, Words bits, float bound) {
  Lanes reach = mul(sub(scores, fill(bound)), fill(static_cast<float>(0x1p23 / 0.6931471805599453)));
  reach = max(add(reach, fill(127 * 0x1p23f)), zero());
  reach = add(mul(floats_of(truncate(reach)), fill(kMargin * 0x1p32f)), fill(1.0f));
  return bits_of(at_least(reach, unsigned_to_float(bits)));
}

}  // namespace tandem::TANDEM_LEVEL
