// Linear layers whose weights are codes of 4 or 8 bits with a scale and an offset for each group of inputs.
//
// Layers of bfloat16 with codes of floating point expand them to bfloat16, which is exact, and apply scales to the sums
// of a block of up to 128 inputs. With integers they multiply integers: each row of inputs is rounded to 16 bits with a
// scale for each block of up to 128 inputs, products of a block are summed exactly in 32 bits, and scales are applied to
// the sums. The rounding is finer than bfloat16's: 2^-16 of a block's largest input.
//
// Processors that multiply bytes (AVX512-VNNI, AMX) multiply codes with the two bytes of an input, one after the other,
// and need not expand codes of 8 bits at all. Others expand codes to 16 bits. The sums are the same integers.
//
// Layers of float32 expand the weights to float32, so their results are the bits of a layer that holds the expanded
// weights. A thread expands a part of a panel at a time, in its L1 cache, or in registers if there are few rows.

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <type_traits>
#include <utility>

#include "aligned.h"
#include "layer.h"
#include "phases.h"
#include "product.h"
#include "tile.h"

namespace lookonce {

// Inputs that are expanded at once, and rows that are multiplied with them: 8 or 16 KB of weights, 12 KB of sums.
constexpr int64_t kExpandedInputs = 128;
constexpr int64_t kExpandedRows = 96;
// Distance at which codes are prefetched, bytes.
constexpr int64_t kAheadCodes = 8192;
// Panels by which scales are prefetched ahead.
constexpr int64_t kAheadPanels = 2;

// The largest input of a block as an integer: 256 · upper + lower, both of which are signed bytes.
constexpr int32_t kLargestInteger = 127 * 256 + 127;

// Whether the processor multiplies unsigned bytes with signed ones. Codes of integers are then in words of four inputs.
#if defined(__AVX512VNNI__)
constexpr bool kMultipliesBytes = true;
#else
constexpr bool kMultipliesBytes = false;
#endif
// The unsigned codes of `Linear::word_inputs` 4 are larger than the codes of 8 bits by this number.
constexpr int32_t kExcess = 128;

typedef int8_t CodePairs __attribute__((vector_size(kRegisterBytes / 2)));
typedef uint8_t UnsignedCodePairs __attribute__((vector_size(kRegisterBytes / 2)));
typedef int16_t IntegerPairs __attribute__((vector_size(kRegisterBytes)));
typedef int16_t ShortIntegers __attribute__((vector_size(kRegisterBytes / 2)));

// Returns bytes as integers of 16 bits, with one instruction; see lanes.h.
inline IntegerPairs widened(CodePairs bytes) {
#if defined(__AVX512BW__)
  return reinterpret_cast<IntegerPairs>(_mm512_cvtepi8_epi16(reinterpret_cast<__m256i>(bytes)));
#elif defined(__AVX2__)
  return reinterpret_cast<IntegerPairs>(_mm256_cvtepi8_epi16(reinterpret_cast<__m128i>(bytes)));
#else
  return __builtin_convertvector(bytes, IntegerPairs);
#endif
}

inline IntegerPairs widened(UnsignedCodePairs bytes) {
#if defined(__AVX512BW__)
  return reinterpret_cast<IntegerPairs>(_mm512_cvtepu8_epi16(reinterpret_cast<__m256i>(bytes)));
#elif defined(__AVX2__)
  return reinterpret_cast<IntegerPairs>(_mm256_cvtepu8_epi16(reinterpret_cast<__m128i>(bytes)));
#else
  return __builtin_convertvector(bytes, IntegerPairs);
#endif
}

// Integers of 16 bits as an element type of the product. Its sums are integers of 32 bits in registers of floats.
struct Int16 {
  using Left = int16_t;
  static constexpr int64_t kPerWord = 2;
  static constexpr int kNumProducts = 1;

  template <int kProduct>
  static WordRegister right(WordRegister words) {
    return words;
  }
  static FloatRegister add_product(FloatRegister sums, WordRegister left, WordRegister right) {
#if defined(__AVX512VNNI__)
    const __m512i total = _mm512_dpwssd_epi32(reinterpret_cast<__m512i>(sums), reinterpret_cast<__m512i>(left),
                                              reinterpret_cast<__m512i>(right));
    return reinterpret_cast<FloatRegister>(total);
#else
    return as_floats(reinterpret_cast<WordRegister>(reinterpret_cast<IntegerRegister>(sums) + pairs(left, right)));
#endif
  }

 private:
  // Returns the sum of the two products of each word.
  static IntegerRegister pairs(WordRegister left, WordRegister right) {
#if defined(__AVX512BW__)
    return reinterpret_cast<IntegerRegister>(
        _mm512_madd_epi16(reinterpret_cast<__m512i>(left), reinterpret_cast<__m512i>(right)));
#elif defined(__AVX2__)
    return reinterpret_cast<IntegerRegister>(
        _mm256_madd_epi16(reinterpret_cast<__m256i>(left), reinterpret_cast<__m256i>(right)));
#else
    const IntegerRegister l = reinterpret_cast<IntegerRegister>(left), r = reinterpret_cast<IntegerRegister>(right);
    return (l << 16 >> 16) * (r << 16 >> 16) + (l >> 16) * (r >> 16);
#endif
  }
};

// Inputs as integers: [rows, inputs], and scale and sum of the block's integers · scale, [rows, blocks].
struct IntegerInputs {
  std::unique_ptr<int16_t[]> integers;
  std::unique_ptr<float[]> scales, sums;
  // With products of bytes: integer = 256 · upper + lower, [rows, inputs rounded up to whole tiles], and the sum of a
  // block's integers · kExcess.
  AlignedVector<int8_t> lower, upper;
  std::unique_ptr<int32_t[]> excess;

