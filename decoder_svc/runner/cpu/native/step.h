// What one step is about: its tokens, its sequences and where their keys and values lie. Mirrored in native_structures.py.

#pragma once

#include <cstdint>
#include <vector>

namespace lookonce {

// The blocks of one group of layers. Indexes are into the group's pools.
struct BlockGroup {
  const int64_t* slots;         // [num_tokens] Where each token's key and value go.
  const int64_t* blocks;        // Of all sequences, one after the other.
  const int64_t* first_blocks;  // [num_sequences] Where each sequence's blocks begin in `blocks`.
  const int64_t* first_keys;    // [num_sequences] The token in the first slot of the first block.
};

struct Step {
  const int64_t* first_tokens;  // [num_sequences + 1] Of each sequence in the flattened step, and its end.
  const int64_t* num_keys;      // [num_sequences] Tokens that it has, the new ones included.
  const int64_t* span_starts;   // [num_tokens] Tokens that see each other: of the sequence, or null; equal: none.
  const int64_t* span_stops;
  BlockGroup groups[2];  // Of layers that see everything, and of the sliding group.
  int64_t num_sequences;
  int64_t num_tokens;
  int64_t is_mutual_beyond_window;
  int64_t num_threads;
};

// [num_tokens] Whether no later token of the same sequence is in the step.
inline std::vector<char> last_tokens(const Step& step) {
  std::vector<char> is_last(step.num_tokens, 0);
  for (int64_t s = 0; s < step.num_sequences; ++s) is_last[step.first_tokens[s + 1] - 1] = 1;
  return is_last;
}

// What all layers have in common.
struct Heads {
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;    // A multiple of 16.
  int64_t block_size;  // Tokens in a block.
  int64_t block_slots;  // The same rounded up to 16: a block's room in a pool.
};

// A layer's keys [blocks, kv_heads, block_slots / 16, head_dim in words, 16] and values [blocks, kv_heads, block_slots in
// words, head_dim]; a word of keys holds neighbours of one head's dimension, a word of values neighbouring tokens.
struct Pools {
  void* keys;
  void* values;
};

struct LayerOptions {
  int64_t group;   // Index into Step::groups.
  int64_t window;  // Keys that a token sees, itself included; 0: all.
  float scale;
  float softcap;  // 0: none.
};

}  // namespace lookonce
