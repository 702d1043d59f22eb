// The new tokens of several sequences in a gated delta net layer (arXiv:2412.06464, equation 10), in float32: a short
// convolution over the inputs of each channel, and for each token of a head
//
//     S <- exp(decay) · S;   S <- S + k (beta (v - k S));   output = q S
//
// with a state S, which is a matrix [key_dim, value_dim] whose columns are independent. A block of columns stays in the
// first-level cache while all tokens of a sequence go over it, one after the other. A token's numbers therefore depend
// neither on the batch nor on how a prompt is cut into chunks. The chunked form of the paper needs fewer operations per
// token, but has another order of sums for each cut.

#include <cmath>
#include <vector>

#include "aligned.h"
#include "lanes.h"
#include "state_columns.h"
#include "state_step.h"
#include "window_inputs.h"

namespace lookonce {

// The structure below has the same fields in native_delta.py. Channels are those of all queries, keys and values.
struct DeltaStep {
  StateStep states;
  const void* mixed;               // [num_tokens, num_channels] Inputs of the convolution.
  const void* windows;             // [num_sequences, window, num_channels] Inputs before each sequence's first token.
  const float* filter;             // [window + 1, num_channels]
  const float* kept;               // [num_value_heads, num_tokens] exp(decay)
  const float* beta;               // [num_value_heads, num_tokens]
  float* matrices;                 // [num_states, num_value_heads, key_dim, value_dim]
  void* left_windows;  // [num_sequences + num_snapshots, window, num_channels] Last inputs of sequences and snapshots.
  float* output;       // [num_value_heads, num_tokens, value_dim]
  int64_t num_key_heads;  // Each serves num_value_heads / num_key_heads heads of values in a row.
  int64_t num_value_heads;
  int64_t key_dim;
  int64_t value_dim;  // A multiple of 16.
  int64_t window;
};

namespace {

// Vectors of a block of columns, for which sums and corrections stay in registers.
constexpr int kBlockVectors = kNumRegisters >= 32 ? 4 : 1;
constexpr int64_t kBlockColumns = kBlockVectors * kLanes;

// One token in some columns of a head.
struct HeadToken {
  const float* query;  // [key_dim], normalized.
  const float* key;    // [key_dim], normalized.
  const float* value;
  float* output;
  float kept;
  float beta;
  int64_t key_dim;
};

// Writes k S of some columns.
template <int kVectors>
void look_up(const HeadToken& token, const Columns& state, Floats* found) {
  Floats sums[kVectors];
  for (int v = 0; v < kVectors; ++v) sums[v] = 0.0f;
  const float *row = state.rows, *keys = token.key;
  const int64_t num_rows = row == nullptr ? 0 : token.key_dim, stride = state.stride;
  for (int64_t i = 0; i < num_rows; ++i, row += stride) {
    const Floats key = keys[i];
    for (int v = 0; v < kVectors; ++v) sums[v] += load_floats(row + v * kLanes) * key;
  }
  for (int v = 0; v < kVectors; ++v) found[v] = sums[v];
}

// Changes some columns of the state by a token for which `look_up` has found `found`, and writes its output. In the same
// pass over the columns, the next token looks up in what is left. What the loop needs is in local variables: the compiler
// must assume that a store changes anything else.
template <int kVectors, bool kHasSource, bool kHasNext>
void change(const HeadToken& token, const float* next_keys, const Columns& source, const Columns& target,
            Floats* found) {
  Floats corrections[kVectors], sums[kVectors], next[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    const Floats value = load_floats(token.value + v * kLanes);
    corrections[v] = (value - found[v] * Floats(token.kept)) * Floats(token.beta);
    sums[v] = next[v] = 0.0f;
  }
  const float *keys = token.key, *queries = token.query, *from = source.rows;
  float* to = target.rows;
  const int64_t num_rows = token.key_dim, from_stride = source.stride, to_stride = target.stride;
  const Floats kept = token.kept;
  for (int64_t i = 0; i < num_rows; ++i, from += from_stride, to += to_stride) {
    const Floats key = keys[i], query = queries[i], next_key = kHasNext ? next_keys[i] : 0.0f;
    for (int v = 0; v < kVectors; ++v) {
      Floats state = corrections[v] * key;
      if (kHasSource) state += load_floats(from + v * kLanes) * kept;
      store_floats(to + v * kLanes, state);
      sums[v] += state * query;
      if (kHasNext) next[v] += state * next_key;
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    store_floats(token.output + v * kLanes, sums[v]);
    found[v] = next[v];
  }
}

// Scales a vector to length 1, times `factor`.
void normalize(float* vector, int64_t size, float factor) {
  Floats sums(0.0f);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) sums += load_floats(vector + i) * load_floats(vector + i);
  float total = sum_of_lanes(sums);
  for (; i < size; ++i) total += vector[i] * vector[i];
  const float scale = factor / std::sqrt(total + 1e-6f);
  for (i = 0; i < size; ++i) vector[i] *= scale;
}

template <typename Type>
class DeltaRun {
 public:
  explicit DeltaRun(const DeltaStep& step)
      : step_(step), num_tokens_(num_tokens(step.states)),
        key_size_(step.num_key_heads * step.key_dim),
        num_channels_(2 * key_size_ + step.num_value_heads * step.value_dim),
        num_blocks_((step.value_dim + kBlockColumns - 1) / kBlockColumns),
        inputs_{step.states, step.mixed, step.windows, step.left_windows, step.filter, nullptr, num_channels_,
                step.window, num_channels_} {
    // Kept for later layers and steps: new memory would be cleared by the system first.
    static thread_local AlignedVector<float> memory;
    if (memory.size() < static_cast<size_t>(num_tokens_ * num_channels_)) memory.resize(num_tokens_ * num_channels_);
    convolved_ = memory.data();
    sequences_ = token_sequences(step.states);
  }