  static int64_t bytes_stride(int64_t num_inputs) { return (num_inputs + kBytesStep - 1) / kBytesStep * kBytesStep; }

  // For layers of up to `num_inputs` inputs with blocks of 16 inputs or more.
  void reserve(int64_t num_rows, int64_t num_inputs) {
    const int64_t num_blocks = (num_inputs + kLanes - 1) / kLanes;
    integers.reset(new int16_t[num_rows * num_inputs]);
    scales.reset(new float[num_rows * num_blocks]);
    sums.reset(new float[num_rows * num_blocks]);
    if constexpr (kMultipliesBytes) {
      // A tile may reach behind the last block of the last row.
      lower.resize(num_rows * bytes_stride(num_inputs) + kBytesStep);
      upper.resize(lower.size());
      excess.reset(new int32_t[num_rows * num_blocks]);
    }
  }

 private:
  // Bytes of a row of a tile.
  static constexpr int64_t kBytesStep = 64;
};

inline int64_t num_blocks(const Linear& layer) { return (layer.num_inputs + layer.block_inputs - 1) / layer.block_inputs; }

// Rounds a block of inputs. One that is infinite or not a number makes the scale NaN.
template <typename Type>
inline void round_block(const typename Type::Left* from, int64_t count, int16_t* to, float* scale, float* sum) {
  alignas(64) typename Type::Left inputs[kExpandedInputs] = {};
  std::copy(from, from + count, inputs);
  const float most = largest_size(count, [&](int64_t i) { return Type::load_left(inputs + i); });
  if (std::isnan(most)) {
    std::fill(to, to + count, int16_t{1});
    *scale = *sum = NAN;
    return;
  }
  *scale = most / static_cast<float>(kLargestInteger);
  const float factor = *scale > 0.0f ? 1.0f / *scale : 0.0f;
  alignas(64) int16_t integers[kExpandedInputs];
  Integers integer_sum(0);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats value = Type::load_left(inputs + i) * factor;
    const Floats half = select(value < 0.0f, -0.5f, 0.5f);
    for (int p = 0; p < kRegisters; ++p) {
      // The conversion truncates towards zero.
      const IntegerRegister nearest = __builtin_convertvector(value.part[p] + half.part[p], IntegerRegister);
      integer_sum.part[p] += nearest;
      const ShortIntegers narrow = __builtin_convertvector(nearest, ShortIntegers);
      std::memcpy(integers + i + p * kRegisterLanes, &narrow, sizeof narrow);
    }
  }
  std::copy(integers, integers + count, to);
  int64_t whole = 0;
  for (int p = 0; p < kRegisters; ++p) {
    for (int lane = 0; lane < kRegisterLanes; ++lane) whole += integer_sum.part[p][lane];
  }
  *sum = static_cast<float>(whole) * *scale;
}

#if defined(__AVX512VNNI__)
// Returns the bits of the largest size among numbers of bfloat16; those of infinity, or larger ones, if not all of them
// are finite. Bits are in the order of sizes.
inline uint16_t largest_bits(const uint16_t* from, int64_t count) {
  __m512i largest = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i += 2 * kLanes) {
    const __mmask32 mask = static_cast<__mmask32>(count - i < 2 * kLanes ? (1u << (count - i)) - 1 : -1);
    const __m512i bits = _mm512_maskz_loadu_epi16(mask, from + i);
    largest = _mm512_max_epu16(largest, _mm512_and_si512(bits, _mm512_set1_epi16(0x7fff)));
  }
  const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(largest), _mm512_extracti64x4_epi64(largest, 1));
  const __m128i last = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  // There is an instruction for the least of eight.
  return static_cast<uint16_t>(~_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(last, _mm_set1_epi16(-1)))));
}

// Rounds a block of inputs to bytes, as `round_block` does, and stores the sum of its integers · kExcess, too.
inline void round_block_to_bytes(const uint16_t* from, int64_t count, int8_t* lower, int8_t* upper, float* scale,
                                 float* sum, int32_t* excess) {
  const uint32_t bits = largest_bits(from, count);
  if (bits >= 0x7f80) {
    std::fill(lower, lower + count, int8_t{1});
    std::fill(upper, upper + count, int8_t{0});
    *scale = *sum = NAN;
    *excess = 0;
    return;
  }
  float most;
  const uint32_t word = bits << 16;
  std::memcpy(&most, &word, sizeof most);
  *scale = most / static_cast<float>(kLargestInteger);
  const __m512 factor = _mm512_set1_ps(*scale > 0.0f ? 1.0f / *scale : 0.0f);
  __m512i total = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i += kLanes) {
    // Other threads may write what is behind the block.
    const __mmask16 mask = static_cast<__mmask16>(count - i < kLanes ? (1 << (count - i)) - 1 : -1);
    const __m512i words = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from + i)), 16);
    const __m512 value = _mm512_mul_ps(_mm512_castsi512_ps(words), factor);
    // 0.5 with the number's sign; the conversion truncates towards zero.
    const __m512 half = _mm512_or_ps(_mm512_and_ps(value, _mm512_set1_ps(-0.0f)), _mm512_set1_ps(0.5f));
    const __m512i nearest = _mm512_cvttps_epi32(_mm512_add_ps(value, half));
    total = _mm512_add_epi32(total, nearest);
    _mm_mask_storeu_epi8(lower + i, mask, _mm512_cvtepi32_epi8(nearest));
    const __m512i rest = _mm512_srai_epi32(_mm512_add_epi32(nearest, _mm512_set1_epi32(128)), 8);
    _mm_mask_storeu_epi8(upper + i, mask, _mm512_cvtepi32_epi8(rest));
  }
  const int32_t whole = _mm512_reduce_add_epi32(total);
  *excess = kExcess * whole;
  *sum = static_cast<float>(whole) * *scale;
}
#endif

