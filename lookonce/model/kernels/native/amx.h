// Products by AMX: of bfloat16 pairs, 32 rows times 32 columns at most with sums in four tiles, and of integers.
//
// Panels of weights, keys and values already have the order that AMX reads: a row of a tile is a word of 16 columns. A
// tile holds 16 words of the sum, or 8 where the right side has many segments, which are groups of 16 keys. What is left
// over is padded with zeros, which add exact zeros. The processor adds the products of a tile in one order for any number
// of rows. https://www.intel.com/content/www/us/en/docs/intrinsics-guide (AMX-BF16, AMX-INT8)

#pragma once

#if defined(__AMX_BF16__)

#include <algorithm>

#include "tile.h"

namespace lookonce {

// The argument of `ldtilecfg`.
struct TileShapes {
  uint8_t palette = 1;
  uint8_t first_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t num_rows[16] = {};
};

// Rows, and bytes of a row, of a whole tile.
constexpr int64_t kTileSide = 16, kTileBytes = 64;

// The tiles of a thread for some products, which mostly have one shape. No other code uses tiles meanwhile.
class AmxTiles {
 public:
  AmxTiles() = default;
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;

  // Otherwise the system would save and restore the tiles whenever it switches threads.
  ~AmxTiles() {
    if (num_rows_ != 0) _tile_release();
  }

  // Computes sums [num_rows, num_vectors · 16] = left × right, or adds it to them, for 1 … 32 rows.
  void multiply(int64_t num_rows, int64_t num_vectors, float* sums, int64_t sums_stride, const Operands<BFloat16>& of,
                bool adds) {
    if (of.num_segments > 1) {
      add_segments<8>(num_rows, num_vectors == 2, sums, sums_stride, of, adds);
    } else {
      add_segments<16>(num_rows, num_vectors == 2, sums, sums_stride, of, adds);
    }
  }

