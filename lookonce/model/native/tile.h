// The matrix product that all kernels use: a few rows times 32 (or 16) columns, with sums in registers.
//
// The left side is read as rows of 32-bit words, and each word is broadcast to all lanes. A word in a vector of the right
// side holds the matching factors of one column: one float32, or two bfloat16 that follow each other along the sum. Each
// element of the result is one sum in a fixed order for any number of rows, so a token's numbers do not depend on the
// batch.

#pragma once

#include <array>
#include <utility>

#include "lanes.h"

namespace lookonce {

#if defined(__AVX512F__)
// 24 sums, two vectors of the right side and one broadcast word fit into 32 registers.
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 4;
#endif
constexpr int kTileVectors = 2;
constexpr int64_t kTileColumns = kTileVectors * kLanes;

// A part of the right side: words [num_steps, 16] for each vector of 16 columns.
struct Segment {
  const uint32_t* right[kTileVectors];
  int64_t num_steps;
};

struct Operands {
  // Words [rows, steps of all segments].
  const uint32_t* left;
  int64_t left_stride;
  const Segment* segments;
  int64_t num_segments;
  int64_t right_stride;
  // Addresses to prefetch; null: nothing. Each step requests one cache line at each and advances by `next_stride` words.
  const uint32_t* next[2] = {nullptr, nullptr};
  int64_t next_stride = 0;
};

// Computes sums [kRows, kVectors · 16] = left × right; `adds`: added to the present sums.
template <typename Type, int kRows, int kVectors>
void multiply(float* sums, int64_t sums_stride, const Operands& of, bool adds) {
  Floats total[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      total[r][v] = adds ? load_floats(sums + r * sums_stride + v * kLanes) : Floats{};
    }
  }
  // One pointer for three rows, because one per row would need more registers than there are.
  const int64_t stride = of.left_stride;
  const uint32_t* left[(kRows + 2) / 3];
  for (int i = 0; i < (kRows + 2) / 3; ++i) left[i] = of.left + 3 * i * stride;
  const uint32_t* next[2] = {of.next[0], of.next[1]};
  for (const Segment* segment = of.segments; segment < of.segments + of.num_segments; ++segment) {
    const uint32_t* right[kVectors];
    for (int v = 0; v < kVectors; ++v) right[v] = segment->right[v];
    for (int64_t step = 0; step < segment->num_steps; ++step) {
      for (const uint32_t*& line : next) {
        if (line == nullptr) continue;
        __builtin_prefetch(line, 0, 2);
        line += of.next_stride;
      }
      Words columns[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        columns[v] = load_words(right[v]);
        right[v] += of.right_stride;
      }
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        const Words word = all_lanes(left[r / 3][(r % 3) * stride]);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) total[r][v] = Type::add_products(total[r][v], word, columns[v]);
      }
      for (int i = 0; i < (kRows + 2) / 3; ++i) ++left[i];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) store_floats(sums + r * sums_stride + v * kLanes, total[r][v]);
  }
}

using Multiply = void (*)(float*, int64_t, const Operands&, bool);

template <typename Type, int kVectors, int... kRows>
constexpr std::array<Multiply, sizeof...(kRows)> multiplies(std::integer_sequence<int, kRows...>) {
  return {&multiply<Type, kRows + 1, kVectors>...};
}

// Calls the `multiply` above for `num_rows` in 1 … kTileRows and `num_vectors` in 1 … kTileVectors.
template <typename Type>
inline void multiply(int64_t num_rows, int64_t num_vectors, float* sums, int64_t sums_stride, const Operands& of,
                     bool adds) {
  static constexpr auto kOne = multiplies<Type, 1>(std::make_integer_sequence<int, kTileRows>());
  static constexpr auto kTwo = multiplies<Type, 2>(std::make_integer_sequence<int, kTileRows>());
  (num_vectors == 1 ? kOne : kTwo)[num_rows - 1](sums, sums_stride, of, adds);
}

// Calls body(first_row, num_rows, tile, num_tiles) for parts of at most kTileRows rows, as equal in size as possible.
template <typename Body>
inline void for_row_tiles(int64_t num_rows, Body body) {
  const int64_t num_tiles = (num_rows + kTileRows - 1) / kTileRows;
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t first = tile * num_rows / num_tiles;
    body(first, (tile + 1) * num_rows / num_tiles - first, tile, num_tiles);
  }
}

}  // namespace lookonce