// Returns the bits of bfloat16 for codes of floating point, which are 0 ... 255.
inline IntegerPairs bfloat16_of_float8(IntegerPairs codes) {
  // The exponent's bias is 7 in codes and 127 in bfloat16. Codes 1 ... 7 have no implicit one: they are m * 2^-9.
#if defined(__AVX512BW__)
  alignas(64) static const uint16_t kSubnormal[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
  const __m512i all = reinterpret_cast<__m512i>(codes);
  const __m512i normal = _mm512_add_epi16(_mm512_and_si512(_mm512_slli_epi16(all, 4), _mm512_set1_epi16(0x7f0)),
                                          _mm512_set1_epi16(0x3c00));
  const __mmask32 is_subnormal = _mm512_testn_epi16_mask(all, _mm512_set1_epi16(0x78));
  const __m512i size = _mm512_mask_permutexvar_epi16(normal, is_subnormal, all, _mm512_load_si512(kSubnormal));
  // size | (codes << 8 & 0x8000)
  return reinterpret_cast<IntegerPairs>(
      _mm512_ternarylogic_epi32(size, _mm512_slli_epi16(all, 8), _mm512_set1_epi16(-0x8000), 0xf8));
#else
  const IntegerPairs size = codes & 0x7f;
  const auto smaller = [](IntegerPairs one, IntegerPairs other) { return one < other ? one : other; };
  // The bits of 1, 2 ... 3, 4 ... 7 and of all others are on lines, each of which is below the others there.
  IntegerPairs bits = smaller((size << 4) + 0x3c00, (size << 5) + 0x3b80);
  bits = smaller(bits, (size << 6) + 0x3b00);
  bits = smaller(bits, (size << 7) + 0x3a80);
  bits &= size != 0;
  return bits | (codes & 0x80) << 8;
#endif
}

// Returns the numbers of codes of floating point, which are 0 ... 255.
inline FloatRegister numbers_of_float8(IntegerRegister codes) {
  const IntegerRegister size = codes & 0x7f;
  // Numbers without an implicit one get it, with the least exponent, 2^-6; it is subtracted.
  const IntegerRegister is_subnormal = size < 8;
  const IntegerRegister bits = (size << 20) + (120 << 23) + (is_subnormal & 1 << 23);
  const FloatRegister value = as_floats(reinterpret_cast<WordRegister>(bits)) -
                              as_floats(reinterpret_cast<WordRegister>(is_subnormal & 121 << 23));
  return as_floats(reinterpret_cast<WordRegister>(value) | reinterpret_cast<WordRegister>((codes & 0x80) << 24));
}

// Registers of words of two elements of 16 bits: a pair of inputs of 32 outputs.
constexpr int kPairRegisters = kTileColumns / kRegisterLanes;

// Bytes of the codes of a pair of inputs of 32 outputs.
template <CodeForm kForm>
constexpr int64_t kPairBytes = 2 * kTileColumns * (kForm == CodeForm::kInt4 ? 4 : 8) / 8;

// Expands the codes of a pair of inputs to elements of 16 bits: integers, or bfloat16.
template <CodeForm kForm>
inline void expand_pair(const uint8_t* codes, WordRegister (&words)[kPairRegisters]) {
  constexpr int64_t kStep = kRegisterBytes / 2;
  for (int i = 0; i < kPairBytes<kForm> / kStep; ++i) {
    if constexpr (kForm == CodeForm::kInt8) {
      CodePairs bytes;
      std::memcpy(&bytes, codes + i * kStep, sizeof bytes);
      words[i] = reinterpret_cast<WordRegister>(widened(bytes));
    } else {
      UnsignedCodePairs bytes;
      std::memcpy(&bytes, codes + i * kStep, sizeof bytes);
      const IntegerPairs wide = widened(bytes);
      if constexpr (kForm == CodeForm::kFloat8) {
        words[i] = reinterpret_cast<WordRegister>(bfloat16_of_float8(wide));
      } else {
        words[i] = reinterpret_cast<WordRegister>(wide & 15);
        words[i + kPairRegisters / 2] = reinterpret_cast<WordRegister>(wide >> 4);
      }
    }
  }
}

// Expands the codes of inputs [first, stop) of a panel to words in memory.
template <CodeForm kForm>
inline void expand_pairs(const Linear& layer, int64_t panel, int64_t first, int64_t stop, uint32_t* to) {
  const uint8_t* codes = layer.codes + (panel * layer.num_inputs + first) / 2 * kPairBytes<kForm>;
  for (int64_t input = first; input < stop; input += 2, codes += kPairBytes<kForm>, to += kTileColumns) {
    __builtin_prefetch(codes + kAheadCodes, 0, 2);
    WordRegister words[kPairRegisters];
    expand_pair<kForm>(codes, words);
    std::memcpy(to, words, sizeof words);
  }
}

#if defined(__AVX512VNNI__)
// Bytes of the codes of a word of four inputs of 32 outputs.
template <CodeForm kForm>
constexpr int64_t kFourBytes = 2 * kPairBytes<kForm>;

// Returns where the words of a panel begin that hold `input` and those behind it.
template <CodeForm kForm>
inline const uint8_t* fours_of(const Linear& layer, int64_t panel, int64_t input) {
  const int64_t num_words = (layer.num_inputs + 3) / 4;
  return layer.codes + (panel * num_words + input / 4) * kFourBytes<kForm>;
}

// Returns the unsigned codes of a word of four inputs of 32 outputs.
template <CodeForm kForm>
inline std::array<__m512i, kTileVectors> load_fours(const uint8_t* codes) {
  const __m512i bytes = _mm512_loadu_si512(codes);
  if constexpr (kForm == CodeForm::kInt8) return {bytes, _mm512_loadu_si512(codes + 64)};
  const __m512i low_bits = _mm512_set1_epi8(15);
  return {_mm512_and_si512(bytes, low_bits), _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low_bits)};
}

