// Products of quads of int8, four neighbours along the summed dimension, summed in int32: exact at every level.
//
// A weight is stored as q + 128. Where the CPU multiplies unsigned with signed bytes it is used as it is, and a sum
// starts from −128 Σ p; elsewhere q is made of it, and p's sign moves to it: |p| · ±q, two of which fit an int16.
#pragma once

#include "choose_portable.h"

namespace tandem::TANDEM_LEVEL {

#if TANDEM_LEVEL_NUMBER == TANDEM_avx512bf16

constexpr bool kOffsetWeights = true;
inline Words load_quads(const char* from) { return _mm512_loadu_si512(from); }
struct Quad {
  Words p;
  explicit Quad(const int8_t* quad) {
    uint32_t word;
    std::memcpy(&word, quad, sizeof word);
    p = fill_words(word);
  }
};
inline Words add_quad_products(Words sum, Words q, const Quad& quad) { return _mm512_dpbusd_epi32(sum, q, quad.p); }

#elif TANDEM_LEVEL_NUMBER == TANDEM_avx512

constexpr bool kOffsetWeights = false;
inline Words load_quads(const char* from) {
  return _mm512_xor_si512(_mm512_loadu_si512(from), _mm512_set1_epi8(static_cast<char>(0x80)));
}
struct Quad {
  Words size;
  __mmask64 negative;
  explicit Quad(const int8_t* quad) {
    uint32_t word;
    std::memcpy(&word, quad, sizeof word);
    const Words p = fill_words(word);
    size = _mm512_abs_epi8(p);
    negative = _mm512_movepi8_mask(p);
  }
};
inline Words add_quad_products(Words sum, Words q, const Quad& quad) {
  const Words turned = _mm512_mask_sub_epi8(q, quad.negative, _mm512_setzero_si512(), q);
  return add(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(quad.size, turned), _mm512_set1_epi16(1)));
}

#else  // avx2

constexpr bool kOffsetWeights = false;
inline Words load_quads(const char* from) {
  return _mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)),
                          _mm256_set1_epi8(static_cast<char>(0x80)));
}
struct Quad {
  Words p, size;
  explicit Quad(const int8_t* quad) {
    uint32_t word;
    std::memcpy(&word, quad, sizeof word);
    p = fill_words(word);
    size = _mm256_abs_epi8(p);
  }
};
inline Words add_quad_products(Words sum, Words q, const Quad& quad) {
  const Words pairs = _mm256_maddubs_epi16(quad.size, _mm256_sign_epi8(q, quad.p));
  return add(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

#endif

inline Words load_integers(const int32_t* from) { return load_words(reinterpret_cast<const uint32_t*>(from)); }
inline void store_integers(int32_t* to, Words a) { std::memcpy(to, &a, sizeof a); }

}  // namespace tandem::TANDEM_LEVEL
