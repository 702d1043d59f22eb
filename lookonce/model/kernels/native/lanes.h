// Vectors of sixteen numbers, the registers that hold them, and the two element types of the CPU kernels.
//
// Uses the vector extensions of GCC and Clang, so the same source serves every processor. Compilers pass vectors that
// are larger than a register through memory, so a vector is a structure of registers here. Intrinsics are used for some
// instructions of AVX-512, and for products of bfloat16 pairs. All sums are in float32.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_SVE_BITS) && __ARM_FEATURE_SVE_BITS == 256
#include <arm_sve.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace lookonce {

#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64, kNumRegisters = 32;
#elif defined(__AVX__)
constexpr int kRegisterBytes = 32, kNumRegisters = 16;
#elif defined(__ARM_FEATURE_SVE_BITS) && __ARM_FEATURE_SVE_BITS == 256
constexpr int kRegisterBytes = 32, kNumRegisters = 32;
#elif defined(__ARM_NEON)
constexpr int kRegisterBytes = 16, kNumRegisters = 32;
#else
constexpr int kRegisterBytes = 16, kNumRegisters = 16;
#endif

constexpr int64_t kLanes = 16;
constexpr int kRegisterLanes = kRegisterBytes / 4;
constexpr int kRegisters = kLanes / kRegisterLanes;
constexpr float kLog2OfE = 1.44269504f;

typedef float FloatRegister __attribute__((vector_size(kRegisterBytes)));
typedef uint32_t WordRegister __attribute__((vector_size(kRegisterBytes)));
typedef int32_t IntegerRegister __attribute__((vector_size(kRegisterBytes)));
typedef uint16_t HalfRegister __attribute__((vector_size(kRegisterBytes / 2)));

// Load a register of narrower numbers. Of the same conversions between vectors, GCC 12 makes five instructions, or takes
// bytes apart one by one (576 x 1536 weights of float32 as codes of 8 bits, one thread of a Xeon with AMX: 743 -> 116 us).
inline WordRegister load_halves(const uint16_t* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<WordRegister>(
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__AVX2__)
  return reinterpret_cast<WordRegister>(
      _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  HalfRegister halves;
  std::memcpy(&halves, from, sizeof halves);
  return __builtin_convertvector(halves, WordRegister);
#endif
}

inline IntegerRegister load_bytes(const int8_t* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<IntegerRegister>(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return reinterpret_cast<IntegerRegister>(_mm256_cvtepi8_epi32(_mm_loadu_si64(from)));
#else
  typedef int8_t Bytes __attribute__((vector_size(kRegisterLanes)));
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, IntegerRegister);
#endif
}

inline IntegerRegister load_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<IntegerRegister>(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return reinterpret_cast<IntegerRegister>(_mm256_cvtepu8_epi32(_mm_loadu_si64(from)));
#else
  typedef uint8_t Bytes __attribute__((vector_size(kRegisterLanes)));
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, IntegerRegister);
#endif
}

// Sixteen numbers. A single number takes part in operations as a vector of equal numbers.
template <typename Register, typename Number>
struct Lanes {
  Register part[kRegisters];

  Lanes() = default;
  Lanes(Number value) {
    for (Register& one : part) one = value - Register{};
  }

  // Returns op(part, part of other, …) for each register.
  template <typename Result, typename Op, typename... Others>
  static Result each(Op op, const Others&... others) {
    Result result;
    for (int p = 0; p < kRegisters; ++p) result.part[p] = op(others.part[p]...);
    return result;
  }

  friend Lanes operator+(const Lanes& a, const Lanes& b) {
    return each<Lanes>([](Register x, Register y) { return x + y; }, a, b);
  }
  friend Lanes operator-(const Lanes& a, const Lanes& b) {
    return each<Lanes>([](Register x, Register y) { return x - y; }, a, b);
  }
  friend Lanes operator*(const Lanes& a, const Lanes& b) {
    return each<Lanes>([](Register x, Register y) { return x * y; }, a, b);
  }
  friend Lanes operator/(const Lanes& a, const Lanes& b) {
    return each<Lanes>([](Register x, Register y) { return x / y; }, a, b);
  }
  Lanes& operator+=(const Lanes& other) { return *this = *this + other; }
};

using Floats = Lanes<FloatRegister, float>;
using Integers = Lanes<IntegerRegister, int32_t>;

