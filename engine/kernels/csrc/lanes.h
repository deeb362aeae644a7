// Vectors of float32 for one instruction set; the rest of the kernels is written once, in terms of these.
//
// Every kernel source is compiled once per level, with TANDEM_LEVEL naming it (build.py):
//
//     level         lanes   a product of bfloat16 pairs
//     avx512bf16    16      one dpbf16 instruction: both products and both sums, rounded as the instruction does
//     avx512        16      both halves widened, two fused multiply-adds
//     avx2          8       the same
//
// The levels' bits differ from each other; within one level they depend on nothing but the operands, because each
// operation below is one fixed sequence of instructions, and the compiler may not contract or reorder (no -ffast-math).
//
// A bfloat16 *pair* is two neighbours along the summed dimension, in one 32-bit word: the low half comes first.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define TANDEM_JOIN_(a, b) a##b
#define TANDEM_JOIN(a, b) TANDEM_JOIN_(a, b)
#define TANDEM_avx2 1
#define TANDEM_avx512 2
#define TANDEM_avx512bf16 3
#define TANDEM_LEVEL_NUMBER TANDEM_JOIN(TANDEM_, TANDEM_LEVEL)

namespace tandem {

// The bits of a bfloat16: the upper half of a float32.
struct bf16 {
  uint16_t bits;
};

namespace TANDEM_LEVEL {

inline float widen(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

#if TANDEM_LEVEL_NUMBER >= TANDEM_avx512

constexpr int kLanes = 16;
using Lanes = __m512;
using Mask = __mmask16;

inline Lanes zero() { return _mm512_setzero_ps(); }
inline Lanes fill(float value) { return _mm512_set1_ps(value); }
inline Lanes load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Lanes value) { _mm512_storeu_ps(to, value); }
inline Lanes load(const bf16* from) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline Lanes add(Lanes a, Lanes b) { return _mm512_add_ps(a, b); }
inline Lanes sub(Lanes a, Lanes b) { return _mm512_sub_ps(a, b); }
inline Lanes mul(Lanes a, Lanes b) { return _mm512_mul_ps(a, b); }
inline Lanes div(Lanes a, Lanes b) { return _mm512_div_ps(a, b); }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }  // a * b + c
inline Lanes max(Lanes a, Lanes b) { return _mm512_max_ps(a, b); }
inline Lanes min(Lanes a, Lanes b) { return _mm512_min_ps(a, b); }
inline Lanes abs(Lanes a) { return _mm512_abs_ps(a); }
inline Lanes round_nearest(Lanes a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// x * 2^n for whole n; n within the exponents of normal numbers
inline Lanes scale_by_power(Lanes x, Lanes n) {
  const __m512i exponent = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
  return _mm512_mul_ps(x, _mm512_castsi512_ps(exponent));
}
inline Mask less(Lanes a, Lanes b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline Lanes select(Mask mask, Lanes yes, Lanes no) { return _mm512_mask_blend_ps(mask, no, yes); }
// lanes first … kLanes - 1 are 0, the lanes below `first` are kept
inline Mask below(int first) {
  return first >= kLanes ? Mask(0xFFFF) : first <= 0 ? Mask(0) : Mask((1u << first) - 1);
}
// whatever isn't finite becomes 0
inline Lanes finite_or_zero(Lanes a) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(_mm512_sub_ps(a, a), zero(), _CMP_EQ_OQ), a);
}

inline __m256 low_half(Lanes a) { return _mm512_castps512_ps256(a); }
inline __m256 high_half(Lanes a) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1)); }

#if TANDEM_LEVEL_NUMBER == TANDEM_avx512bf16
inline void store(bf16* to, Lanes value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(value));
}
#else
// round to nearest even; a NaN stays one
inline void store(bf16* to, Lanes value) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  const __m512i kept = _mm512_srli_epi32(_mm512_mask_blend_epi32(is_nan, rounded, quiet), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(kept));
}
#endif

