// The intrinsics of AMX-BF16 and AMX-INT8 in plain loops, for processors without AMX. Include before the kernels, and define
// __AMX_BF16__. Rules of shapes are checked as the processor does, which would end the process.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace emulated_amx {

struct Tile {
  int rows = 0, bytes = 0;
  uint8_t data[16][64];
};

inline thread_local Tile tiles[8];
inline thread_local bool is_configured = false;

inline void require(bool is_met) {
  if (!is_met) std::abort();
}

inline Tile& tile(int number) {
  require(is_configured && number >= 0 && number < 8 && tiles[number].rows > 0);
  return tiles[number];
}

inline void load_config(const void* from) {
  uint8_t bytes[64];
  std::memcpy(bytes, from, sizeof bytes);
  require(bytes[0] == 1);
  for (int t = 0; t < 8; ++t) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, bytes + 16 + 2 * t, sizeof row_bytes);
    tiles[t] = Tile();
    tiles[t].rows = bytes[48 + t];
    tiles[t].bytes = row_bytes;
    require(tiles[t].rows <= 16 && row_bytes <= 64 && (tiles[t].rows == 0) == (row_bytes == 0));
    std::memset(tiles[t].data, 0, sizeof tiles[t].data);
  }
  is_configured = true;
}

inline void load(int number, const void* from, int64_t stride) {
  Tile& to = tile(number);
  for (int r = 0; r < to.rows; ++r) std::memcpy(to.data[r], static_cast<const char*>(from) + r * stride, to.bytes);
}

inline void store(int number, void* to, int64_t stride) {
  const Tile& from = tile(number);
  for (int r = 0; r < from.rows; ++r) std::memcpy(static_cast<char*>(to) + r * stride, from.data[r], from.bytes);
}

inline float wide(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline void require_shapes(int sums, int left, int right) {
  const Tile &c = tile(sums), &a = tile(left), &b = tile(right);
  require(sums != left && sums != right && left != right);
  require(c.rows == a.rows && a.bytes / 4 == b.rows && c.bytes == b.bytes);
}

// The bytes of the left side are signed, those of the right side are not.
inline void add_products_of_bytes(int sums, int left, int right) {
  require_shapes(sums, left, right);
  Tile &c = tile(sums), &a = tile(left), &b = tile(right);
  for (int m = 0; m < c.rows; ++m) {
    for (int n = 0; n < c.bytes / 4; ++n) {
      int32_t sum;
      std::memcpy(&sum, c.data[m] + 4 * n, sizeof sum);
      for (int k = 0; k < a.bytes; ++k) {
        sum += static_cast<int8_t>(a.data[m][k]) * b.data[k / 4][4 * n + k % 4];
      }
      std::memcpy(c.data[m] + 4 * n, &sum, sizeof sum);
    }
  }
}

inline void add_products(int sums, int left, int right) {
  require_shapes(sums, left, right);
  Tile &c = tile(sums), &a = tile(left), &b = tile(right);
  for (int m = 0; m < c.rows; ++m) {
    for (int k = 0; k < a.bytes / 4; ++k) {
      for (int n = 0; n < c.bytes / 4; ++n) {
        float sum;
        uint16_t x[2], y[2];
        std::memcpy(&sum, c.data[m] + 4 * n, sizeof sum);
        std::memcpy(x, a.data[m] + 4 * k, sizeof x);
        std::memcpy(y, b.data[k] + 4 * n, sizeof y);
        sum += wide(x[0]) * wide(y[0]);
        sum += wide(x[1]) * wide(y[1]);
        std::memcpy(c.data[m] + 4 * n, &sum, sizeof sum);
      }
    }
  }
}

}  // namespace emulated_amx

// The compiler's own are macros, or functions.
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig(from) emulated_amx::load_config(from)
#define _tile_release() (emulated_amx::is_configured = false)
#define _tile_zero(t) std::memset(emulated_amx::tile(t).data, 0, sizeof emulated_amx::tile(t).data)
#define _tile_loadd(t, from, stride) emulated_amx::load(t, from, stride)
#define _tile_stored(t, to, stride) emulated_amx::store(t, to, stride)
#define _tile_dpbf16ps(c, a, b) emulated_amx::add_products(c, a, b)
#define _tile_dpbsud(c, a, b) emulated_amx::add_products_of_bytes(c, a, b)
