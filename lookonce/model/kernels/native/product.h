// The fastest way to multiply that the processor has for an element type: vectors in registers, or tiles of AMX.

#pragma once

#include "amx.h"
#include "tile.h"

namespace lookonce {

#if defined(__AMX_BF16__)
template <typename Type>
constexpr bool kUsesAmx = std::is_same_v<Type, BFloat16>;
#else
template <typename Type>
constexpr bool kUsesAmx = false;
#endif

// Multiplies with the same few words of memory again and again. Each work item of a thread has its own.
template <typename Type>
class Product {
 public:
  // Largest number of rows.
  static constexpr int64_t kRows = kTileRows;
  // A sum of a multiple of so many words needs no padding.
  static constexpr int64_t kSteps = 1;

  // Computes sums [num_rows, num_vectors · 16] = left × right; `adds`: added to the present sums.
  void multiply(int64_t num_rows, int64_t num_vectors, float* sums, int64_t sums_stride, const Operands<Type>& of,
                bool adds) {
    lookonce::multiply<Type>(num_rows, num_vectors, sums, sums_stride, of, adds);
  }
};

#if defined(__AMX_BF16__)
template <>
class Product<BFloat16> : public AmxTiles {
 public:
  static constexpr int64_t kRows = 32;
  static constexpr int64_t kSteps = 16;
};
#endif

}  // namespace lookonce