// Rows that are multiplied at once, with sums for both vectors and both bytes.
constexpr int kByteRows = 6;

// Computes the sums [kRows, 32] of integers of inputs [first, stop) of a panel. `lower` and `upper` are the rows' bytes
// from `first` on.
template <CodeForm kForm, int kRows>
inline void multiply_fours(const Linear& layer, int64_t panel, int64_t first, int64_t stop, const int8_t* lower,
                           const int8_t* upper, int64_t stride, int32_t* sums) {
  // With few rows two sums take turns and need not wait for each other.
  constexpr int kTurns = kRows <= 2 ? 2 : 1;
  __m512i totals[kTurns][kRows][2][kTileVectors] = {};
  const uint8_t* codes = fours_of<kForm>(layer, panel, first);
  const auto add_four = [&](int turn, int64_t at) {
    __builtin_prefetch(codes + kAheadCodes, 0, 2);
    if constexpr (kForm == CodeForm::kInt8) __builtin_prefetch(codes + kAheadCodes + 64, 0, 2);
    const auto words = load_fours<kForm>(codes);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      int32_t of_lower, of_upper;
      std::memcpy(&of_lower, lower + r * stride + at, sizeof of_lower);
      std::memcpy(&of_upper, upper + r * stride + at, sizeof of_upper);
      for (int v = 0; v < kTileVectors; ++v) {
        auto& total = totals[turn][r];
        total[0][v] = _mm512_dpbusd_epi32(total[0][v], words[v], _mm512_set1_epi32(of_lower));
        total[1][v] = _mm512_dpbusd_epi32(total[1][v], words[v], _mm512_set1_epi32(of_upper));
      }
    }
    codes += kFourBytes<kForm>;
  };
  const int64_t count = stop - first;
  int64_t at = 0;
  for (; at + 4 * (kTurns - 1) < count; at += 4 * kTurns) {
    add_four(0, at);
    if constexpr (kTurns == 2) add_four(1, at + 4);
  }
  if (at < count) add_four(0, at);
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kTileVectors; ++v) {
      const auto sum = [&](int byte) {
        __m512i total = totals[0][r][byte][v];
        if constexpr (kTurns == 2) total = _mm512_add_epi32(total, totals[1][r][byte][v]);
        return total;
      };
      _mm512_storeu_si512(sums + r * kTileColumns + v * kLanes,
                          _mm512_add_epi32(sum(0), _mm512_slli_epi32(sum(1), 8)));
    }
  }
}

using MultiplyFours = void (*)(const Linear&, int64_t, int64_t, int64_t, const int8_t*, const int8_t*, int64_t,
                               int32_t*);

template <CodeForm kForm, int... kRows>
constexpr std::array<MultiplyFours, sizeof...(kRows)> multiplies_of_fours(std::integer_sequence<int, kRows...>) {
  return {&multiply_fours<kForm, kRows + 1>...};
}
#endif

// Rows for which codes are expanded in registers only. More rows share codes that are expanded to memory once.
constexpr int64_t kRegisterRows = kMaxSums / kPairRegisters;

// Computes the sums [kRows, 32] of inputs [first, stop) of a panel. `left` has the rows' elements from `first` on.
template <typename Type, CodeForm kForm, int kRows>
inline void multiply_codes(const Linear& layer, int64_t panel, int64_t first, int64_t stop,
                           const typename Type::Left* left, int64_t left_stride, float* sums) {
  // Integers have the same sum in any order, so with few rows two sums take turns and need not wait for each other. Sums
  // of floating point keep the order that they have with more rows.
  constexpr int kTurns = std::is_same_v<Type, Int16> && kRows * kPairRegisters < 8 ? 2 : 1;
  FloatRegister total[kTurns][kRows][kPairRegisters] = {};
  const uint8_t* codes = layer.codes + (panel * layer.num_inputs + first) / 2 * kPairBytes<kForm>;
  const int64_t stride = left_stride * sizeof(*left) / sizeof(uint32_t);
  // One pointer for three rows, because one per row would need more registers than there are.
  const uint32_t* rows[(kRows + 2) / 3];
  for (int i = 0; i < (kRows + 2) / 3; ++i) rows[i] = reinterpret_cast<const uint32_t*>(left) + 3 * i * stride;
  const auto add_pair = [&](int turn) {
    __builtin_prefetch(codes + kAheadCodes, 0, 2);
    WordRegister words[kPairRegisters];
    expand_pair<kForm>(codes, words);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const uint32_t* row = rows[r / 3] + r % 3 * stride;
      const WordRegister first_word = row[0] - WordRegister{};
      for (int p = 0; p < kPairRegisters; ++p) {
        total[turn][r][p] = Type::add_product(total[turn][r][p], first_word, Type::template right<0>(words[p]));
      }
      if constexpr (Type::kNumProducts == 2) {
        const WordRegister second_word = row[1] - WordRegister{};
        for (int p = 0; p < kPairRegisters; ++p) {
          total[turn][r][p] = Type::add_product(total[turn][r][p], second_word, Type::template right<1>(words[p]));
        }
      }
    }
    codes += kPairBytes<kForm>;
    for (const uint32_t*& row : rows) row += Type::kNumProducts;
  };
  const int64_t num_pairs = (stop - first) / 2;
  for (int64_t pair = 0; pair + kTurns <= num_pairs; pair += kTurns) {
    add_pair(0);
    if constexpr (kTurns == 2) add_pair(1);
  }
  if (num_pairs % kTurns != 0) add_pair(0);
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kPairRegisters; ++p) {
      FloatRegister sum = total[0][r][p];
      if constexpr (kTurns == 2) {
        sum = reinterpret_cast<FloatRegister>(reinterpret_cast<IntegerRegister>(sum) +
                                              reinterpret_cast<IntegerRegister>(total[1][r][p]));
      }
      std::memcpy(sums + r * kTileColumns + p * kRegisterLanes, &sum, sizeof sum);
    }
  }
}

