// The inputs of a convolution over the tokens of several sequences, with those that lie in front of each sequence's
// tokens. Each channel has its own filter.

#pragma once

#include <algorithm>
#include <cstdint>

#include "activation.h"
#include "lanes.h"
#include "state_step.h"

namespace lookonce {

template <typename Type>
struct WindowInputs {
  using Element = typename Type::Element;

  const StateStep& states;
  const void* mixed;       // [num_tokens, num_channels], rows of `stride` elements.
  const void* windows;     // [num_sequences, window, num_channels] Inputs before each sequence's first token.
  void* left_windows;      // [num_sequences + num_snapshots, window, num_channels] Last inputs of each.
  const float* filter;     // [window + 1, num_channels]
  const float* bias;       // [num_channels], or null.
  int64_t num_channels;
  int64_t window;
  int64_t stride;

  // Returns the inputs of a token of a sequence, counted from its first new one; negative: of earlier ones.
  const Element* inputs(int64_t sequence, int64_t position) const {
    if (position >= 0) return static_cast<const Element*>(mixed) + (states.first_tokens[sequence] + position) * stride;
    return static_cast<const Element*>(windows) + (sequence * window + window + position) * num_channels;
  }

  // Writes all channels of a token behind the convolution and SiLU.
  void convolve(int64_t sequence, int64_t position, float* row) const {
    for (int64_t c = 0; c < num_channels; c += kLanes) {
      const int64_t count = std::min(kLanes, num_channels - c);
      Floats sums(0.0f);
      for (int64_t j = 0; j <= window; ++j) {
        const Element* from = inputs(sequence, position - window + j) + c;
        const float* factors = filter + j * num_channels + c;
        if (count == kLanes) {
          sums += Type::load(from) * load_floats(factors);
          continue;
        }
        Element elements[kLanes] = {};
        std::copy(from, from + count, elements);
        sums += Type::load(elements) * some_floats(factors, count);
      }
      if (bias != nullptr) sums += count == kLanes ? load_floats(bias + c) : some_floats(bias + c, count);
      const Floats activated = gated_by_sigmoid<false>(sums, sums);
      if (count == kLanes) {
        store_floats(row + c, activated);
        continue;
      }
      float some[kLanes];
      store_floats(some, activated);
      std::copy(some, some + count, row + c);
    }
  }

  // Copies the last inputs of a sequence, and those of its snapshots.
  void leave_windows(int64_t sequence) const {
    leave_window(sequence, states.first_tokens[sequence + 1] - states.first_tokens[sequence], sequence);
    for (int64_t i = states.first_snapshots[sequence]; i < states.first_snapshots[sequence + 1]; ++i) {
      leave_window(sequence, states.snapshot_tokens[i], states.num_sequences + i);
    }
  }

 private:
  static Floats some_floats(const float* from, int64_t count) {
    float some[kLanes] = {};
    std::copy(from, from + count, some);
    return load_floats(some);
  }

  void leave_window(int64_t sequence, int64_t stop, int64_t place) const {
    Element* to = static_cast<Element*>(left_windows) + place * window * num_channels;
    for (int64_t j = 0; j < window; ++j) {
      const Element* from = inputs(sequence, stop - window + j);
      std::copy(from, from + num_channels, to + j * num_channels);
    }
  }
};

}  // namespace lookonce
