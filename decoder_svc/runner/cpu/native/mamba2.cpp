// The new tokens of several sequences in a Mamba2 layer (arXiv:2405.21060), in float32: a short convolution over the
// inputs of each channel, and for each token of a head, with its time step dt, value x, key B and query C,
//
//     S <- exp(dt A) · S + B (dt x);   output = SiLU(gate) (C S + D x)
//
// with a state S, which is a matrix [state_size, head_dim] whose columns are independent. Time steps have no limits. Some
// columns stay in the first-level cache while all tokens of a sequence go over them; a row of the state stays in registers
// for a few tokens. The order of a token's sums depends neither on the batch nor on how a prompt is cut into chunks, and
// neither do its bits: where two products are added, it is written which of them is rounded.

#include <cmath>
#include <vector>

#include "aligned.h"
#include "lanes.h"
#include "state_columns.h"
#include "state_step.h"
#include "window_inputs.h"

namespace lookonce {

// The structure below has the same fields in native_mamba2.py. Channels are those of all values, keys and queries.
struct ScanStep {
  StateStep states;
  const void* mixed;               // [num_tokens, num_channels] Inputs of the convolution, rows of `mixed_stride`.
  const void* time_steps;          // [num_tokens, num_heads] Time steps in front of softplus, rows of `steps_stride`.
  const void* gates;               // [num_tokens, num_heads, head_dim] Gates of outputs, tokens of `gates_stride`.
  const void* windows;             // [num_sequences, window, num_channels] Inputs before each sequence's first token.
  const float* filter;             // [window + 1, num_channels]
  const float* bias;               // [num_channels], or null.
  const float* rates;              // [num_heads] A
  const float* skips;              // [num_heads] D
  const float* step_bias;          // [num_heads] Added to time steps.
  float* matrices;                 // [num_states, num_heads, state_size, head_dim]
  void* left_windows;  // [num_sequences + num_snapshots, window, num_channels] Last inputs of sequences and snapshots.
  float* output;       // [num_tokens, num_heads, head_dim]
  int64_t num_groups;  // Each has a key and a query for num_heads / num_groups heads in a row.
  int64_t num_heads;
  int64_t state_size;
  int64_t head_dim;  // A multiple of 16.
  int64_t window;
  int64_t mixed_stride;
  int64_t steps_stride;
  int64_t gates_stride;
};

namespace {

// Columns of an item. Vectors of them that one token changes together, and vectors and tokens of a chunk for which sums
// stay in registers.
constexpr int64_t kItemColumns = 64;
constexpr int kStepVectors = kRegisters == 1 ? 4 : kRegisters == 2 ? 2 : 1;
constexpr int kChunkVectors = kRegisters == 1 ? 2 : 1;
constexpr int kChunkTokens = kRegisters == 1 ? 4 : kRegisters == 2 || kNumRegisters >= 32 ? 2 : 1;

// Returns a b + c, of which the product is not rounded where the processor can do so.
inline FloatRegister multiply_add(FloatRegister a, FloatRegister b, FloatRegister c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_FEATURE_SVE_BITS) && __ARM_FEATURE_SVE_BITS == 256
  return svmad_f32_x(svptrue_b32(), a, b, c);
#elif defined(__ARM_NEON)
  return vfmaq_f32(c, a, b);
#else
  return c + a * b;
#endif
}

inline Floats multiply_add(const Floats& a, const Floats& b, const Floats& c) {
  return Floats::each<Floats>([](FloatRegister x, FloatRegister y, FloatRegister z) { return multiply_add(x, y, z); }, a,
                              b, c);
}

// One token in some columns of a head.
struct HeadToken {
  const float* key;    // [state_size]
  const float* query;  // [state_size]
  const float* value;
  float* output;  // Holds the activated gate before.
  float kept;
  float time_step;
  float skip;
};

// Changes some columns of a state by tokens that follow each other, and writes their outputs.
template <int kVectors, int kTokens, bool kHasSource>
void change(const HeadToken* tokens, int64_t state_size, const Columns& source, const Columns& target) {
  Floats added[kTokens][kVectors], sums[kTokens][kVectors], kept[kTokens];
  const float *keys[kTokens], *queries[kTokens];
  for (int t = 0; t < kTokens; ++t) {
    kept[t] = tokens[t].kept;
    keys[t] = tokens[t].key;
    queries[t] = tokens[t].query;
    for (int v = 0; v < kVectors; ++v) {
      added[t][v] = load_floats(tokens[t].value + v * kLanes) * tokens[t].time_step;
      sums[t][v] = 0.0f;
    }
  }
  const float* from = source.rows;
  float* to = target.rows;
  const int64_t from_stride = source.stride, to_stride = target.stride;
  for (int64_t i = 0; i < state_size; ++i, from += from_stride, to += to_stride) {
    Floats state[kVectors];
    for (int v = 0; v < kVectors; ++v) state[v] = kHasSource ? load_floats(from + v * kLanes) : Floats(0.0f);
    for (int t = 0; t < kTokens; ++t) {
      const Floats key = keys[t][i], query = queries[t][i];
      for (int v = 0; v < kVectors; ++v) {
        state[v] = multiply_add(state[v], kept[t], added[t][v] * key);
        sums[t][v] = multiply_add(state[v], query, sums[t][v]);
      }
    }
    for (int v = 0; v < kVectors; ++v) store_floats(to + v * kLanes, state[v]);
  }
  for (int t = 0; t < kTokens; ++t) {
    for (int v = 0; v < kVectors; ++v) {
      const Floats value = load_floats(tokens[t].value + v * kLanes);
      float* output = tokens[t].output + v * kLanes;
      store_floats(output, multiply_add(value, Floats(tokens[t].skip), sums[t][v]) * load_floats(output));
    }
  }
}

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

template <typename Type>
class ScanRun {
 public:
  using Element = typename Type::Element;

