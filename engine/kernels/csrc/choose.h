// A token for each row of logits, and log-probabilities; engine/sampler.py, engine/processors.py and engine/logprobs.py
// say what exactly. All of it has the same bits at every level and as torch gives them.
#pragma once

#include <cstdint>

#include "levels.h"

namespace tandem {

struct Logits {
  const float* data;
  int64_t stride;  // elements from row to row
  int64_t num_rows;
  int64_t vocab_size;  // at most 2^20, what a sum of weights may hold
};

struct ChooseArguments {
  Logits logits;
  const float* temperatures;  // 0: greedy
  const int64_t* keys;        // [rows, 2], each below 2^32
  const int64_t* top_k;       // these three or none; 0 or less: no limit
  const double* top_p;        // 1: no limit
  const float* min_p;         // 0: no limit
  int64_t* token_ids;         // out; -1 where the highest logit isn't finite or one is NaN
};

struct LogprobsArguments {
  Logits logits;
  const int64_t* token_ids;  // within the vocabulary
  int64_t num_top;           // at most the vocabulary
  float* numbers;            // out [rows, 1 + num_top]: the token's, then the likeliest ids', best first
  int64_t* ranks;            // out: the token's, from 1; 0 where the highest logit isn't finite or one is NaN
  int64_t* top_ids;          // out [rows, num_top]
};

struct GumbelArguments {
  const uint32_t* bits;
  int64_t count;
  float* noise;  // out
};

}  // namespace tandem

TANDEM_KERNEL(choose, const ChooseArguments&)
TANDEM_KERNEL(logprobs, const LogprobsArguments&)
TANDEM_KERNEL(gumbels, const GumbelArguments&)