  void run(int64_t num_threads) {
    const int64_t num_items = step_.states.num_sequences * step_.num_value_heads * num_blocks_;
#pragma omp parallel num_threads(num_threads) if (num_items > 1)
    {
      AlignedVector<float> local(step_.key_dim * kBlockColumns), row(num_channels_);
      // Threads that are interrupted by others take fewer items.
#pragma omp for schedule(dynamic, 1)
      for (int64_t token = 0; token < num_tokens_; ++token) convolve(token, row.data());
#pragma omp for schedule(dynamic, 1) nowait
      for (int64_t sequence = 0; sequence < step_.states.num_sequences; ++sequence) inputs_.leave_windows(sequence);
#pragma omp for schedule(dynamic, 1)
      for (int64_t item = 0; item < num_items; ++item) {
        const int64_t head = item / num_blocks_, first = item % num_blocks_ * kBlockColumns;
        const int64_t count = std::min(kBlockColumns, step_.value_dim - first);
        const int64_t sequence = head / step_.num_value_heads, number = head % step_.num_value_heads;
        if (count == kBlockColumns) {
          run_columns<kBlockVectors>(sequence, number, first, local.data());
          continue;
        }
        for (int64_t f = first; f < first + count; f += kLanes) run_columns<1>(sequence, number, f, local.data());
      }
    }
  }

 private:
  // Writes a token's channels behind the convolution and its activation, queries and keys normalized. `row` is the
  // caller's memory for all channels.
  void convolve(int64_t token, float* row) {
    const int64_t sequence = sequences_[token];
    inputs_.convolve(sequence, token - step_.states.first_tokens[sequence], row);
    const float factor = 1.0f / std::sqrt(static_cast<float>(step_.key_dim));
    for (int64_t head = 0; head < 2 * step_.num_key_heads; ++head) {
      float* vector = row + head * step_.key_dim;
      normalize(vector, step_.key_dim, head < step_.num_key_heads ? factor : 1.0f);
      std::copy(vector, vector + step_.key_dim, keys(token, head));
    }
    for (int64_t head = 0; head < step_.num_value_heads; ++head) {
      const float* vector = row + 2 * key_size_ + head * step_.value_dim;
      std::copy(vector, vector + step_.value_dim, values(token, head));
    }
  }

