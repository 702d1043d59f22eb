// The weights of a linear layer, as native_linear.py packs them.

#pragma once

#include <cstdint>

namespace lookonce {

// A kind of codes; the values are those of `CodeForm` in quantized_weight.py.
enum class CodeForm : int64_t { kInt4, kInt8, kFloat8 };

// Weights are in panels of 32 outputs: words of the element type, or codes if `panels` is null.
struct Linear {
  const uint32_t* panels;  // [panels, inputs in words, 32]
  const float* bias;       // [outputs rounded up to 32]; null: no bias.
  int64_t num_inputs;
  int64_t num_outputs;
  // Codes in the order of the elements of `panels`. kInt8: signed. kFloat8: float8_e4m3fn. kInt4: unsigned, in each
  // word's 32 columns the first half of the elements in the lower bits of the bytes, the second half in the upper bits.
  const uint8_t* codes;
  // [panels, groups, 32], of `factor_bytes`. A weight is its code · scale + offset. Null: all offsets are 0.
  const void* scales;
  const void* offsets;
  int64_t group_inputs;  // Inputs that share a scale; even, and 16 at least if there are several groups.
  CodeForm code_form;
  // Inputs in a word of codes of one output: as many as in a word of `panels`, or 4. Words of four inputs have unsigned
  // codes: those of kInt8 are larger by 128. The last word of a panel is filled up.
  int64_t word_inputs;
  // Inputs of bfloat16 whose products are summed before the sum is scaled: whole words, 128 at most. Several groups
  // consist of whole blocks.
  int64_t block_inputs;
  int64_t factor_bytes;  // Of a scale and of an offset. 2: bfloat16; 4: float.
};

}  // namespace lookonce