// Registers are copied one by one. Compilers copy a whole structure in pieces that are smaller than a register, and the
// processor then waits until the pieces are in memory (attention of images on AVX2: 18.7 -> 12.9 ms).
inline Floats load_floats(const float* from) {
  Floats value;
  for (int p = 0; p < kRegisters; ++p) std::memcpy(&value.part[p], from + p * kRegisterLanes, kRegisterBytes);
  return value;
}

inline void store_floats(float* to, const Floats& value) {
  for (int p = 0; p < kRegisters; ++p) std::memcpy(to + p * kRegisterLanes, &value.part[p], kRegisterBytes);
}

inline Integers operator<(const Floats& a, const Floats& b) {
  return Floats::each<Integers>([](FloatRegister x, FloatRegister y) { return x < y; }, a, b);
}

inline Integers operator<(const Integers& a, const Integers& b) {
  return Integers::each<Integers>([](IntegerRegister x, IntegerRegister y) { return x < y; }, a, b);
}

// Returns `yes` in the lanes where `condition` is true, else `no`.
inline Floats select(const Integers& condition, const Floats& yes, const Floats& no) {
  return Floats::each<Floats>([](IntegerRegister c, FloatRegister y, FloatRegister n) { return c ? y : n; },
                              condition, yes, no);
}

// Returns the larger number of each lane; `other` where one of them is NaN.
inline Floats larger(const Floats& one, const Floats& other) {
  return Floats::each<Floats>([](FloatRegister x, FloatRegister y) { return y < x ? x : y; }, one, other);
}

inline float sum_of_lanes(const Floats& value) {
  FloatRegister total = value.part[0];
  for (int p = 1; p < kRegisters; ++p) total += value.part[p];
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(total);
#else
  float sum = 0.0f;
  for (int i = 0; i < kRegisterLanes; ++i) sum += total[i];
  return sum;
#endif
}

inline float largest_lane(const Floats& value) {
  FloatRegister tops = value.part[0];
  for (int p = 1; p < kRegisters; ++p) tops = value.part[p] > tops ? value.part[p] : tops;
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(tops);
#else
  float top = tops[0];
  for (int i = 1; i < kRegisterLanes; ++i) top = tops[i] > top ? tops[i] : top;
  return top;
#endif
}

// Returns the largest absolute value of `count` numbers; NaN if one of them is infinite or not a number. load(i) returns
// sixteen numbers from index i on.
template <typename Load>
inline float largest_size(int64_t count, Load load) {
  Floats largest(0.0f), total(0.0f);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats value = load(i);
    const Floats size = larger(value, 0.0f - value);
    largest = larger(size, largest);
    // 0 for all finite numbers.
    total += value - value;
  }
  return sum_of_lanes(total) == 0.0f ? largest_lane(largest) : NAN;
}

