// One new token of several sequences in a gated delta net layer (arXiv:2412.06464, equation 10), in float32.
//
// A head's state S is a matrix [key_dim, value_dim], and all of its columns are independent:
//
//     S <- exp(decay) · S;   S <- S + k (beta (v - k S));   output = q S
//
// A block of columns is read twice, the second time from the first-level cache, and written once, in place.

#include <cmath>
#include <vector>

#include "lanes.h"

namespace lookonce {

// The structure below has the same fields in native_delta.py.
struct DeltaStep {
  const float* mixed;      // [num_sequences, (2 · num_key_heads) · key_dim + num_value_heads · value_dim]: q, k, v.
  const float* decay;      // [num_sequences, num_value_heads], natural logarithms.
  const float* beta;       // [num_sequences, num_value_heads]
  float* matrices;         // [num_states, num_value_heads, key_dim, value_dim]
  const int64_t* sources;  // State that each sequence begins with; negative: zeros.
  const int64_t* targets;  // State that each sequence leaves.
  float* output;           // [num_sequences, num_value_heads, value_dim]
  int64_t num_sequences;
  int64_t num_key_heads;   // Each serves num_value_heads / num_key_heads heads of values in a row.
  int64_t num_value_heads;
  int64_t key_dim;
  int64_t value_dim;  // A multiple of 16.
};

namespace {

// Vectors of a block of columns, for which sums and corrections stay in registers.
constexpr int kBlockVectors = kNumRegisters >= 32 ? 4 : 2;

// Writes `from` scaled to length 1, times `factor`.
void normalize(const float* from, int64_t size, float factor, float* to) {
  float total = 0;
  for (int64_t i = 0; i < size; ++i) total += from[i] * from[i];
  const float scale = factor / std::sqrt(total + 1e-6f);
  for (int64_t i = 0; i < size; ++i) to[i] = from[i] * scale;
}

struct Head {
  const float* query;   // [key_dim], normalized.
  const float* key;     // [key_dim], normalized.
  const float* value;   // [value_dim]
  const float* source;  // [key_dim, value_dim]; null: zeros.
  float* target;
  float* output;  // [value_dim]
  float kept;     // exp(decay)
  float beta;
  int64_t key_dim;
  int64_t value_dim;
};

template <int kVectors>
void step_columns(const Head& head, int64_t first) {
  Floats sums[kVectors], corrections[kVectors];
  for (int v = 0; v < kVectors; ++v) sums[v] = 0.0f;
  if (head.source != nullptr) {
    for (int64_t i = 0; i < head.key_dim; ++i) {
      const Floats key = head.key[i];
      const float* row = head.source + i * head.value_dim + first;
      for (int v = 0; v < kVectors; ++v) sums[v] += load_floats(row + v * kLanes) * key;
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    const Floats value = load_floats(head.value + first + v * kLanes);
    corrections[v] = (value - sums[v] * Floats(head.kept)) * Floats(head.beta);
    sums[v] = 0.0f;
  }
  for (int64_t i = 0; i < head.key_dim; ++i) {
    const Floats key = head.key[i], query = head.query[i];
    float* written = head.target + i * head.value_dim + first;
    for (int v = 0; v < kVectors; ++v) {
      Floats state = corrections[v] * key;
      if (head.source != nullptr) {
        state += load_floats(head.source + i * head.value_dim + first + v * kLanes) * Floats(head.kept);
      }
      store_floats(written + v * kLanes, state);
      sums[v] += state * query;
    }
  }
  for (int v = 0; v < kVectors; ++v) store_floats(head.output + first + v * kLanes, sums[v]);
}

void step_head(const Head& head) {
  int64_t first = 0;
  for (; first + kBlockVectors * kLanes <= head.value_dim; first += kBlockVectors * kLanes) {
    step_columns<kBlockVectors>(head, first);
  }
  for (; first < head.value_dim; first += kLanes) step_columns<1>(head, first);
}

}  // namespace
}  // namespace lookonce

#pragma GCC visibility push(default)
extern "C" {

// Computes one token of each sequence. No two sequences may leave the same state, or one that another begins with.
void lookonce_delta_step(const lookonce::DeltaStep* step_pointer, int64_t num_threads) {
  const lookonce::DeltaStep& step = *step_pointer;
  const int64_t num_items = step.num_sequences * step.num_value_heads;
  const int64_t key_size = step.num_key_heads * step.key_dim, head_size = step.key_dim * step.value_dim;
  const int64_t num_channels = 2 * key_size + step.num_value_heads * step.value_dim;
#pragma omp parallel num_threads(num_threads) if (num_items > 1)
  {
    std::vector<float> query(step.key_dim), key(step.key_dim);
    // Threads that are interrupted by others take fewer heads.
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < num_items; ++item) {
      const int64_t sequence = item / step.num_value_heads, number = item % step.num_value_heads;
      const int64_t key_head = number / (step.num_value_heads / step.num_key_heads);
      const float* mixed = step.mixed + sequence * num_channels;
      const float factor = 1.0f / std::sqrt(static_cast<float>(step.key_dim));
      lookonce::normalize(mixed + key_head * step.key_dim, step.key_dim, factor, query.data());
      lookonce::normalize(mixed + key_size + key_head * step.key_dim, step.key_dim, 1.0f, key.data());
      const int64_t source = step.sources[sequence];
      const lookonce::Head head{
          query.data(),
          key.data(),
          mixed + 2 * key_size + number * step.value_dim,
          source < 0 ? nullptr : step.matrices + (source * step.num_value_heads + number) * head_size,
          step.matrices + (step.targets[sequence] * step.num_value_heads + number) * head_size,
          step.output + item * step.value_dim,
          std::exp(step.decay[item]),
          step.beta[item],
          step.key_dim,
          step.value_dim,
      };
      lookonce::step_head(head);
    }
  }
}
}
#pragma GCC visibility pop
