// The token of each row of the output head without all of the head: see screen.cpp.
//
// A screen is a copy of the head in int8, w ≈ ŵ = scale · q, half of its bytes or a quarter. Like the head itself
// (linear.h) it is a row of tiles, 32 columns wide and K deep, each followed by what is known of its columns:
//
//     uint8  [ceil(K / 4)][32][4]    q + 128, quads along k; beyond N or K, q = 0
//     f32    [32]                    scale
//     f32    [32]                    at least ‖w − ŵ‖
//     f32    [32]                    at least ‖w‖ + ‖w − ŵ‖, and so at least ‖w‖ and ‖ŵ‖
#pragma once

#include <cstdint>

#include "choose.h"
#include "levels.h"
#include "linear.h"

namespace tandem {

constexpr int kQuad = 4;
constexpr int64_t kScreenStepBytes = kQuad * kTileColumns;
constexpr int64_t kScreenFactsBytes = 3 * kTileColumns * sizeof(float);
constexpr int kMostWeight = 127;              // of |q|
constexpr int kWeightOffset = 128;
constexpr int64_t kMaxScreenDepth = 1 << 16;  // of K; what the proof of the bounds assumes

constexpr int64_t screen_tile_bytes(int64_t depth) { return (depth + kQuad - 1) / kQuad * kScreenStepBytes + kScreenFactsBytes; }

struct ScreenArguments {
  LinearArguments head;  // Finish::write of float32 logits
  ChooseArguments choices;  // of the same logits, without cuts
  const char* tiles;     // the screen
  int64_t* num_skipped;  // in and out, 0 at first: so many of the next calls multiply all, as screening didn't pay
};

}  // namespace tandem

TANDEM_KERNEL(choose_head, const ScreenArguments&)
