// The matrix product that all kernels use: a few rows times 32 (or 16) columns, with sums in registers.
//
// The left side is read as rows of 32-bit words, and each word is broadcast to all lanes. A word in a vector of the right
// side holds the matching factors of one column: one float32, or two bfloat16 that follow each other along the sum (the
// left side is then one word, or two of float32: see lanes.h). Each element of the result is one sum in a fixed order for
// any number of rows, so a token's numbers do not depend on the batch.

#pragma once

#include <array>
#include <type_traits>
#include <utility>

#include "lanes.h"

namespace lookonce {

// Sums that are kept in registers. The others hold two vectors or parts of the right side, and a word of the left side
// in all lanes.
constexpr int kMaxSums = kNumRegisters == 32 ? 24 : 12;
// A row takes the sums of one vector at least. With 32 registers of 512 bits there are two vectors for each row.
constexpr int kTileRows = kRegisterBytes == 64 ? kMaxSums / 2 : kMaxSums / kRegisters;
constexpr int kTileVectors = 2;
constexpr int64_t kTileColumns = kTileVectors * kLanes;

// A part of the right side: words [num_steps, 16] for each vector of 16 columns.
struct Segment {
  const uint32_t* right[kTileVectors];
  int64_t num_steps;
};

template <typename Type>
struct Operands {
  // [rows, elements of all segments]; the stride counts elements.
  const typename Type::Left* left;
  int64_t left_stride;
  const Segment* segments;
  int64_t num_segments;
  int64_t right_stride;
  // Addresses to prefetch; null: nothing. Each step requests one cache line at each and advances by `next_stride` words.
  const uint32_t* next[2] = {nullptr, nullptr};
  int64_t next_stride = 0;
};

// Adds the products of one word of each row and column to the sums. The smaller side's factors stay in registers.
template <typename Type, int kProduct, int kRows, int kParts>
inline void add_products(FloatRegister (&total)[kRows][kParts], const uint32_t* const* left, int64_t left_stride,
                         const uint32_t* const* right) {
  const auto row = [&](int r) { return left[r / 3][(r % 3) * left_stride + kProduct] - WordRegister{}; };
  const auto column = [&](int p) {
    WordRegister words;
    std::memcpy(&words, right[p / kRegisters] + p % kRegisters * kRegisterLanes, kRegisterBytes);
    return Type::template right<kProduct>(words);
  };
  if constexpr (kRows < kParts) {
    WordRegister rows[kRows];
    for (int r = 0; r < kRows; ++r) rows[r] = row(r);
#pragma GCC unroll 8
    for (int p = 0; p < kParts; ++p) {
      const WordRegister words = column(p);
      for (int r = 0; r < kRows; ++r) total[r][p] = Type::add_product(total[r][p], rows[r], words);
    }
  } else {
    WordRegister columns[kParts];
    for (int p = 0; p < kParts; ++p) columns[p] = column(p);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const WordRegister word = row(r);
      for (int p = 0; p < kParts; ++p) total[r][p] = Type::add_product(total[r][p], word, columns[p]);
    }
  }
}

// Computes sums [kRows, kVectors · 16] = left × right for the vectors from kFirst on, all in registers.
template <typename Type, int kRows, int kFirst, int kVectors>
inline void multiply_in_registers(float* sums, int64_t sums_stride, const Operands<Type>& of, bool adds) {
  constexpr int kParts = kVectors * kRegisters;
  float* first_sums = sums + kFirst * kLanes;
  FloatRegister total[kRows][kParts];
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kParts; ++p) {
      total[r][p] = FloatRegister{};
      if (adds) std::memcpy(&total[r][p], first_sums + r * sums_stride + p * kRegisterLanes, kRegisterBytes);
    }
  }
  const int64_t stride = of.left_stride * sizeof(typename Type::Left) / sizeof(uint32_t);
  // One pointer for three rows, because one per row would need more registers than there are.
  const uint32_t* left[(kRows + 2) / 3];
  for (int i = 0; i < (kRows + 2) / 3; ++i) left[i] = reinterpret_cast<const uint32_t*>(of.left) + 3 * i * stride;
  // The first of several calls requests the cache lines.
  const uint32_t* next[2] = {kFirst == 0 ? of.next[0] : nullptr, kFirst == 0 ? of.next[1] : nullptr};
  for (const Segment* segment = of.segments; segment < of.segments + of.num_segments; ++segment) {
    const uint32_t* right[kVectors];
    for (int v = 0; v < kVectors; ++v) right[v] = segment->right[kFirst + v];
    for (int64_t step = 0; step < segment->num_steps; ++step) {
      for (const uint32_t*& line : next) {
        if (line == nullptr) continue;
        __builtin_prefetch(line, 0, 2);
        line += of.next_stride;
      }
      add_products<Type, 0, kRows, kParts>(total, left, stride, right);
      if constexpr (Type::kNumProducts == 2) add_products<Type, 1, kRows, kParts>(total, left, stride, right);
      for (int v = 0; v < kVectors; ++v) right[v] += of.right_stride;
      for (int i = 0; i < (kRows + 2) / 3; ++i) left[i] += Type::kNumProducts;
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kParts; ++p) {
      std::memcpy(first_sums + r * sums_stride + p * kRegisterLanes, &total[r][p], kRegisterBytes);
    }
  }
}

// Computes sums [kRows, kVectors · 16] = left × right; `adds`: added to the present sums.
template <typename Type, int kRows, int kVectors>
void multiply(float* sums, int64_t sums_stride, const Operands<Type>& of, bool adds) {
  if constexpr (kRows * kVectors * kRegisters <= kMaxSums) {
    multiply_in_registers<Type, kRows, 0, kVectors>(sums, sums_stride, of, adds);
  } else {
    static_assert(kVectors == 2 && kRows * kRegisters <= kMaxSums, "one vector of each row fits");
    multiply_in_registers<Type, kRows, 0, 1>(sums, sums_stride, of, adds);
    multiply_in_registers<Type, kRows, 1, 1>(sums, sums_stride, of, adds);
  }
}

template <typename Type>
using Multiply = void (*)(float*, int64_t, const Operands<Type>&, bool);

template <typename Type, int kVectors, int... kRows>
constexpr std::array<Multiply<Type>, sizeof...(kRows)> multiplies(std::integer_sequence<int, kRows...>) {
  return {&multiply<Type, kRows + 1, kVectors>...};
}

// Calls the `multiply` above for `num_rows` in 1 … kTileRows and `num_vectors` in 1 … kTileVectors.
template <typename Type>
inline void multiply(int64_t num_rows, int64_t num_vectors, float* sums, int64_t sums_stride, const Operands<Type>& of,
                     bool adds) {
  static constexpr auto kOne = multiplies<Type, 1>(std::make_integer_sequence<int, kTileRows>());
  static constexpr auto kTwo = multiplies<Type, 2>(std::make_integer_sequence<int, kTileRows>());
  (num_vectors == 1 ? kOne : kTwo)[num_rows - 1](sums, sums_stride, of, adds);
}

// Calls body(first_row, num_rows, tile, num_tiles) for parts of at most kMaxRows rows, as equal in size as possible.
template <int64_t kMaxRows = kTileRows, typename Body>
inline void for_row_tiles(int64_t num_rows, Body body) {
  const int64_t num_tiles = (num_rows + kMaxRows - 1) / kMaxRows;
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t first = tile * num_rows / num_tiles;
    body(first, (tile + 1) * num_rows / num_tiles - first, tile, num_tiles);
  }
}

}  // namespace lookonce
