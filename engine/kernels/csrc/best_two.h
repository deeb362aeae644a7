// What comes first and second in each row of logits, by score plus noise: a draft's guess, its runner-up, and how
// narrowly the one won.
//
// At T > 0 tokens are ordered by (l − max l) / T + g(id), at T = 0 by l; of equal ones the lower column is first.
// engine/guessing.py says the same in torch.
#pragma once

#include "choose.h"

namespace tandem {

constexpr int64_t kNumbersOfTwo = 3;
constexpr double kMarginUnits = 1 << 20;
constexpr double kMostMargin = 1e6;

struct BestTwoArguments {
  Logits logits;
  const int32_t* ids;         // the token of each column, by which noise is made; null: the column's number
  const float* temperatures;  // 0: greedy
  const int64_t* keys;        // [rows, 2], each below 2^32
  // Out, per row: first id, second id, first minus second in units of 2^-20. −1 for a first where the highest logit
  // isn't finite or one is NaN, −1 for a second where no other logit is above −inf.
  int64_t* numbers;
};

}  // namespace tandem

TANDEM_KERNEL(best_two, const BestTwoArguments&)