template <typename Type>
using MultiplyCodes = void (*)(const Linear&, int64_t, int64_t, int64_t, const typename Type::Left*, int64_t, float*);

template <typename Type, CodeForm kForm, int... kRows>
constexpr std::array<MultiplyCodes<Type>, sizeof...(kRows)> multiplies_of_codes(std::integer_sequence<int, kRows...>) {
  return {&multiply_codes<Type, kForm, kRows + 1>...};
}

// Calls expand(form) with the layer's form as a constant.
template <typename Expand>
inline void for_form(const Linear& layer, Expand expand) {
  switch (layer.code_form) {
    case CodeForm::kInt4:
      return expand(std::integral_constant<CodeForm, CodeForm::kInt4>());
    case CodeForm::kInt8:
      return expand(std::integral_constant<CodeForm, CodeForm::kInt8>());
    case CodeForm::kFloat8:
      return expand(std::integral_constant<CodeForm, CodeForm::kFloat8>());
  }
}

// Returns scales or offsets of `kLanes` outputs from a place on.
inline Floats load_factors(const Linear& layer, const void* factors, int64_t at) {
  if (factors == nullptr) return Floats(0.0f);
  if (layer.factor_bytes == 2) return BFloat16::load(static_cast<const uint16_t*>(factors) + at);
  return load_floats(static_cast<const float*>(factors) + at);
}

// Adds a block's sums of integers to the sums [rows, 32], scaled. `integers_at(place)` returns a register of them, which
// is larger by the rows' excess if `has_excess`.
template <bool has_excess, typename IntegersAt>
inline void add_block(const Linear& layer, int64_t panel, int64_t block, const IntegerInputs& inputs, int64_t first_row,
                      int64_t num_rows, IntegersAt integers_at, float* sums, bool adds) {
  const int64_t num_groups = (layer.num_inputs + layer.group_inputs - 1) / layer.group_inputs;
  const int64_t group = block * layer.block_inputs / layer.group_inputs, blocks = num_blocks(layer);
  const int64_t factors = (panel * num_groups + group) * kTileColumns;
  // Compilers would read the pointers anew for each row, because `sums` might be their place.
  const float *input_scales = inputs.scales.get(), *input_sums = inputs.sums.get();
  const int32_t* excess = inputs.excess.get();
  for (int64_t v = 0; v < kTileColumns; v += kLanes) {
    const Floats scale = load_factors(layer, layer.scales, factors + v);
    const Floats offset = load_factors(layer, layer.offsets, factors + v);
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t at = (first_row + row) * blocks + block, place = row * kTileColumns + v;
      Floats value;
      for (int p = 0; p < kRegisters; ++p) {
        IntegerRegister integers = integers_at(place + p * kRegisterLanes);
        if constexpr (has_excess) integers -= excess[at];
        value.part[p] = __builtin_convertvector(integers, FloatRegister);
      }
      const Floats total = adds ? load_floats(sums + place) : Floats(0.0f);
      store_floats(sums + place, value * (scale * input_scales[at]) + (offset * input_sums[at] + total));
    }
  }
}

inline IntegerRegister load_integers(const void* from) {
  IntegerRegister integers;
  std::memcpy(&integers, from, sizeof integers);
  return integers;
}

#if defined(__AVX512VNNI__) && defined(__AMX_BF16__)
// From so many rows on, AMX is faster than vectors.
constexpr int64_t kAmxRows = 8;

// Sums of the products of a block's bytes by AMX, [16, 32], until they are scaled.
struct AmxSums {
  alignas(64) int32_t lower[kTileSide * kTileColumns], upper[kTileSide * kTileColumns];
  int64_t block = 0, row = 0, rows = 0;
};

// Computes the sums [num_rows, 32] of a panel by AMX. Vectors scale the sums of some rows while tiles multiply the next
// ones.
template <CodeForm kForm>
void multiply_bytes_by_amx(const Linear& layer, int64_t panel, const IntegerInputs& inputs, int64_t first_row,
                           int64_t num_rows, float* sums) {
  constexpr int64_t kWords = kTileSide * kTileColumns;
  alignas(64) uint32_t words[kExpandedInputs / 4 * kTileColumns];
  AmxTiles tiles;
  AmxSums found[2];
  int turn = 0;
  const int64_t size = layer.block_inputs, stride = IntegerInputs::bytes_stride(layer.num_inputs);
  const auto scale = [&](const AmxSums& of) {
    if (of.rows == 0) return;
    const auto integers_at = [&](int64_t place) {
      return load_integers(of.lower + place) + (load_integers(of.upper + place) << 8);
    };
    add_block<kForm == CodeForm::kInt8>(layer, panel, of.block, inputs, first_row + of.row, of.rows, integers_at,
                                        sums + of.row * kTileColumns, of.block > 0);
  };
  for (int64_t block = 0; block < num_blocks(layer); ++block) {
    const int64_t first = block * size, count = std::min(size, layer.num_inputs - first);
    const uint8_t* codes = fours_of<kForm>(layer, panel, first);
    const int64_t num_tiles = (count + kTileBytes - 1) / kTileBytes;
    const uint32_t* right = reinterpret_cast<const uint32_t*>(codes);
    if (kForm == CodeForm::kInt4 || count % kTileBytes != 0) {
      // Bytes behind the block are multiplied with zeros.
      int64_t at = 0;
      for (int64_t input = 0; input < count; input += 4, codes += kFourBytes<kForm>, at += kTileColumns) {
        __builtin_prefetch(codes + kAheadCodes, 0, 2);
        const auto two = load_fours<kForm>(codes);
        for (int v = 0; v < kTileVectors; ++v) _mm512_store_si512(words + at + v * kLanes, two[v]);
      }
      std::fill(words + at, words + num_tiles * kWords, 0u);
      right = words;
    }
    for_row_tiles<kTileSide>(num_rows, [&](int64_t row, int64_t rows, int64_t tile, int64_t num_row_tiles) {
      if (right != words) {
        // Each tile of rows prefetches its part of the next block.
        for (int64_t i = tile; i < count / 2; i += num_row_tiles) __builtin_prefetch(codes + kAheadCodes + 64 * i, 0, 2);
      }
      AmxSums& now = found[turn];
      turn = 1 - turn;
      const int64_t at = (first_row + row) * stride + first;
      tiles.multiply_bytes(rows, inputs.lower.data() + at, inputs.upper.data() + at, stride, right, num_tiles,
                           now.lower, now.upper);
      now.block = block;
      now.row = row;
      now.rows = rows;
      scale(found[turn]);
      found[turn].rows = 0;
    });
  }
  scale(found[1 - turn]);
}
#endif

