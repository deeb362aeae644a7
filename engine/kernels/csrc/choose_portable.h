// engine/portable.py and engine/noise.py over again, lane by lane: the same float32 operations in the same order, each
// rounded by itself, so the same bits at every level and as torch. No fused multiply-add may ever be used here.
//
//     log x    = e·ln2 + f − f²/2 + f³·P(f)     x = 2^e·(1 + f),  √½ ≤ 1 + f < √2
//     exp x    = 2^n·(1 + r + r²·Q(r))          n = round(x / ln2),  r = x − n·ln2
//     bits     = mix32(mix32(v ^ k0) + k1)
//     gumbel   = −log(−log(1 − u)),             u = min((float(bits) + ½)·2^-32, 1 − 2^-24)
//     weight   = round(exp(s)·2^42)             an integer, so that sums have no order
#pragma once

#include "lanes.h"

namespace tandem::TANDEM_LEVEL {

constexpr float kLog2E = 1.4426950216293335f;
constexpr float kLn2High = 0.693359375f;
constexpr float kLn2Low = -0.00021219444170128554f;
constexpr int32_t kRootHalfBits = 0x3F3504F3;
constexpr float kExpFloor = -87.0f;
constexpr float kBelowOne = 1.0f - 0x1p-24f;
constexpr float kUnits = 0x1p42f;
constexpr float kP[] = {0.33333316445350647f, -0.25000810623168945f, 0.2000228613615036f,  -0.16624553501605988f,
                        0.14181190729141235f, -0.13128754496574402f, 0.12881654500961304f, -0.07859619706869125f};
constexpr float kQ[] = {0.4999999403953552f, 0.1666652113199234f, 0.04166838899254799f, 0.008368710055947304f,
                        0.001381461275741458f};

// ------------------------------------------------------------------------------- 32-bit integers, a lane each

#if TANDEM_LEVEL_NUMBER >= TANDEM_avx512

using Words = __m512i;
inline Words fill_words(uint32_t value) { return _mm512_set1_epi32(static_cast<int>(value)); }
inline Words load_words(const uint32_t* from) { return _mm512_loadu_si512(from); }
inline Words add(Words a, Words b) { return _mm512_add_epi32(a, b); }
inline Words sub(Words a, Words b) { return _mm512_sub_epi32(a, b); }
inline Words mul(Words a, Words b) { return _mm512_mullo_epi32(a, b); }
inline Words exclusive_or(Words a, Words b) { return _mm512_xor_si512(a, b); }
template <int n>
inline Words shift_left(Words a) { return _mm512_slli_epi32(a, n); }
template <int n>
inline Words shift_right(Words a) { return _mm512_srli_epi32(a, n); }
template <int n>
inline Words shift_right_signed(Words a) { return _mm512_srai_epi32(a, n); }
inline Words words_of(Lanes a) { return _mm512_castps_si512(a); }
inline Lanes floats_of(Words a) { return _mm512_castsi512_ps(a); }
inline Words truncate(Lanes a) { return _mm512_cvttps_epi32(a); }
inline Lanes to_float(Words a) { return _mm512_cvtepi32_ps(a); }
inline Lanes unsigned_to_float(Words a) { return _mm512_cvtepu32_ps(a); }
inline Mask equal(Words a, Words b) { return _mm512_cmpeq_epi32_mask(a, b); }
inline Mask at_least(Lanes a, Lanes b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline Mask unordered(Lanes a, Lanes b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
inline uint32_t bits_of(Mask mask) { return mask; }  // one per lane

using Doubles = __m512d;
inline Doubles low_doubles(Lanes a) { return _mm512_cvtps_pd(low_half(a)); }
inline Doubles high_doubles(Lanes a) { return _mm512_cvtps_pd(high_half(a)); }
inline Words round_doubles(Doubles a) { return _mm512_castpd_si512(_mm512_add_pd(a, _mm512_set1_pd(0x1.8p52))); }
inline Words fill_longs(int64_t value) { return _mm512_set1_epi64(value); }
inline Words add_longs(Words a, Words b) { return _mm512_add_epi64(a, b); }
inline Words sub_longs(Words a, Words b) { return _mm512_sub_epi64(a, b); }
inline void store_longs(int64_t* to, Words a) { _mm512_storeu_si512(to, a); }

#else  // avx2

using Words = __m256i;
inline Words fill_words(uint32_t value) { return _mm256_set1_epi32(static_cast<int>(value)); }
inline Words load_words(const uint32_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline Words add(Words a, Words b) { return _mm256_add_epi32(a, b); }
inline Words sub(Words a, Words b) { return _mm256_sub_epi32(a, b); }
inline Words mul(Words a, Words b) { return _mm256_mullo_epi32(a, b); }
inline Words exclusive_or(Words a, Words b) { return _mm256_xor_si256(a, b); }
template <int n>
inline Words shift_left(Words a) { return _mm256_slli_epi32(a, n); }
template <int n>
inline Words shift_right(Words a) { return _mm256_srli_epi32(a, n); }
template <int n>
inline Words shift_right_signed(Words a) { return _mm256_srai_epi32(a, n); }
inline Words words_of(Lanes a) { return _mm256_castps_si256(a); }
inline Lanes floats_of(Words a) { return _mm256_castsi256_ps(a); }
inline Words truncate(Lanes a) { return _mm256_cvttps_epi32(a); }
inline Lanes to_float(Words a) { return _mm256_cvtepi32_ps(a); }
// Both halves are exact, so the sum is the only rounding.
inline Lanes unsigned_to_float(Words a) {
  const Lanes high = to_float(shift_right<16>(a));
  const Lanes low = to_float(_mm256_and_si256(a, fill_words(0xFFFF)));
  return add(mul(high, fill(65536.0f)), low);
}
inline Mask equal(Words a, Words b) { return _mm256_castsi256_ps(_mm256_cmpeq_epi32(a, b)); }
inline Mask at_least(Lanes a, Lanes b) { return _mm256_cmp_ps(a, b, _CMP_GE_OQ); }
inline Mask unordered(Lanes a, Lanes b) { return _mm256_cmp_ps(a, b, _CMP_UNORD_Q); }
inline uint32_t bits_of(Mask mask) { return static_cast<uint32_t>(_mm256_movemask_ps(mask)); }

using Doubles = __m256d;
inline Doubles low_doubles(Lanes a) { return _mm256_cvtps_pd(_mm256_castps256_ps128(a)); }
inline Doubles high_doubles(Lanes a) { return _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1)); }
inline Words round_doubles(Doubles a) { return _mm256_castpd_si256(_mm256_add_pd(a, _mm256_set1_pd(0x1.8p52))); }
inline Words fill_longs(int64_t value) { return _mm256_set1_epi64x(value); }
inline Words add_longs(Words a, Words b) { return _mm256_add_epi64(a, b); }
inline Words sub_longs(Words a, Words b) { return _mm256_sub_epi64(a, b); }
inline void store_longs(int64_t* to, Words a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), a); }