  explicit ScanRun(const ScanStep& step)
      : step_(step), num_tokens_(num_tokens(step.states)), keys_size_(step.num_groups * step.state_size),
        values_size_(step.num_heads * step.head_dim), num_channels_(2 * keys_size_ + values_size_),
        inputs_{step.states, step.mixed, step.windows, step.left_windows, step.filter, step.bias, num_channels_,
                step.window, step.mixed_stride} {
    // Kept for later layers and steps: new memory would be cleared by the system first.
    static thread_local AlignedVector<float> memory;
    const size_t size = num_tokens_ * (num_channels_ + 2 * step.num_heads);
    if (memory.size() < size) memory.resize(size);
    convolved_ = memory.data();
    time_steps_ = convolved_ + num_tokens_ * num_channels_;
    kept_ = time_steps_ + num_tokens_ * step.num_heads;
    sequences_ = token_sequences(step.states);
  }

  void run(int64_t num_threads) {
    const int64_t num_blocks = (step_.head_dim + kItemColumns - 1) / kItemColumns;
    const int64_t num_items = step_.states.num_sequences * step_.num_heads * num_blocks;
#pragma omp parallel num_threads(num_threads) if (num_items > 1)
    {
      AlignedVector<float> local(step_.state_size * kChunkVectors * kLanes), row(num_channels_);
      // Threads that are interrupted by others take fewer items.
#pragma omp for schedule(dynamic, 1)
      for (int64_t token = 0; token < num_tokens_; ++token) prepare(token, row.data());
#pragma omp for schedule(dynamic, 1) nowait
      for (int64_t sequence = 0; sequence < step_.states.num_sequences; ++sequence) inputs_.leave_windows(sequence);
#pragma omp for schedule(dynamic, 1)
      for (int64_t item = 0; item < num_items; ++item) {
        const int64_t first = item % num_blocks * kItemColumns, number = item / num_blocks;
        run_item(number / step_.num_heads, number % step_.num_heads, first, local.data());
      }
    }
  }

 private:
  // Writes what a token brings to each head. `row` is the caller's memory for all channels.
  void prepare(int64_t token, float* row) {
    const int64_t sequence = sequences_[token];
    inputs_.convolve(sequence, token - step_.states.first_tokens[sequence], row);
    for (int64_t head = 0; head < step_.num_heads; ++head, row += step_.head_dim) {
      std::copy(row, row + step_.head_dim, values(token, head));
    }
    for (int64_t group = 0; group < 2 * step_.num_groups; ++group, row += step_.state_size) {
      std::copy(row, row + step_.state_size, keys(token, group));
    }
    const Element* gates = static_cast<const Element*>(step_.gates) + token * step_.gates_stride;
    float* output = step_.output + token * values_size_;
    for (int64_t i = 0; i < values_size_; i += kLanes) {
      const Floats gate = Type::load(gates + i);
      store_floats(output + i, gated_by_sigmoid<false>(gate, gate));
    }
    const Element* steps = static_cast<const Element*>(step_.time_steps) + token * step_.steps_stride;
    for (int64_t first = 0; first < step_.num_heads; first += kLanes) {
      const int64_t count = std::min(kLanes, step_.num_heads - first);
      Element elements[kLanes] = {};
      std::copy(steps + first, steps + first + count, elements);
      float wide[kLanes];
      store_floats(wide, Type::load(elements));
      for (int64_t i = 0; i < count; ++i) {
        const int64_t head = first + i, at = head * num_tokens_ + token;
        time_steps_[at] = softplus(wide[i] + step_.step_bias[head]);
        kept_[at] = std::exp(time_steps_[at] * step_.rates[head]);
      }
    }
  }

  // Keys of all groups, then queries. A head goes over all tokens, so its tokens follow each other.
  float* keys(int64_t token, int64_t group) const {
    return convolved_ + (group * num_tokens_ + token) * step_.state_size;
  }

  float* values(int64_t token, int64_t head) const {
    return convolved_ + 2 * keys_size_ * num_tokens_ + (head * num_tokens_ + token) * step_.head_dim;
  }

