// The new tokens of several sequences in a gated short convolution (LFM2, arXiv:2511.23404): for each channel
//
//     input = first gate · value;   output = second gate · (sum of the last inputs, each times its factor)
//
// The inputs before a sequence's tokens come from a state, and its last inputs are left in one. Channels are
// independent. Some of them stay in registers while all tokens of a sequence go over them, so a token's numbers depend
// neither on the batch nor on how a prompt is cut into chunks. Numbers that PyTorch's operators would store are rounded
// to the type of the tokens.

#include <algorithm>
#include <cstdint>

#include "lanes.h"
#include "state_step.h"

namespace lookonce {

// The structure below has the same fields in native_convolution.py.
struct ShortConvolution {
  StateStep states;
  const void* mixed;               // [num_tokens, 3, num_channels] First gates, second gates, values.
  void* windows;                   // [num_states, num_channels, window] Last inputs, the oldest first.
  const float* filter;             // [window + 1, num_channels]
  const float* bias;               // [num_channels], or null.
  void* output;                    // [num_tokens, num_channels]
  int64_t num_channels;  // A multiple of 16.
  int64_t window;        // At most kMostKept.
};

namespace {

constexpr int64_t kMostKept = 7;

template <typename Type>
class ConvolutionRun {
 public:
  using Element = typename Type::Element;

  explicit ConvolutionRun(const ShortConvolution& step) : step_(step) {}

  void run(int64_t num_threads) const {
    const int64_t num_blocks = step_.num_channels / kLanes, num_items = step_.states.num_sequences * num_blocks;
    // An item of a single token takes less time than a thread takes to fetch it.
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_items > 1)
    for (int64_t item = 0; item < num_items; ++item) {
      compute(item / num_blocks, item % num_blocks * kLanes);
    }
  }

 private:
  // Computes all tokens of a sequence in sixteen channels.
  void compute(int64_t sequence, int64_t channel) const {
    const int64_t kept = step_.window, num_channels = step_.num_channels;
    const int64_t begin = step_.states.first_tokens[sequence], end = step_.states.first_tokens[sequence + 1];
    if (begin == end) return;
    Floats inputs[kMostKept + 1], factors[kMostKept + 1];
    read_window(step_.states.sources[sequence], channel, inputs);
    for (int64_t j = 0; j <= kept; ++j) factors[j] = load_floats(step_.filter + j * num_channels + channel);
    const Floats bias = step_.bias == nullptr ? Floats(0.0f) : load_floats(step_.bias + channel);
    const Element* mixed = static_cast<const Element*>(step_.mixed) + begin * 3 * num_channels + channel;
    Element* output = static_cast<Element*>(step_.output) + begin * num_channels + channel;
    int64_t snapshot = step_.states.first_snapshots[sequence];
    const int64_t stop_snapshot = step_.states.first_snapshots[sequence + 1];
    for (int64_t token = begin; token < end; ++token, mixed += 3 * num_channels, output += num_channels) {
      inputs[kept] = rounded_to_type(Type::load(mixed) * Type::load(mixed + 2 * num_channels));
      Floats sums = inputs[0] * factors[0];
      for (int64_t j = 1; j <= kept; ++j) sums += inputs[j] * factors[j];
      if (step_.bias != nullptr) sums += bias;
      Type::store(output, rounded_to_type(sums) * Type::load(mixed + num_channels));
      for (int64_t j = 0; j < kept; ++j) inputs[j] = inputs[j + 1];
      for (; snapshot < stop_snapshot && step_.states.snapshot_tokens[snapshot] == token + 1 - begin; ++snapshot) {
        write_window(step_.states.snapshot_states[snapshot], channel, inputs);
      }
    }
    write_window(step_.states.targets[sequence], channel, inputs);
  }

  static Floats rounded_to_type(const Floats& value) {
    Element elements[kLanes];
    Type::store(elements, value);
    return Type::load(elements);
  }

  Element* window(int64_t state, int64_t channel) const {
    return static_cast<Element*>(step_.windows) + (state * step_.num_channels + channel) * step_.window;
  }

  void read_window(int64_t state, int64_t channel, Floats* inputs) const {
    for (int64_t j = 0; j < step_.window; ++j) {
      Element elements[kLanes] = {};
      if (state >= 0) {
        const Element* from = window(state, channel) + j;
        for (int64_t i = 0; i < kLanes; ++i) elements[i] = from[i * step_.window];
      }
      inputs[j] = Type::load(elements);
    }
  }

  void write_window(int64_t state, int64_t channel, const Floats* inputs) const {
    Element* to = window(state, channel);
    for (int64_t j = 0; j < step_.window; ++j) {
      Element elements[kLanes];
      Type::store(elements, inputs[j]);
      for (int64_t i = 0; i < kLanes; ++i) to[i * step_.window + j] = elements[i];
    }
  }

  const ShortConvolution& step_;
};

}  // namespace
}  // namespace lookonce

#pragma GCC visibility push(default)
extern "C" {

// Computes a step. No two sequences may leave the same state, or one that another begins with. Function names end with
// the type of `mixed`, `windows` and `output`.
void lookonce_short_convolution_float32(const lookonce::ShortConvolution* step, int64_t num_threads) {
  lookonce::ConvolutionRun<lookonce::Float32>(*step).run(num_threads);
}

void lookonce_short_convolution_bfloat16(const lookonce::ShortConvolution* step, int64_t num_threads) {
  lookonce::ConvolutionRun<lookonce::BFloat16>(*step).run(num_threads);
}
}
#pragma GCC visibility pop