// Adds a block's sums [rows, 32] to the sums, scaled.
inline void add_scaled(const Linear& layer, int64_t panel, int64_t block, int64_t num_rows, const float* parts,
                       float* sums, bool adds) {
  const int64_t num_groups = (layer.num_inputs + layer.group_inputs - 1) / layer.group_inputs;
  const int64_t group = block * layer.block_inputs / layer.group_inputs;
  const int64_t factors = (panel * num_groups + group) * kTileColumns;
  for (int64_t v = 0; v < kTileColumns; v += kLanes) {
    const Floats scale = load_factors(layer, layer.scales, factors + v);
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t place = row * kTileColumns + v;
      const Floats total = adds ? load_floats(sums + place) : Floats(0.0f);
      store_floats(sums + place, load_floats(parts + place) * scale + total);
    }
  }
}

// Expands the words of inputs [first, stop) of a panel. All of them belong to one group.
template <typename Type, CodeForm kForm>
inline void expand_group(const Linear& layer, int64_t panel, int64_t first, int64_t stop, typename Type::Element* to) {
  constexpr int64_t kBits = kForm == CodeForm::kInt4 ? 4 : 8;
  constexpr int64_t kElements = kTileColumns * Type::kPerWord, kVectors = kElements / kLanes;
  constexpr int64_t kBytes = kElements * kBits / 8;
  const int64_t num_groups = (layer.num_inputs + layer.group_inputs - 1) / layer.group_inputs;
  const int64_t at = (panel * num_groups + first / layer.group_inputs) * kTileColumns;
  Floats scales[kVectors], offsets[kVectors];
  alignas(64) float factors[2][kTileColumns], repeated[2][kElements];
  for (int64_t v = 0; v < kTileColumns; v += kLanes) {
    store_floats(factors[0] + v, load_factors(layer, layer.scales, at + v));
    store_floats(factors[1] + v, load_factors(layer, layer.offsets, at + v));
  }
  for (int64_t e = 0; e < kElements; ++e) {
    for (int part = 0; part < 2; ++part) repeated[part][e] = factors[part][e / Type::kPerWord];
  }
  for (int64_t v = 0; v < kVectors; ++v) {
    scales[v] = load_floats(repeated[0] + v * kLanes);
    offsets[v] = load_floats(repeated[1] + v * kLanes);
  }
  const uint8_t* codes = layer.codes + (panel * layer.num_inputs + first) / Type::kPerWord * kBytes;
  for (int64_t input = first; input < stop; input += Type::kPerWord, codes += kBytes, to += kElements) {
    __builtin_prefetch(codes + kAheadCodes, 0, 2);
    for (int64_t v = 0; v < kVectors; v += kBits == 8 ? 1 : 2) {
      // Four bits: the first half of a word's elements is in the lower bits, the second half in the upper ones.
      const int64_t low = kBits == 8 ? v : v / 2, high = low + kVectors / 2;
      Floats lows, highs;
      for (int p = 0; p < kRegisters; ++p) {
        if constexpr (kForm == CodeForm::kInt8) {
          const auto* bytes = reinterpret_cast<const int8_t*>(codes) + v * kLanes + p * kRegisterLanes;
          lows.part[p] = __builtin_convertvector(load_bytes(bytes), FloatRegister);
        } else if constexpr (kForm == CodeForm::kFloat8) {
          lows.part[p] = numbers_of_float8(load_bytes(codes + v * kLanes + p * kRegisterLanes));
        } else {
          const IntegerRegister both = load_bytes(codes + low * kLanes + p * kRegisterLanes);
          lows.part[p] = __builtin_convertvector(both & 15, FloatRegister);
          highs.part[p] = __builtin_convertvector(both >> 4, FloatRegister);
        }
      }
      Type::store(to + low * kLanes, lows * scales[low] + offsets[low]);
      if constexpr (kBits == 4) Type::store(to + high * kLanes, highs * scales[high] + offsets[high]);
    }
  }
}

// Computes the sums [num_rows, 32] of a panel with weights expanded to the element type.
template <typename Type>
void multiply_expanded(const Linear& layer, int64_t panel, const typename Type::Left* input, int64_t num_rows,
                       float* sums) {
  alignas(64) uint32_t words[kExpandedInputs * kTileColumns / Type::kPerWord];
  for (int64_t first = 0; first < layer.num_inputs; first += kExpandedInputs) {
    const int64_t end = std::min(first + kExpandedInputs, layer.num_inputs);
    for (int64_t start = first, stop; start < end; start = stop) {
      stop = std::min((start / layer.group_inputs + 1) * layer.group_inputs, end);
      auto* to = reinterpret_cast<typename Type::Element*>(words) + (start - first) * kTileColumns;
      for_form(layer, [&](auto form) { expand_group<Type, decltype(form)::value>(layer, panel, start, stop, to); });
    }
    const Segment all{{words, words + kLanes}, (end - first) / Type::kPerWord};
    for_row_tiles(num_rows, [&](int64_t row, int64_t rows, int64_t, int64_t) {
      const Operands<Type> of{input + row * layer.num_inputs + first, layer.num_inputs, &all, 1, kTileColumns};
      multiply<Type>(rows, kTileVectors, sums + row * kTileColumns, kTileColumns, of, first > 0);
    });
  }
}

