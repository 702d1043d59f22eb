// Columns of the matrices that are states of recurrent layers.

#pragma once

#include <algorithm>
#include <cstdint>

namespace lookonce {

// A block of columns of a state, from its first column on; `stride` is the distance of rows. Without rows, it is zeros.
struct Columns {
  float* rows;
  int64_t stride;
};

inline void copy_columns(const Columns& from, const Columns& to, int64_t num_rows, int64_t count) {
  for (int64_t i = 0; i < num_rows; ++i) {
    float* row = to.rows + i * to.stride;
    if (from.rows == nullptr) {
      std::fill(row, row + count, 0.0f);
    } else {
      std::copy(from.rows + i * from.stride, from.rows + i * from.stride + count, row);
    }
  }
}

}  // namespace lookonce
