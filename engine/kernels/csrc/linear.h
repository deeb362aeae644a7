// Matrix products with packed weights: x [T, K] times Wᵀ, W [N, K].
//
// A packed weight is a row of *tiles*, each 32 columns of the result wide and K deep, in the order in which a product
// reads it: one stream from memory, no address arithmetic, whole cache lines.
//
//     bfloat16  [ceil(N / 32)][ceil(K / 2)][32][2]        float32  [ceil(N / 32)][K][32]
//
//                 column 0    column 1         column 31
//     k = 0, 1   [w00 w01] [w10 w11]  …  [w31,0 w31,1]     128 bytes; pairs along k, as dpbf16 eats them
//     k = 2, 3   [w02 w03] [w12 w13]  …
//        …                                                 what lies beyond N or K is 0
//
// A bfloat16 weight may also be *coded*, in three quarters of the bytes: linear_coded.h draws it.
//
// A gated weight's tile holds 16 columns of the gate and then the 16 matching ones of `up`, so that one tile yields 16
// finished elements. The layout is the same at every level.
#pragma once

#include <cstdint>

#include "levels.h"

namespace tandem {

constexpr int kTileColumns = 32;
constexpr int kGatedColumns = kTileColumns / 2;
constexpr int kLineBytes = 64;  // of a cache

// By number: the order of ops.ACTIVATIONS.
enum class Activation : int64_t { silu, gelu, gelu_tanh, relu };
constexpr int64_t kNumActivations = 4;

// What becomes of a sum s = x · w:
enum class Finish {
  write,     // out = scale · (s + bias), or softcap · tanh(that / softcap) where softcap > 0
  add,       // out += scale · (s + bias); out is float32
  gate,      // out = activation(s_gate + bias_gate) · (s_up + bias_up)
  activate,  // out = activation(s + bias)
};

// What a coded weight consists of.
struct CodedHead {
  uint8_t table[16];
  int32_t first_exception;
  int32_t num_exceptions;
  uint8_t unused[40];
};
static_assert(sizeof(CodedHead) == 64);

struct CodedException {
  uint32_t place;
  uint16_t bits;
  uint16_t unused;
};
static_assert(sizeof(CodedException) == 8);

constexpr int64_t kCodedPairBytes = 192;
constexpr int64_t coded_tile_bytes(int64_t depth) { return sizeof(CodedHead) + (depth + 3) / 4 * kCodedPairBytes; }

struct CodedWeight {
  const uint8_t* tiles = nullptr;  // null: the weight isn't coded
  int64_t tile_bytes = 0;
  const CodedException* exceptions = nullptr;
  int64_t num_exceptions = 0;
};

struct LinearArguments {
  Type type;  // of x and the weight
  const void* x;
  int64_t x_stride;  // elements from row to row, as for out
  int64_t num_rows;
  int64_t in_features;   // K
  int64_t out_features;  // columns of out: N, or half of what is multiplied for Finish::gate
  const void* weight;    // packed, or null where it is coded
  CodedWeight coded;
  const float* bias;     // one per packed column, or null
  Finish finish;
  Activation activation;
  float scale;
  float softcap;
  Type out_type;
  void* out;
  int64_t out_stride;
};

// hidden [T, K] = scale · rows of a table
struct EmbedArguments {
  Type type;
  const void* table;  // [V, K], or packed as above
  bool packed;
  const int32_t* token_ids;
  int64_t num_tokens;
  int64_t width;  // K
  float scale;
  float* hidden;
};

}  // namespace tandem

TANDEM_KERNEL(linear, const LinearArguments&)
TANDEM_KERNEL(embed, const EmbedArguments&)