  // Queries and keys of a token: those of queries are the first half of the heads. A head's tokens follow each other, for
  // a head goes over all of them.
  float* keys(int64_t token, int64_t head) const {
    return convolved_ + (head * num_tokens_ + token) * step_.key_dim;
  }

  float* values(int64_t token, int64_t head) const {
    return convolved_ + 2 * key_size_ * num_tokens_ + (head * num_tokens_ + token) * step_.value_dim;
  }

  Columns columns(int64_t state, int64_t head, int64_t first) const {
    const int64_t number = state * step_.num_value_heads + head;
    return {step_.matrices + number * step_.key_dim * step_.value_dim + first, step_.value_dim};
  }

  // Computes all tokens of a sequence in some columns of a head.
  template <int kVectors>
  void run_columns(int64_t sequence, int64_t head, int64_t first, float* local) const {
    const int64_t begin = step_.states.first_tokens[sequence], end = step_.states.first_tokens[sequence + 1];
    const int64_t source = step_.states.sources[sequence];
    const Columns before = source < 0 ? Columns{nullptr, 0} : columns(source, head, first);
    const Columns after = columns(step_.states.targets[sequence], head, first);
    int64_t snapshot = step_.states.first_snapshots[sequence];
    const int64_t stop_snapshot = step_.states.first_snapshots[sequence + 1];
    HeadToken now = token(begin, head, first);
    Floats found[kVectors];
    look_up<kVectors>(now, before, found);
    if (end - begin == 1 && snapshot == stop_snapshot) {
      if (source < 0) {
        change<kVectors, false, false>(now, nullptr, before, after, found);
      } else {
        change<kVectors, true, false>(now, nullptr, before, after, found);
      }
      return;
    }
    const Columns here{local, kVectors * kLanes};
    copy_columns(before, here, step_.key_dim, kVectors * kLanes);
    for (int64_t t = begin; t < end; ++t) {
      if (t + 1 < end) {
        const HeadToken next = token(t + 1, head, first);
        change<kVectors, true, true>(now, next.key, here, here, found);
        now = next;
      } else {
        change<kVectors, true, false>(now, nullptr, here, here, found);
      }
      for (; snapshot < stop_snapshot && step_.states.snapshot_tokens[snapshot] == t + 1 - begin; ++snapshot) {
        const Columns to = columns(step_.states.snapshot_states[snapshot], head, first);
        copy_columns(here, to, step_.key_dim, kVectors * kLanes);
      }
    }
    copy_columns(here, after, step_.key_dim, kVectors * kLanes);
  }

  HeadToken token(int64_t token, int64_t head, int64_t first) const {
    const int64_t key_head = head / (step_.num_value_heads / step_.num_key_heads);
    const int64_t at = head * num_tokens_ + token;
    return {
        keys(token, key_head),
        keys(token, step_.num_key_heads + key_head),
        values(token, head) + first,
        step_.output + at * step_.value_dim + first,
        step_.kept[at],
        step_.beta[at],
        step_.key_dim,
    };
  }

  const DeltaStep& step_;
  const int64_t num_tokens_;
  const int64_t key_size_;
  const int64_t num_channels_;
  const int64_t num_blocks_;
  const WindowInputs<Type> inputs_;
  // [2 * num_key_heads, num_tokens, key_dim], then [num_value_heads, num_tokens, value_dim].
  float* convolved_;
  // The sequence of each token.
  std::vector<int64_t> sequences_;
};

}  // namespace
}  // namespace lookonce

#pragma GCC visibility push(default)
extern "C" {

// Computes a step. No two sequences may leave the same state, or one that another begins with. Function names end with
// the type of `mixed`, `windows` and `left_windows`.
void lookonce_delta_step_float32(const lookonce::DeltaStep* step, int64_t num_threads) {
  lookonce::DeltaRun<lookonce::Float32>(*step).run(num_threads);
}

void lookonce_delta_step_bfloat16(const lookonce::DeltaStep* step, int64_t num_threads) {
  lookonce::DeltaRun<lookonce::BFloat16>(*step).run(num_threads);
}
}
#pragma GCC visibility pop