// Computes the sums [num_rows, 32] of inputs [first, stop) of a panel, not scaled. `left` has the rows' elements from
// `first` on. `words` is a buffer.
template <typename Type, CodeForm kForm>
inline void block_sums(const Linear& layer, int64_t panel, int64_t first, int64_t stop,
                       const typename Type::Left* left, int64_t num_rows, Product<Type>& product, uint32_t* words,
                       float* sums) {
  // AMX sums floating point in its own order, so it does that for any number of rows.
  if constexpr (!kUsesAmx<Type>) {
    if (num_rows <= kRegisterRows) {
      static constexpr auto kMultiplies =
          multiplies_of_codes<Type, kForm>(std::make_integer_sequence<int, kRegisterRows>());
      return kMultiplies[num_rows - 1](layer, panel, first, stop, left, layer.num_inputs, sums);
    }
  }
  expand_pairs<kForm>(layer, panel, first, stop, words);
  const Segment all{{words, words + kLanes}, (stop - first) / 2};
  for_row_tiles<Product<Type>::kRows>(num_rows, [&](int64_t row, int64_t rows, int64_t, int64_t) {
    const Operands<Type> of{left + row * layer.num_inputs, layer.num_inputs, &all, 1, kTileColumns};
    product.multiply(rows, kTileVectors, sums + row * kTileColumns, kTileColumns, of, false);
  });
}

// Computes the sums [num_rows, 32] of a panel with codes of floating point, block by block.
template <typename Type>
void multiply_float8(const Linear& layer, int64_t panel, const typename Type::Left* input, int64_t num_rows,
                     float* sums) {
  alignas(64) float parts[kExpandedRows * kTileColumns];
  alignas(64) uint32_t words[kExpandedInputs * kTileColumns / 2];
  Product<Type> product;
  const int64_t size = layer.block_inputs;
  for (int64_t block = 0; block < num_blocks(layer); ++block) {
    const int64_t first = block * size, stop = std::min(first + size, layer.num_inputs);
    block_sums<Type, CodeForm::kFloat8>(layer, panel, first, stop, input + first, num_rows, product, words, parts);
    add_scaled(layer, panel, block, num_rows, parts, sums, block > 0);
  }
}

#if defined(__AVX512VNNI__)
// Computes the sums [num_rows, 32] of a panel with codes in words of four inputs.
template <CodeForm kForm>
void multiply_bytes(const Linear& layer, int64_t panel, const IntegerInputs& inputs, int64_t first_row,
                    int64_t num_rows, float* sums) {
#if defined(__AMX_BF16__)
  if (num_rows >= kAmxRows) return multiply_bytes_by_amx<kForm>(layer, panel, inputs, first_row, num_rows, sums);
#endif
  static constexpr auto kMultiplies = multiplies_of_fours<kForm>(std::make_integer_sequence<int, kByteRows>());
  alignas(64) int32_t parts[kByteRows * kTileColumns];
  const int64_t size = layer.block_inputs, stride = IntegerInputs::bytes_stride(layer.num_inputs);
  for (int64_t block = 0; block < num_blocks(layer); ++block) {
    const int64_t first = block * size, stop = std::min(first + size, layer.num_inputs);
    for_row_tiles<kByteRows>(num_rows, [&](int64_t row, int64_t rows, int64_t, int64_t) {
      const int64_t at = (first_row + row) * stride + first;
      kMultiplies[rows - 1](layer, panel, first, stop, inputs.lower.data() + at, inputs.upper.data() + at, stride,
                            parts);
      const auto integers_at = [&](int64_t place) { return load_integers(parts + place); };
      add_block<kForm == CodeForm::kInt8>(layer, panel, block, inputs, first_row + row, rows, integers_at,
                                          sums + row * kTileColumns, block > 0);
    });
  }
}
#endif

// Computes the sums [num_rows, 32] of a panel with codes that are integers, block by block.
template <CodeForm kForm>
void multiply_integers(const Linear& layer, int64_t panel, const IntegerInputs& inputs, int64_t first_row,
                       int64_t num_rows, float* sums) {
  const int64_t num_groups = (layer.num_inputs + layer.group_inputs - 1) / layer.group_inputs;
  const int64_t scale_bytes = num_groups * kTileColumns * layer.factor_bytes;
  const char* ahead = static_cast<const char*>(layer.scales) + (panel + kAheadPanels) * scale_bytes;
  for (int64_t i = 0; i < scale_bytes; i += 64) __builtin_prefetch(ahead + i, 0, 2);
#if defined(__AVX512VNNI__)
  if (layer.word_inputs == 4) return multiply_bytes<kForm>(layer, panel, inputs, first_row, num_rows, sums);
#endif
  alignas(64) float parts[kExpandedRows * kTileColumns];
  alignas(64) uint32_t words[kExpandedInputs * kTileColumns / 2];
  Product<Int16> product;
  const int64_t size = layer.block_inputs;
  for (int64_t block = 0; block < num_blocks(layer); ++block) {
    const int64_t first = block * size, stop = std::min(first + size, layer.num_inputs);
    const int16_t* left = inputs.integers.get() + first_row * layer.num_inputs + first;
    block_sums<Int16, kForm>(layer, panel, first, stop, left, num_rows, product, words, parts);
    const auto integers_at = [&](int64_t place) { return load_integers(parts + place); };
    add_block<false>(layer, panel, block, inputs, first_row, num_rows, integers_at, sums, block > 0);
  }
}

