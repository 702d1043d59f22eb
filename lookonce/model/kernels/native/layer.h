// The weights of a linear layer, as native_linear.py packs them.

#pragma once

#include <cstdint>

namespace lookonce {

// Weights are in panels of 32 outputs: words of the element type, or codes if `panels` is null.
struct Linear {
  const uint32_t* panels;  // [panels, inputs in words, 32]
  const float* bias;       // [outputs rounded up to 32]; null: no bias.
  int64_t num_inputs;
  int64_t num_outputs;
  // Integers in the order of the elements of `panels`. Of 8 bits: signed. Of 4 bits: unsigned, in each word's 32 columns
  // the first half of the elements in the lower bits of the bytes, the second half in the upper bits.
  const uint8_t* codes;
  // [panels, groups, 32]. A weight is its code · scale + offset.
  const float* scales;
  const float* offsets;
  int64_t group_inputs;  // Inputs that share a scale; even.
  int64_t code_bits;     // 4 or 8.
};

}  // namespace lookonce