#endif

constexpr uint32_t kLaneNumbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
// first, first + 1, …
inline Words counting_from(int64_t first) {
  return add(load_words(kLaneNumbers), fill_words(static_cast<uint32_t>(first)));
}

// -------------------------------------------------------------------------------------------- engine/portable.py

inline Lanes negate(Lanes a) { return mul(a, fill(-1.0f)); }

struct Split {
  Words exponent;
  Lanes fraction;
};
// x = 2^exponent · (1 + fraction)
inline Split split(Lanes x) {
  const Words bits = words_of(x);
  const Words exponent = shift_right_signed<23>(sub(bits, fill_words(kRootHalfBits)));
  return {exponent, sub(floats_of(sub(bits, shift_left<23>(exponent))), fill(1.0f))};
}

inline Lanes log_sum(Split x) {
  const Lanes e = to_float(x.exponent), f = x.fraction;
  const Lanes square = mul(f, f);
  Lanes series = mul(f, fill(kP[7]));
  for (int i = 6; i >= 1; i--) series = mul(add(series, fill(kP[i])), f);
  Lanes tail = mul(mul(add(series, fill(kP[0])), f), square);
  tail = sub(tail, mul(square, fill(0.5f)));
  tail = add(tail, mul(e, fill(kLn2Low)));
  return add(add(f, tail), mul(e, fill(kLn2High)));
}

inline Lanes portable_log(Lanes x) { return log_sum(split(x)); }

inline Lanes neg_log1p_neg(Lanes u) {
  Split x = split(sub(fill(1.0f), u));
  x.fraction = select(equal(x.exponent, fill_words(0)), negate(u), x.fraction);
  return negate(log_sum(x));
}

inline Lanes portable_exp(Lanes x) {
  x = max(x, fill(kExpFloor));
  const Lanes power = round_nearest(mul(x, fill(kLog2E)));
  const Lanes r = sub(sub(x, mul(power, fill(kLn2High))), mul(power, fill(kLn2Low)));
  Lanes series = mul(r, fill(kQ[4]));
  for (int i = 3; i >= 1; i--) series = mul(add(series, fill(kQ[i])), r);
  series = add(add(mul(mul(add(series, fill(kQ[0])), r), r), r), fill(1.0f));
  return mul(series, floats_of(shift_left<23>(add(truncate(power), fill_words(127)))));
}

// Weights of exponentials ≤ 1, as int64 in the order of the lanes, in two halves. A double holds such a product
// exactly, and adding 1.5·2^52 rounds it to the nearest even integer, which then stands in the low bits.
struct Weights {
  Words low, high;
};
inline Weights weights_of(Lanes exponentials) {
  const Lanes scaled = mul(exponentials, fill(kUnits));
  const Words offset = round_doubles(low_doubles(zero()));
  return {sub_longs(round_doubles(low_doubles(scaled)), offset),
          sub_longs(round_doubles(high_doubles(scaled)), offset)};
}
inline void store_weights(int64_t* to, Weights weights) {
  store_longs(to, weights.low);
  store_longs(to + kLanes / 2, weights.high);
}

// ----------------------------------------------------------------------------------------------- engine/noise.py

inline Words mix32(Words x) {
  x = mul(exclusive_or(x, shift_right<16>(x)), fill_words(0x21F0AAADu));
  x = mul(exclusive_or(x, shift_right<15>(x)), fill_words(0x735A2D97u));
  return exclusive_or(x, shift_right<15>(x));
}

inline Words uniform_bits(Words k0, Words k1, Words ids) { return mix32(add(mix32(exclusive_or(ids, k0)), k1)); }

inline Lanes gumbel_of_bits(Words bits) {
  Lanes u = mul(add(unsigned_to_float(bits), fill(0.5f)), fill(0x1p-32f));
  u = min(u, fill(kBelowOne));
  return negate(portable_log(neg_log1p_neg(u)));
}

}  // namespace tandem::TANDEM_LEVEL