  // Computes sums [16, 32] of the lower and of the upper bytes of 1 … 16 rows of integers, times `right`, whose words
  // [16 · num_tiles, 32] hold four factors of one column each, which are unsigned. The stride counts bytes.
  void multiply_bytes(int64_t num_rows, const int8_t* lower, const int8_t* upper, int64_t left_stride,
                      const uint32_t* right, int64_t num_tiles, int32_t* sums_of_lower, int32_t* sums_of_upper) {
    set_shapes(num_rows, num_rows, kTileSide);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    constexpr int64_t kStride = kTileColumns * 4;
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      _tile_loadd(6, right + tile * kTileSide * kTileColumns, kStride);
      _tile_loadd(7, right + tile * kTileSide * kTileColumns + kLanes, kStride);
      _tile_loadd(4, lower + tile * kTileBytes, left_stride);
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 4, 7);
      _tile_loadd(5, upper + tile * kTileBytes, left_stride);
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
    }
    _tile_stored(0, sums_of_lower, kStride);
    _tile_stored(1, sums_of_lower + kLanes, kStride);
    _tile_stored(2, sums_of_upper, kStride);
    _tile_stored(3, sums_of_upper + kLanes, kStride);
  }

 private:
  // Tiles 0 and 1: sums of the first rows; 2 and 3: of the others; 4 and 5: left sides; 6 and 7: right sides.
  void set_shapes(int64_t num_rows, int64_t num_others, int64_t num_steps) {
    if (num_rows == num_rows_ && num_others == num_others_ && num_steps == num_steps_) return;
    num_rows_ = num_rows;
    num_others_ = num_others;
    num_steps_ = num_steps;
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) shapes.row_bytes[tile] = kTileBytes;
    shapes.row_bytes[4] = shapes.row_bytes[5] = static_cast<uint16_t>(4 * num_steps);
    shapes.num_rows[0] = shapes.num_rows[1] = shapes.num_rows[4] = static_cast<uint8_t>(num_rows);
    shapes.num_rows[2] = shapes.num_rows[3] = shapes.num_rows[5] = static_cast<uint8_t>(num_others);
    shapes.num_rows[6] = shapes.num_rows[7] = static_cast<uint8_t>(num_steps);
    _tile_loadconfig(&shapes);
  }

  template <int64_t kSteps>
  void add_segments(int64_t num_rows, bool has_other_vector, float* sums, int64_t sums_stride,
                    const Operands<BFloat16>& of, bool adds) {
    set_shapes(std::min(num_rows, kTileSide), std::max<int64_t>(num_rows - kTileSide, 1), kSteps);
    const bool has_second = num_rows > kTileSide;
    float* second = sums + kTileSide * sums_stride;
    const int64_t sums_bytes = sums_stride * 4;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (adds) {
      _tile_loadd(0, sums, sums_bytes);
      if (has_other_vector) _tile_loadd(1, sums + kLanes, sums_bytes);
      if (has_second) _tile_loadd(2, second, sums_bytes);
      if (has_second && has_other_vector) _tile_loadd(3, second + kLanes, sums_bytes);
    }
    const auto add = [&](const uint16_t* left, int64_t left_bytes, const uint32_t* one, const uint32_t* other,
                         int64_t right_bytes) {
      _tile_loadd(6, one, right_bytes);
      _tile_loadd(4, left, left_bytes);
      _tile_dpbf16ps(0, 4, 6);
      if (has_other_vector) {
        _tile_loadd(7, other, right_bytes);
        _tile_dpbf16ps(1, 4, 7);
      }
      if (!has_second) return;
      _tile_loadd(5, reinterpret_cast<const char*>(left) + kTileSide * left_bytes, left_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if (has_other_vector) _tile_dpbf16ps(3, 5, 7);
    };
    const uint16_t* left = of.left;
    const uint32_t* next[2] = {of.next[0], of.next[1]};
    for (const Segment* segment = of.segments; segment < of.segments + of.num_segments; ++segment) {
      int64_t step = 0;
      for (; step + kSteps <= segment->num_steps; step += kSteps) {
        for (const uint32_t*& line : next) {
          if (line == nullptr) continue;
          for (int64_t i = 0; i < kSteps; ++i, line += of.next_stride) __builtin_prefetch(line, 0, 2);
        }
        const int64_t at = step * of.right_stride;
        add(left + 2 * step, of.left_stride * 2, segment->right[0] + at, segment->right[1] + at, of.right_stride * 4);
      }
      if (const int64_t rest = segment->num_steps - step; rest > 0) {
        alignas(64) uint16_t padded_left[2 * kTileSide * 2 * kSteps] = {};
        alignas(64) uint32_t right[kTileVectors][kSteps * kLanes] = {};
        for (int64_t r = 0; r < num_rows; ++r) {
          const uint16_t* from = left + r * of.left_stride + 2 * step;
          std::copy(from, from + 2 * rest, padded_left + r * 2 * kSteps);
        }
        for (int64_t v = 0; v < (has_other_vector ? 2 : 1); ++v) {
          for (int64_t s = 0; s < rest; ++s) {
            const uint32_t* from = segment->right[v] + (step + s) * of.right_stride;
            std::copy(from, from + kLanes, right[v] + s * kLanes);
          }
        }
        add(padded_left, 4 * kSteps, right[0], right[1], 4 * kLanes);
      }
      left += 2 * segment->num_steps;
    }
    _tile_stored(0, sums, sums_bytes);
    if (has_other_vector) _tile_stored(1, sums + kLanes, sums_bytes);
    if (has_second) _tile_stored(2, second, sums_bytes);
    if (has_second && has_other_vector) _tile_stored(3, second + kLanes, sums_bytes);
  }

  // The shapes that are set; 0: none.
  int64_t num_rows_ = 0, num_others_ = 0, num_steps_ = 0;
};

}  // namespace lookonce

#endif
