// Products of bfloat16 pairs by AMX: up to 32 rows times 32 columns, sums in four tiles of 16 x 16.
//
// Panels of weights already have the order that AMX reads: a row of a tile is a word of 16 columns. A tile holds 16 words
// of the sum; what is left over is padded with zeros, which add exact zeros. The processor adds the two products of each
// pair in one order for any number of rows. https://www.intel.com/content/www/us/en/docs/intrinsics-guide (AMX-BF16)

#pragma once

#if defined(__AMX_BF16__)

#include "tile.h"

namespace lookonce {

constexpr int kAmxRows = 32;

// The argument of `ldtilecfg`.
struct TileShapes {
  uint8_t palette = 1;
  uint8_t first_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t num_rows[16] = {};
};

// Computes sums [num_rows, 32] = left x right for 1 … 32 rows and operands of one segment with two vectors, which lie
// `of.right_stride` words apart for each step. `sums_stride` counts floats.
inline void multiply_by_amx(int64_t num_rows, float* sums, int64_t sums_stride, const Operands<BFloat16>& of) {
  constexpr int64_t kSteps = 16;
  const bool has_second = num_rows > 16;
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) shapes.row_bytes[tile] = 64;
  // Tiles 0 and 1: sums of the first rows; 2 and 3: of the second; 4 and 5: left sides; 6 and 7: right sides.
  shapes.num_rows[0] = shapes.num_rows[1] = shapes.num_rows[4] = static_cast<uint8_t>(std::min<int64_t>(num_rows, 16));
  shapes.num_rows[2] = shapes.num_rows[3] = shapes.num_rows[5] = static_cast<uint8_t>(has_second ? num_rows - 16 : 1);
  shapes.num_rows[6] = shapes.num_rows[7] = kSteps;
  _tile_loadconfig(&shapes);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const auto add = [&](const uint16_t* left, int64_t left_bytes, const uint32_t* one, const uint32_t* other,
                       int64_t right_bytes) {
    _tile_loadd(6, one, right_bytes);
    _tile_loadd(7, other, right_bytes);
    _tile_loadd(4, left, left_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (!has_second) return;
    _tile_loadd(5, reinterpret_cast<const char*>(left) + 16 * left_bytes, left_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  };
  const Segment& all = of.segments[0];
  const uint32_t* next = of.next[0];
  int64_t step = 0;
  for (; step + kSteps <= all.num_steps; step += kSteps) {
    for (int64_t i = 0; next != nullptr && i < kSteps; ++i, next += of.next_stride) __builtin_prefetch(next, 0, 2);
    const int64_t at = step * of.right_stride;
    add(of.left + 2 * step, of.left_stride * 2, all.right[0] + at, all.right[1] + at, of.right_stride * 4);
  }
  if (const int64_t rest = all.num_steps - step; rest > 0) {
    alignas(64) uint16_t left[kAmxRows * 2 * kSteps] = {};
    alignas(64) uint32_t right[2][kSteps * kLanes] = {};
    for (int64_t r = 0; r < num_rows; ++r) {
      const uint16_t* from = of.left + r * of.left_stride + 2 * step;
      std::copy(from, from + 2 * rest, left + r * 2 * kSteps);
    }
    for (int64_t v = 0; v < 2; ++v) {
      for (int64_t s = 0; s < rest; ++s) {
        const uint32_t* from = all.right[v] + (step + s) * of.right_stride;
        std::copy(from, from + kLanes, right[v] + s * kLanes);
      }
    }
    add(left, 4 * kSteps, right[0], right[1], 4 * kLanes);
  }
  _tile_stored(0, sums, sums_stride * 4);
  _tile_stored(1, sums + kLanes, sums_stride * 4);
  if (has_second) {
    _tile_stored(2, sums + 16 * sums_stride, sums_stride * 4);
    _tile_stored(3, sums + 16 * sums_stride + kLanes, sums_stride * 4);
  }
  // Otherwise the system would save and restore the tiles whenever it switches threads.
  _tile_release();
}

}  // namespace lookonce

#endif