// Returns 2^x for x <= 0: exactly 1 at 0, and 0 below -126. With `kIsRough` the error is up to 7e-6, which is enough
// for results that are rounded to bfloat16; else two units in the last place. The polynomials are fitted to
// (2^f - 1) / f for |f| <= 1/2.
template <bool kIsRough = false>
inline FloatRegister exp2_of_negative(FloatRegister x) {
  const FloatRegister least = -126.0f - FloatRegister{};
  // NaN stays NaN.
  const FloatRegister clipped = least > x ? least : x;
#if defined(__AVX512F__)
  const FloatRegister n = _mm512_roundscale_ps(clipped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  // The conversion truncates towards zero, so subtracting 0.5 first rounds to the nearest.
  const IntegerRegister nearest = __builtin_convertvector(clipped - 0.5f, IntegerRegister);
  const FloatRegister n = __builtin_convertvector(nearest, FloatRegister);
#endif
  const FloatRegister f = clipped - n;
  FloatRegister p;
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
  const FloatRegister power = reinterpret_cast<FloatRegister>((nearest + 127) << 23);
  return x < least ? FloatRegister{} : p * power;
#endif
}

template <bool kIsRough = false>
inline Floats exp2_of_negative(const Floats& x) {
  return Floats::each<Floats>([](FloatRegister one) { return exp2_of_negative<kIsRough>(one); }, x);
}

inline float exp2_of_negative(float x) { return exp2_of_negative(x - FloatRegister{})[0]; }

inline FloatRegister as_floats(WordRegister words) { return reinterpret_cast<FloatRegister>(words); }

// An element type. Elements of the right side of a product come in words of 32 bits, each with `kPerWord` elements that
// follow each other along the sum. A word takes part in `kNumProducts` products, which are added one after the other:
// `right<i>` is what it contributes to product i. The left side has the type `Left`, a word of 32 bits for each product.
// `store` and `store_left` round to the element type.
struct Float32 {
  using Element = float;
  using Left = float;
  static constexpr int64_t kPerWord = 1;
  static constexpr int kNumProducts = 1;
  static constexpr bool kIsRough = false;

  static Floats load(const Element* from) { return load_floats(from); }
  static void store(Element* to, const Floats& value) { store_floats(to, value); }
  static Floats load_left(const Left* from) { return load_floats(from); }
  static void store_left(Left* to, const Floats& value) { store_floats(to, value); }

  template <int kProduct>
  static WordRegister right(WordRegister words) {
    return words;
  }
  static FloatRegister add_product(FloatRegister sums, WordRegister left, WordRegister right) {
    return sums + as_floats(left) * as_floats(right);
  }
};

struct BFloat16 {
  using Element = uint16_t;
  static constexpr int64_t kPerWord = 2;
  static constexpr bool kIsRough = true;

  static Floats load(const Element* from) {
    Floats value;
    for (int p = 0; p < kRegisters; ++p) value.part[p] = as_floats(load_halves(from + p * kRegisterLanes) << 16);
    return value;
  }

  static void store(Element* to, const Floats& value) {
    for (int p = 0; p < kRegisters; ++p) {
      const HalfRegister halves = __builtin_convertvector(rounded(value.part[p]) >> 16, HalfRegister);
      std::memcpy(to + p * kRegisterLanes, &halves, sizeof halves);
    }
  }

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  // The processor multiplies and adds pairs.
  using Left = Element;
  static constexpr int kNumProducts = 1;

  static Floats load_left(const Left* from) { return load(from); }
  static void store_left(Left* to, const Floats& value) { store(to, value); }

  template <int kProduct>
  static WordRegister right(WordRegister words) {
    return words;
  }
  static FloatRegister add_product(FloatRegister sums, WordRegister left, WordRegister right) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(left), reinterpret_cast<__m512bh>(right));
#elif defined(__ARM_FEATURE_SVE_BITS) && __ARM_FEATURE_SVE_BITS == 256
    return svbfdot_f32(sums, svreinterpret_bf16_u32(left), svreinterpret_bf16_u32(right));
#else
    return vbfdotq_f32(sums, vreinterpretq_bf16_u32(left), vreinterpretq_bf16_u32(right));
#endif
  }
#else
  // The left side is widened once when it is stored. Words of the right side are widened in registers, for many rows.
  using Left = float;
  static constexpr int kNumProducts = 2;

  static Floats load_left(const Left* from) { return load_floats(from); }
  static void store_left(Left* to, const Floats& value) {
    for (int p = 0; p < kRegisters; ++p) {
      const WordRegister wide = rounded(value.part[p]);
      std::memcpy(to + p * kRegisterLanes, &wide, sizeof wide);
    }
  }

  template <int kProduct>
  static WordRegister right(WordRegister words) {
    return kProduct == 0 ? words << 16 : words & 0xffff0000u;
  }
  static FloatRegister add_product(FloatRegister sums, WordRegister left, WordRegister right) {
    return sums + as_floats(left) * as_floats(right);
  }
#endif

 private:
  // Returns words whose upper halves are the numbers rounded to nearest, ties to even; their lower halves are 0.
  static WordRegister rounded(FloatRegister value) {
    const WordRegister bits = reinterpret_cast<WordRegister>(value);
    const WordRegister nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u - WordRegister{} : nearest;
  }
};

// The left side of products as an element type of its own, for kernels that read or write it in place.
template <typename Type>
struct LeftOf {
  using Element = typename Type::Left;

  static Floats load(const Element* from) { return Type::load_left(from); }
  static void store(Element* to, const Floats& value) { Type::store_left(to, value); }
};

// Copies elements to the left side of a product.
template <typename Type>
inline void copy_to_left(typename Type::Left* to, const typename Type::Element* from, int64_t count) {
  if constexpr (std::is_same_v<typename Type::Left, typename Type::Element>) {
    std::copy(from, from + count, to);
  } else {
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t word = static_cast<uint32_t>(from[i]) << 16;
      std::memcpy(to + i, &word, sizeof word);
    }
  }
}

}  // namespace lookonce