  Columns columns(int64_t state, int64_t head, int64_t first) const {
    const int64_t number = state * step_.num_heads + head;
    return {step_.matrices + number * step_.state_size * step_.head_dim + first, step_.head_dim};
  }

  HeadToken token(int64_t token, int64_t head, int64_t first) const {
    const int64_t group = head / (step_.num_heads / step_.num_groups), at = head * num_tokens_ + token;
    return {
        keys(token, group),
        keys(token, step_.num_groups + group),
        values(token, head) + first,
        step_.output + token * values_size_ + head * step_.head_dim + first,
        kept_[at],
        time_steps_[at],
        step_.skips[head],
    };
  }

  // Computes all tokens of a sequence in an item's columns of a head.
  void run_item(int64_t sequence, int64_t head, int64_t first, float* local) const {
    const int64_t begin = step_.states.first_tokens[sequence], end = step_.states.first_tokens[sequence + 1];
    if (begin == end) return;
    const bool has_snapshots = step_.states.first_snapshots[sequence] < step_.states.first_snapshots[sequence + 1];
    const int64_t stop = std::min(first + kItemColumns, step_.head_dim);
    if (end - begin == 1 && !has_snapshots) {
      for (; first + kStepVectors * kLanes <= stop; first += kStepVectors * kLanes) {
        run_token<kStepVectors>(sequence, head, first);
      }
      for (; first < stop; first += kLanes) run_token<1>(sequence, head, first);
      return;
    }
    for (; first + kChunkVectors * kLanes <= stop; first += kChunkVectors * kLanes) {
      run_chunk<kChunkVectors>(sequence, head, first, local);
    }
    for (; first < stop; first += kLanes) run_chunk<1>(sequence, head, first, local);
  }

  template <int kVectors>
  void run_token(int64_t sequence, int64_t head, int64_t first) const {
    const HeadToken one = token(step_.states.first_tokens[sequence], head, first);
    const Columns after = columns(step_.states.targets[sequence], head, first);
    const int64_t source = step_.states.sources[sequence];
    if (source < 0) {
      change<kVectors, 1, false>(&one, step_.state_size, after, after);
    } else {
      change<kVectors, 1, true>(&one, step_.state_size, columns(source, head, first), after);
    }
  }

  template <int kVectors>
  void run_chunk(int64_t sequence, int64_t head, int64_t first, float* local) const {
    constexpr int64_t kColumns = kVectors * kLanes;
    const int64_t begin = step_.states.first_tokens[sequence], end = step_.states.first_tokens[sequence + 1];
    const int64_t source = step_.states.sources[sequence], size = step_.state_size;
    const Columns here{local, kColumns};
    copy_columns(source < 0 ? Columns{nullptr, 0} : columns(source, head, first), here, size, kColumns);
    int64_t snapshot = step_.states.first_snapshots[sequence];
    const int64_t stop_snapshot = step_.states.first_snapshots[sequence + 1];
    for (int64_t t = begin; t < end;) {
      const int64_t stop = snapshot < stop_snapshot ? begin + step_.states.snapshot_tokens[snapshot] : end;
      HeadToken some[kChunkTokens];
      for (; t + kChunkTokens <= stop; t += kChunkTokens) {
        for (int i = 0; i < kChunkTokens; ++i) some[i] = token(t + i, head, first);
        change<kVectors, kChunkTokens, true>(some, size, here, here);
      }
      for (; t < stop; ++t) {
        some[0] = token(t, head, first);
        change<kVectors, 1, true>(some, size, here, here);
      }
      for (; snapshot < stop_snapshot && begin + step_.states.snapshot_tokens[snapshot] == t; ++snapshot) {
        copy_columns(here, columns(step_.states.snapshot_states[snapshot], head, first), size, kColumns);
      }
    }
    copy_columns(here, columns(step_.states.targets[sequence], head, first), size, kColumns);
  }

  const ScanStep& step_;
  const int64_t num_tokens_;
  const int64_t keys_size_;
  const int64_t values_size_;
  const int64_t num_channels_;
  const WindowInputs<Type> inputs_;
  // [2 * num_groups, num_tokens, state_size], then [num_heads, num_tokens, head_dim].
  float* convolved_;
  // [num_heads, num_tokens] each.
  float* time_steps_;
  float* kept_;
  // The sequence of each token.
  std::vector<int64_t> sequences_;
};

}  // namespace
}  // namespace lookonce

#pragma GCC visibility push(default)
extern "C" {

// Computes a step. No two sequences may leave the same state, or one that another begins with. Function names end with
// the type of `mixed`, `time_steps`, `gates`, `windows` and `left_windows`.
void lookonce_scan_step_float32(const lookonce::ScanStep* step, int64_t num_threads) {
  lookonce::ScanRun<lookonce::Float32>(*step).run(num_threads);
}

void lookonce_scan_step_bfloat16(const lookonce::ScanStep* step, int64_t num_threads) {
  lookonce::ScanRun<lookonce::BFloat16>(*step).run(num_threads);
}
}
#pragma GCC visibility pop
