// The structures that describe one step: its tokens, its sequences and the positions of their keys and values.
// native_structures.py has the same fields.

#pragma once

#include <cstdint>
#include <vector>

namespace lookonce {

// The blocks of one group of layers. Indexes refer to the group's pools.
struct BlockGroup {
  const int64_t* slots;         // [num_tokens] Slot of each token's key and value.
  const int64_t* blocks;        // Blocks of all sequences, one sequence after the other.
  const int64_t* first_blocks;  // [num_sequences] Index in `blocks` of each sequence's first block.
  const int64_t* first_keys;    // [num_sequences] Token in the first slot of each sequence's first block.
};

struct Step {
  const int64_t* first_tokens;  // [num_sequences + 1] First token of each sequence in the flattened step, and the end.
  const int64_t* num_keys;      // [num_sequences] Tokens of each sequence, the new ones included.
  const int64_t* span_starts;   // [num_tokens] Mutual span of each token, in its sequence; empty: none. May be null.
  const int64_t* span_stops;
  BlockGroup groups[2];  // The full group and the sliding group.
  int64_t num_sequences;
  int64_t num_tokens;
  int64_t is_mutual_beyond_window;
  int64_t num_threads;
};

// Returns [num_tokens]: whether no later token of the same sequence is in the step.
inline std::vector<char> last_tokens(const Step& step) {
  std::vector<char> is_last(step.num_tokens, 0);
  for (int64_t s = 0; s < step.num_sequences; ++s) is_last[step.first_tokens[s + 1] - 1] = 1;
  return is_last;
}

// Attention shapes of the layers of a group.
struct Heads {
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;    // A multiple of 16.
  int64_t block_size;  // Tokens in a block.
  int64_t block_slots;  // Slots of a block in a pool: block_size rounded up to 16.
  int64_t is_rounded;   // Keys and values are codes of 8 bits with a scale for each head and slot.
  // Values are the first `value_dim` elements of keys, a multiple of 16, and have no pool; 0: they are as wide as keys,
  // and have a pool. Not together with `is_rounded`.
  int64_t value_dim;
};

inline int64_t size_of_value(const Heads& heads) { return heads.value_dim > 0 ? heads.value_dim : heads.head_dim; }

// A layer's keys [blocks, kv_heads, block_slots / 16, head_dim in words, 16] and values [blocks, kv_heads, block_slots in
// words, head_dim]; null: values are parts of keys. A word of keys holds neighbouring dimensions of one token, a word of values neighbouring tokens.
// pools.h has the layout of rounded ones.
struct Pools {
  void* keys;
  void* values;
};

struct LayerOptions {
  int64_t group;   // Index into Step::groups.
  // Number of keys that a token sees, itself included, or the tokens of a chunk of the sequence; 0: all keys.
  int64_t window;
  float scale;
  float softcap;      // 0: no soft cap.
  int64_t is_causal;   // Tokens see no later ones, even inside a mutual span.
  int64_t is_chunked;  // A token sees the keys of its own chunk of `window` tokens.
};

}  // namespace lookonce