// kLanes pairs of bfloat16 as they lie in memory
using Pairs = __m512i;
inline Pairs load_pairs(const bf16* from) { return _mm512_loadu_si512(from); }
inline Pairs fill_pair(const bf16* pair) {
  int32_t word;
  std::memcpy(&word, pair, sizeof word);
  return _mm512_set1_epi32(word);
}
inline Lanes first_of(Pairs pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline Lanes second_of(Pairs pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
}

#else  // avx2

constexpr int kLanes = 8;
using Lanes = __m256;
using Mask = __m256;  // all ones or all zeros per lane

inline Lanes zero() { return _mm256_setzero_ps(); }
inline Lanes fill(float value) { return _mm256_set1_ps(value); }
inline Lanes load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(float* to, Lanes value) { _mm256_storeu_ps(to, value); }
inline Lanes load(const bf16* from) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline Lanes add(Lanes a, Lanes b) { return _mm256_add_ps(a, b); }
inline Lanes sub(Lanes a, Lanes b) { return _mm256_sub_ps(a, b); }
inline Lanes mul(Lanes a, Lanes b) { return _mm256_mul_ps(a, b); }
inline Lanes div(Lanes a, Lanes b) { return _mm256_div_ps(a, b); }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm256_fmadd_ps(a, b, c); }
inline Lanes max(Lanes a, Lanes b) { return _mm256_max_ps(a, b); }
inline Lanes min(Lanes a, Lanes b) { return _mm256_min_ps(a, b); }
inline Lanes abs(Lanes a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline Lanes round_nearest(Lanes a) {
  return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Lanes scale_by_power(Lanes x, Lanes n) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(exponent));
}
inline Mask less(Lanes a, Lanes b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
inline Lanes select(Mask mask, Lanes yes, Lanes no) { return _mm256_blendv_ps(no, yes, mask); }
inline Mask below(int first) {
  const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(first), index));
}
inline Lanes finite_or_zero(Lanes a) {
  return _mm256_and_ps(_mm256_cmp_ps(_mm256_sub_ps(a, a), zero(), _CMP_EQ_OQ), a);
}

inline void store(bf16* to, Lanes value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  const __m256i kept = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(kept, kept), 0b11011000);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
}

using Pairs = __m256i;
inline Pairs load_pairs(const bf16* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline Pairs fill_pair(const bf16* pair) {
  int32_t word;
  std::memcpy(&word, pair, sizeof word);
  return _mm256_set1_epi32(word);
}
inline Lanes first_of(Pairs pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline Lanes second_of(Pairs pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
}

#endif

// sum + a.first * b.first + a.second * b.second
inline Lanes add_pair_products(Lanes sum, Pairs a, Pairs b) {
#if TANDEM_LEVEL_NUMBER == TANDEM_avx512bf16
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
  return fma(second_of(a), second_of(b), fma(first_of(a), first_of(b), sum));
#endif
}

// The first n ≤ kLanes elements; the other lanes are 0 and their memory isn't touched.
template <class T>
inline Lanes load_some(const T* from, int n) {
  T padded[kLanes] = {};
  std::memcpy(padded, from, sizeof(T) * n);
  return load(padded);
}
template <class T>
inline void store_some(T* to, Lanes value, int n) {
  T padded[kLanes];
  store(padded, value);
  std::memcpy(to, padded, sizeof(T) * n);
}

// A fixed tree over the lanes.
inline float sum_of(Lanes a) {
#if TANDEM_LEVEL_NUMBER >= TANDEM_avx512
  const __m256 eight = _mm256_add_ps(low_half(a), high_half(a));
#else
  const __m256 eight = a;
#endif
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float peak_of(Lanes a) {
#if TANDEM_LEVEL_NUMBER >= TANDEM_avx512
  const __m256 eight = _mm256_max_ps(low_half(a), high_half(a));
#else
  const __m256 eight = a;
#endif
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// e^x to about 1e-7 of the result for -87 ≤ x ≤ 88; below, e^-87; above, e^88. A NaN stays one: min and max return
// their second operand where one isn't a number.
//     e^x = 2^n · e^r,  n = round(x / ln2),  r = x - n·ln2 in two parts,  |r| ≤ ln2 / 2,  e^r by Taylor to r^7
inline Lanes exp(Lanes x) {
  x = min(fill(88.0f), max(fill(-87.0f), x));
  const Lanes n = round_nearest(mul(x, fill(1.44269504f)));
  Lanes r = fma(n, fill(-0.693359375f), x);
  r = fma(n, fill(2.12194440e-4f), r);
  Lanes series = fill(1.0f / 5040);
  series = fma(series, r, fill(1.0f / 720));
  series = fma(series, r, fill(1.0f / 120));
  series = fma(series, r, fill(1.0f / 24));
  series = fma(series, r, fill(1.0f / 6));
  series = fma(series, r, fill(0.5f));
  series = fma(series, r, fill(1.0f));
  series = fma(series, r, fill(1.0f));
  return scale_by_power(series, n);
}

}  // namespace TANDEM_LEVEL
}  // namespace tandem