// Whether a layer multiplies integers; otherwise it takes inputs as they are.
template <typename Type>
inline bool takes_integers(const Linear& layer) {
  return Type::kIsRough && layer.codes != nullptr && layer.code_form != CodeForm::kFloat8;
}

// Rounds a block of the inputs [rows, num_inputs] of a layer that multiplies integers. `item` counts the blocks of all
// rows.
template <typename Type>
inline void round_input_block(const Linear& layer, const typename Type::Left* input, int64_t item,
                              IntegerInputs& integers) {
  if constexpr (Type::kIsRough) {
    const int64_t size = layer.block_inputs, blocks = num_blocks(layer);
    const int64_t first = item % blocks * size, at = item / blocks * layer.num_inputs + first;
    const int64_t count = std::min(size, layer.num_inputs - first);
    float *scale = integers.scales.get() + item, *sum = integers.sums.get() + item;
#if defined(__AVX512VNNI__)
    if (layer.word_inputs == 4) {
      const int64_t stride = IntegerInputs::bytes_stride(layer.num_inputs), to = item / blocks * stride + first;
      int8_t *lower = integers.lower.data() + to, *upper = integers.upper.data() + to;
      round_block_to_bytes(input + at, count, lower, upper, scale, sum, integers.excess.get() + item);
      // What a word or a tile reads behind the last input.
      const int64_t behind = first + count == layer.num_inputs ? stride - layer.num_inputs : 0;
      std::fill(lower + count, lower + count + behind, int8_t{0});
      std::fill(upper + count, upper + count + behind, int8_t{0});
      return;
    }
#endif
    round_block<Type>(input + at, count, integers.integers.get() + at, scale, sum);
  }
}

// Rounds all inputs of one row, if the layer multiplies integers.
template <typename Type>
inline void round_input_row(const Linear& layer, const typename Type::Left* input, int64_t row,
                            IntegerInputs& integers) {
  if (!takes_integers<Type>(layer)) return;
  const int64_t blocks = num_blocks(layer);
  for (int64_t block = 0; block < blocks; ++block) {
    round_input_block<Type>(layer, input, row * blocks + block, integers);
  }
}

// Inputs that one thread rounds at least: fewer take no longer than telling another thread.
constexpr int64_t kRoundedAtOnce = 2048;

// Rounds the inputs [num_rows, num_inputs] of a layer that multiplies integers: a phase.
template <typename Type>
void round_inputs(Worker& worker, const Linear& layer, const typename Type::Left* input, int64_t num_rows,
                  IntegerInputs& integers) {
  if (!takes_integers<Type>(layer)) return;
  const int64_t num_items = num_rows * num_blocks(layer);
  const int64_t grain = std::max(Worker::grain_of(num_items), kRoundedAtOnce / layer.block_inputs);
  worker.run(num_items, grain, [&](int64_t item) { round_input_block<Type>(layer, input, item, integers); });
}

// Computes the sums [num_rows, 32] of a panel for up to kExpandedRows rows from `first_row`, without bias.
template <typename Type>
void quantized_sums(const Linear& layer, int64_t panel, const typename Type::Left* input,
                    const IntegerInputs& integers, int64_t first_row, int64_t num_rows, float* sums) {
  if constexpr (Type::kIsRough) {
    switch (layer.code_form) {
      case CodeForm::kInt4:
        return multiply_integers<CodeForm::kInt4>(layer, panel, integers, first_row, num_rows, sums);
      case CodeForm::kInt8:
        return multiply_integers<CodeForm::kInt8>(layer, panel, integers, first_row, num_rows, sums);
      case CodeForm::kFloat8:
        return multiply_float8<Type>(layer, panel, input + first_row * layer.num_inputs, num_rows, sums);
    }
  } else {
    multiply_expanded<Type>(layer, panel, input + first_row * layer.num_inputs, num_rows, sums);
  }
}

// Calls finish(row, first column, sums [32]) for each row of each panel, bias added. `input` is [num_rows, num_inputs].
// It is two phases with bfloat16 and codes that are integers, unless the inputs are in `integers` already (`is_rounded`).
// Otherwise it is one, which needs no `integers`.
template <typename Type, typename Finish>
void quantized_linear(Worker& worker, const Linear& layer, const typename Type::Left* input, int64_t num_rows,
                      IntegerInputs& integers, bool is_rounded, Finish finish) {
  if (!is_rounded) round_inputs<Type>(worker, layer, input, num_rows, integers);
  const int64_t num_panels = (layer.num_outputs + kTileColumns - 1) / kTileColumns;
  const int64_t num_chunks = (num_rows + kExpandedRows - 1) / kExpandedRows;
  const int64_t side_by_side = std::max<int64_t>(1, num_chunks * num_panels / (16 * omp_get_num_threads()));
  worker.run_alike(num_chunks * num_panels, side_by_side, [&](int64_t item) {
    const int64_t chunk = item / num_panels * kExpandedRows, panel = item % num_panels;
    const int64_t count = std::min(kExpandedRows, num_rows - chunk);
    alignas(64) float sums[kExpandedRows * kTileColumns];
    quantized_sums<Type>(layer, panel, input, integers, chunk, count, sums);
    for (int64_t row = 0; row < count; ++row) {
      float* of_row = sums + row * kTileColumns;
      if (layer.bias != nullptr) {
        for (int64_t c = 0; c < kTileColumns; ++c) of_row[c] += layer.bias[panel * kTileColumns + c];
      }
      finish(chunk + row, panel * kTileColumns, of_row);
    }
  });
}

}  // namespace lookonce
