// The states of a step's sequences in the pool of a recurrent layer.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace lookonce {

// NativeStateStep in native_structures.py has the same fields.
struct StateStep {
  const int64_t* sources;          // State that each sequence begins with; negative: zeros.
  const int64_t* targets;          // State that each sequence leaves.
  const int64_t* first_tokens;     // [num_sequences + 1] First token of each sequence, and the end.
  const int64_t* first_snapshots;  // [num_sequences + 1] First snapshot of each sequence, and the end.
  const int64_t* snapshot_tokens;  // New tokens of the sequence that a snapshot has seen, ascending in a sequence.
  const int64_t* snapshot_states;  // State that the snapshot is copied to.
  int64_t num_sequences;
};

// Returns the number of tokens of all sequences.
inline int64_t num_tokens(const StateStep& step) { return step.first_tokens[step.num_sequences]; }

// Returns the sequence of each token.
inline std::vector<int64_t> token_sequences(const StateStep& step) {
  std::vector<int64_t> found(num_tokens(step));
  for (int64_t sequence = 0; sequence < step.num_sequences; ++sequence) {
    std::fill(found.begin() + step.first_tokens[sequence], found.begin() + step.first_tokens[sequence + 1], sequence);
  }
  return found;
}

}  // namespace lookonce
