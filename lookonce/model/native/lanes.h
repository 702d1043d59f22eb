// Vectors of sixteen numbers, and the two element types that the CPU kernels compute with.
//
// Uses the vector extensions of GCC and Clang, so the same source serves every processor. AVX-512 and its bfloat16
// products are used through intrinsics where available. All sums are in float32.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace lookonce {

constexpr int64_t kLanes = 16;
constexpr float kLog2OfE = 1.44269504f;

typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef int32_t Integers __attribute__((vector_size(64)));

inline Floats load_floats(const float* from) {
  Floats value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline void store_floats(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

inline Words load_words(const uint32_t* from) {
  Words value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline Floats all_lanes(float value) { return value - Floats{}; }

inline Words all_lanes(uint32_t value) { return value - Words{}; }

inline Floats larger(Floats one, Floats other) { return one > other ? one : other; }

inline float sum_of_lanes(Floats value) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(value);
#else
  float sum = 0.0f;
  for (int64_t i = 0; i < kLanes; ++i) sum += value[i];
  return sum;
#endif
}

inline float largest_lane(Floats value) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(value);
#else
  float top = value[0];
  for (int64_t i = 1; i < kLanes; ++i) top = value[i] > top ? value[i] : top;
  return top;
#endif
}

// Returns 2^x for x <= 0: exactly 1 at 0, and 0 below -126. With `kIsRough` the error is up to 7e-6, which is enough
// for results that are rounded to bfloat16; else two units in the last place. The polynomials are fitted to
// (2^f - 1) / f for |f| <= 1/2.
template <bool kIsRough = false>
inline Floats exp2_of_negative(Floats x) {
  // NaN stays NaN.
  const Floats clipped = larger(all_lanes(-126.0f), x);
#if defined(__AVX512F__)
  const Floats n = _mm512_roundscale_ps(clipped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  // The conversion truncates towards zero, so subtracting 0.5 first rounds to the nearest.
  const Integers nearest = __builtin_convertvector(clipped - 0.5f, Integers);
  const Floats n = __builtin_convertvector(nearest, Floats);
#endif
  const Floats f = clipped - n;
  Floats p;
  if (kIsRough) {
    p = f * 9.66637337e-3f + 5.58383427e-2f;
    p = p * f + 2.40223489e-1f;
    p = p * f + 6.93136726e-1f;
  } else {
    p = f * 1.54614475e-4f + 1.33908674e-3f;
    p = p * f + 9.61805667e-3f;
    p = p * f + 5.55035710e-2f;
    p = p * f + 2.40226509e-1f;
    p = p * f + 6.93147188e-1f;
  }
  p = p * f + 1.0f;
#if defined(__AVX512F__)
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, clipped, _CMP_EQ_UQ), p, n);
#else
  const Floats power = reinterpret_cast<Floats>((nearest + 127) << 23);
  return x < -126.0f ? Floats{} : p * power;
#endif
}

inline float exp2_of_negative(float x) { return exp2_of_negative(all_lanes(x))[0]; }

// An element type: the number of elements in a 32-bit word, and the product of words.
struct Float32 {
  using Element = float;
  static constexpr int64_t kPerWord = 1;
  static constexpr bool kIsRough = false;

  static Floats load(const Element* from) { return load_floats(from); }
  static void store(Element* to, Floats value) { store_floats(to, value); }

  static Floats add_products(Floats sums, Words left, Words right) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(reinterpret_cast<__m512>(left), reinterpret_cast<__m512>(right), sums);
#else
    return sums + reinterpret_cast<Floats>(left) * reinterpret_cast<Floats>(right);
#endif
  }
};

struct BFloat16 {
  using Element = uint16_t;
  static constexpr int64_t kPerWord = 2;
  static constexpr bool kIsRough = true;
  typedef uint16_t Halves __attribute__((vector_size(32)));

  static Floats load(const Element* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    return reinterpret_cast<Floats>(__builtin_convertvector(halves, Words) << 16);
  }

  // Rounds to nearest, ties to even.
  static void store(Element* to, Floats value) {
    const Words bits = reinterpret_cast<Words>(value);
    Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    rounded = (bits & 0x7fffffffu) > 0x7f800000u ? all_lanes(uint32_t{0x7fc0}) : rounded;
    const Halves halves = __builtin_convertvector(rounded, Halves);
    std::memcpy(to, &halves, sizeof halves);
  }

  static Floats add_products(Floats sums, Words left, Words right) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(left), reinterpret_cast<__m512bh>(right));
#else
    const Floats low = reinterpret_cast<Floats>(left << 16) * reinterpret_cast<Floats>(right << 16);
    return sums + low + reinterpret_cast<Floats>(left & 0xffff0000u) * reinterpret_cast<Floats>(right & 0xffff0000u);
#endif
  }
};

}  // namespace lookonce
