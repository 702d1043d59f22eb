// The layout of keys and values in the blocks of a pool, and writing a token's key and value.

#pragma once

#include "lanes.h"
#include "step.h"

namespace lookonce {

constexpr int64_t kMaxHeadDim = 576;
// The largest code of a rounded number.
constexpr float kLargestCode = 127.0f;

typedef int8_t CodeLanes __attribute__((vector_size(kRegisterLanes)));

// Places of elements in the part of a block that belongs to one head; keys are stored in groups of 16.
template <typename Type>
struct HeadPlaces {
  // Index of the first element of the group of 16 keys that contains `slot`: words [head_dim in words, 16]. The values
  // of that group, words [16 keys in words, head_dim], begin at the same index.
  static int64_t group(int64_t slot, int64_t dim) { return slot / kLanes * kLanes * dim; }

  static int64_t key(int64_t slot, int64_t d, int64_t dim) {
    constexpr int64_t per_word = Type::kPerWord;
    return group(slot, dim) + (d / per_word * kLanes + slot % kLanes) * per_word + d % per_word;
  }

  static int64_t value(int64_t slot, int64_t d, int64_t dim) {
    constexpr int64_t per_word = Type::kPerWord;
    return (slot / per_word * dim + d) * per_word + slot % per_word;
  }
};

// The part of a block that belongs to one head, with elements of the model's type.
template <typename Type>
struct HeadBlock {
  using Element = typename Type::Element;

  HeadBlock(const Heads& heads, const Pools& pools, int64_t block, int64_t head) {
    const int64_t first = (block * heads.num_kv_heads + head) * heads.block_slots * heads.head_dim;
    keys = static_cast<Element*>(pools.keys) + first;
    values = pools.values == nullptr ? nullptr : static_cast<Element*>(pools.values) + first;
  }

  Element* keys;
  Element* values;
};

// One head's keys or values in a block of a rounded pool: codes in the order of HeadBlock's elements, then a scale for
// each slot.
struct RoundedBlock {
  RoundedBlock(const Heads& heads, void* pool, int64_t block, int64_t head) {
    const int64_t slot_bytes = heads.head_dim + sizeof(float);
    codes = static_cast<int8_t*>(pool) + (block * heads.num_kv_heads + head) * heads.block_slots * slot_bytes;
    scales = reinterpret_cast<float*>(codes + heads.block_slots * heads.head_dim);
  }

  int8_t* codes;
  float* scales;
};

// Rounds [count] numbers to codes and returns their scale: the largest becomes 127 or -127. The scale is NaN if one of
// them is infinite or not a number.
template <typename Type>
float round_to_codes(const typename Type::Element* from, int64_t count, int8_t* codes) {
  const float most = largest_size(count, [&](int64_t i) { return Type::load(from + i); });
  if (std::isnan(most)) {
    std::fill(codes, codes + count, int8_t{1});
    return NAN;
  }
  const float scale = most / kLargestCode;
  const float factor = scale > 0.0f ? 1.0f / scale : 0.0f;
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats value = Type::load(from + i) * factor;
    const Floats half = select(value < 0.0f, -0.5f, 0.5f);
    for (int p = 0; p < kRegisters; ++p) {
      // The conversion truncates towards zero.
      const IntegerRegister nearest = __builtin_convertvector(value.part[p] + half.part[p], IntegerRegister);
      const CodeLanes narrow = __builtin_convertvector(nearest, CodeLanes);
      std::memcpy(codes + i + p * kRegisterLanes, &narrow, sizeof narrow);
    }
  }
  return scale;
}

// Converts codes to elements, without their scale. Each code is exact in either type.
template <typename Type>
void expand_codes(const int8_t* codes, int64_t count, typename Type::Element* to) {
  for (int64_t i = 0; i < count; i += kLanes) {
    Floats value;
    for (int p = 0; p < kRegisters; ++p) {
      value.part[p] = __builtin_convertvector(load_bytes(codes + i + p * kRegisterLanes), FloatRegister);
    }
    Type::store(to + i, value);
  }
}

// Whether [count] elements are finite numbers.
template <typename Type>
bool are_finite(const typename Type::Element* from, int64_t count) {
  return !std::isnan(largest_size(count, [&](int64_t i) { return Type::load(from + i); }));
}

// Writes one head's `key` and `value` [head_dim]; no value where values are parts of keys. `is_last`: no later token of
// this sequence is in the step. The element that shares a word with the last value is multiplied by a weight of 0, so it
// must not be NaN and is set to 0.
//
// If an element is infinite or not a number, so are the results of all tokens that see this one, and of no others: the
// key becomes NaN, and the value, which is multiplied by 0 for tokens that do not see it, becomes 0.
template <typename Type>
void write_token(const Heads& heads, const Pools& pools, int64_t slot, int64_t head, const typename Type::Element* key,
                 const typename Type::Element* value, bool is_last) {
  using Places = HeadPlaces<Type>;
  const int64_t dim = heads.head_dim, block = slot / heads.block_size, in_block = slot % heads.block_size;
  if (heads.is_rounded) {
    const RoundedBlock keys(heads, pools.keys, block, head), values(heads, pools.values, block, head);
    int8_t codes[kMaxHeadDim];
    keys.scales[in_block] = round_to_codes<Type>(key, dim, codes);
    for (int64_t d = 0; d < dim; ++d) keys.codes[Places::key(in_block, d, dim)] = codes[d];
    values.scales[in_block] = round_to_codes<Type>(value, dim, codes);
    for (int64_t d = 0; d < dim; ++d) values.codes[Places::value(in_block, d, dim)] = codes[d];
    if (std::isnan(keys.scales[in_block] + values.scales[in_block])) {
      keys.scales[in_block] = NAN;
      values.scales[in_block] = 0.0f;
    }
    return;
  }
  using Element = typename Type::Element;
  Element spoilt_key[kMaxHeadDim], spoilt_value[kMaxHeadDim];
  if (!are_finite<Type>(key, dim) || (value != nullptr && !are_finite<Type>(value, dim))) {
    for (int64_t d = 0; d < dim; d += kLanes) {
      // Where values are the first parts of keys, the last part alone is NaN.
      Type::store(spoilt_key + d, Floats(d + kLanes == dim ? NAN : 0.0f));
      Type::store(spoilt_value + d, Floats(0.0f));
    }
    key = spoilt_key;
    value = value == nullptr ? nullptr : spoilt_value;
  }
  const HeadBlock<Type> to(heads, pools, block, head);
  if (heads.value_dim > 0) {
    for (int64_t d = 0; d < dim; ++d) to.keys[Places::key(in_block, d, dim)] = key[d];
    return;
  }
  for (int64_t d = 0; d < dim; ++d) {
    to.keys[Places::key(in_block, d, dim)] = key[d];
    to.values[Places::value(in_block, d, dim)] = value[d];
  }
  if (is_last && (in_block + 1) % Type::kPerWord != 0) {
    for (int64_t d = 0; d < dim; ++d) to.values[Places::value(in_block + 1, d, dim)] = 0;
  }
}

}  // namespace lookonce
