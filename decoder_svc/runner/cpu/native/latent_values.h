// Values that are the first elements of keys (latent attention), copied from the layout of keys to that of values.

#pragma once

#include "lanes.h"

namespace lookonce {

#if defined(__AVX512BW__)
// Transposes 4 x 4 parts of 128 bits: `to` gets part i of each of the registers, for i in 0 ... 3, `step` apart.
inline void transpose_quarters(const __m512i& a, const __m512i& b, const __m512i& c, const __m512i& d, uint32_t* to,
                               int64_t step) {
  const __m512i even_ab = _mm512_shuffle_i32x4(a, b, 0x88), odd_ab = _mm512_shuffle_i32x4(a, b, 0xdd);
  const __m512i even_cd = _mm512_shuffle_i32x4(c, d, 0x88), odd_cd = _mm512_shuffle_i32x4(c, d, 0xdd);
  _mm512_storeu_si512(to, _mm512_shuffle_i32x4(even_ab, even_cd, 0x88));
  _mm512_storeu_si512(to + step, _mm512_shuffle_i32x4(odd_ab, odd_cd, 0x88));
  _mm512_storeu_si512(to + 2 * step, _mm512_shuffle_i32x4(even_ab, even_cd, 0xdd));
  _mm512_storeu_si512(to + 3 * step, _mm512_shuffle_i32x4(odd_ab, odd_cd, 0xdd));
}
#endif

// Copies 16 elements of 16 keys, words [16 elements in words, 16 keys], to values, words [16 keys in words, 16], whose
// rows are `stride` words apart. Only the first `num_keys` are read; the element that shares a word with the last of
// them becomes 0, and later ones are undefined.
template <typename Type>
inline void keys_to_values(const uint32_t* keys, int64_t num_keys, uint32_t* values, int64_t stride) {
#if defined(__AVX512BW__)
  const __mmask16 is_key = static_cast<__mmask16>((1u << num_keys) - 1);
  if constexpr (Type::kPerWord == 1) {
    __m512i pairs[16], fours[16];
    for (int i = 0; i < 16; i += 2) {
      const __m512i one = _mm512_maskz_loadu_epi32(is_key, keys + i * kLanes);
      const __m512i other = _mm512_maskz_loadu_epi32(is_key, keys + (i + 1) * kLanes);
      pairs[i] = _mm512_unpacklo_epi32(one, other);
      pairs[i + 1] = _mm512_unpackhi_epi32(one, other);
    }
    for (int i = 0; i < 16; i += 4) {
      fours[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
      fours[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
      fours[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
      fours[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    for (int key = 0; key < 4; ++key) {
      transpose_quarters(fours[key], fours[4 + key], fours[8 + key], fours[12 + key], values + key * stride, 4 * stride);
    }
  } else {
    __m512i pairs[8];
    // Of two neighbouring keys, from (first, second element of one; of the other) to (first of both; second of both).
    const auto joined = [&](int word) {
      const __m512i apart = _mm512_maskz_loadu_epi32(is_key, keys + word * kLanes);
      return _mm512_shufflehi_epi16(_mm512_shufflelo_epi16(apart, 0xd8), 0xd8);
    };
    for (int i = 0; i < 8; i += 2) {
      const __m512i one = joined(i), other = joined(i + 1);
      pairs[i] = _mm512_unpacklo_epi64(one, other);
      pairs[i + 1] = _mm512_unpackhi_epi64(one, other);
    }
    for (int word = 0; word < 2; ++word) {
      transpose_quarters(pairs[word], pairs[2 + word], pairs[4 + word], pairs[6 + word], values + word * stride,
                         2 * stride);
    }
  }
#else
  if constexpr (Type::kPerWord == 1) {
    for (int64_t key = 0; key < num_keys; ++key) {
      for (int64_t d = 0; d < kLanes; ++d) values[key * stride + d] = keys[d * kLanes + key];
    }
  } else {
    for (int64_t key = 0; key < num_keys; key += 2) {
      for (int64_t d = 0; d < kLanes; d += 2) {
        const uint32_t one = keys[d / 2 * kLanes + key], other = key + 1 < num_keys ? keys[d / 2 * kLanes + key + 1] : 0;
        values[key / 2 * stride + d] = (one & 0xffffu) | other << 16;
        values[key / 2 * stride + d + 1] = one >> 16 | (other & 0xffff0000u);
      }
    }
  }
#endif
}

}  // namespace lookonce
