// The layout of keys and values in the blocks of a pool, and writing a token's key and value.

#pragma once

#include "lanes.h"
#include "step.h"

namespace lookonce {

// The part of a block that belongs to one head; keys are stored in groups of 16.
template <typename Type>
struct HeadBlock {
  using Element = typename Type::Element;

  HeadBlock(const Heads& heads, const Pools& pools, int64_t block, int64_t head) : dim(heads.head_dim) {
    const int64_t first = (block * heads.num_kv_heads + head) * heads.block_slots * dim;
    keys = static_cast<Element*>(pools.keys) + first;
    values = static_cast<Element*>(pools.values) + first;
  }

  // Words [head_dim in words, 16] of the group of 16 keys that contains `slot`.
  const uint32_t* keys_at(int64_t slot) const {
    return reinterpret_cast<const uint32_t*>(keys) + slot / kLanes * kLanes * dim / Type::kPerWord;
  }

  // Words [16 keys in words, head_dim] of the values of that group.
  const uint32_t* values_at(int64_t slot) const {
    return reinterpret_cast<const uint32_t*>(values) + slot / kLanes * kLanes * dim / Type::kPerWord;
  }

  void write_key(int64_t slot, int64_t d, Element key) const {
    constexpr int64_t per_word = Type::kPerWord;
    keys[slot / kLanes * kLanes * dim + (d / per_word * kLanes + slot % kLanes) * per_word + d % per_word] = key;
  }

  void write_value(int64_t slot, int64_t d, Element value) const {
    constexpr int64_t per_word = Type::kPerWord;
    values[(slot / per_word * dim + d) * per_word + slot % per_word] = value;
  }

  Element* keys;
  Element* values;
  int64_t dim;
};

// Writes one head's `key` and `value` [head_dim]. `is_last`: no later token of this sequence is in the step. The element
// that shares a word with the last value is multiplied by a weight of 0, so it must not be NaN and is set to 0.
template <typename Type>
void write_token(const Heads& heads, const Pools& pools, int64_t slot, int64_t head, const typename Type::Element* key,
                 const typename Type::Element* value, bool is_last) {
  const HeadBlock<Type> block(heads, pools, slot / heads.block_size, head);
  const int64_t in_block = slot % heads.block_size;
  for (int64_t d = 0; d < heads.head_dim; ++d) {
    block.write_key(in_block, d, key[d]);
    block.write_value(in_block, d, value[d]);
  }
  if (is_last && (in_block + 1) % Type::kPerWord != 0) {
    for (int64_t d = 0; d < heads.head_dim; ++d) block.write_value(in_block + 1, d, 0);
  }
}

}  // namespace lookonce
