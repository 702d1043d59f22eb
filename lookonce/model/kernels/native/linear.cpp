// One linear layer as a single call, for layers outside of a stack: output heads, and models without a stack.

#include "activation.h"
#include "linear.h"

#include <cstdint>
#include <memory>

namespace lookonce {
namespace {

// Stores full vectors directly; the last ones of a row go through a buffer and are copied in part.
template <typename Out>
void store_row(typename Out::Element* to, const float* sums, int64_t count) {
  if (count >= kTileColumns) {
    for (int64_t c = 0; c < kTileColumns; c += kLanes) Out::store(to + c, load_floats(sums + c));
    return;
  }
  alignas(64) typename Out::Element rounded[kTileColumns];
  for (int64_t c = 0; c < kTileColumns; c += kLanes) Out::store(rounded + c, load_floats(sums + c));
  std::copy(rounded, rounded + count, to);
}

template <typename Type, typename Out>
void run(const Linear& layer, const typename Type::Element* input, int64_t num_rows, typename Out::Element* output,
         Activation activation, int64_t num_threads) {
  // For a small layer, waking other threads would take longer than the work.
  const bool is_large = num_rows * layer.num_inputs * layer.num_outputs > (1 << 16);
  using Left = typename Type::Left;
  constexpr bool kIsCopied = !std::is_same_v<Left, typename Type::Element>;
  std::unique_ptr<Left[]> copy(kIsCopied ? new Left[num_rows * layer.num_inputs] : nullptr);
  IntegerInputs integers;
  if (layer.codes != nullptr) integers.reserve(num_rows, layer.num_inputs);
  Phases phases(3);
#pragma omp parallel num_threads(num_threads) if (is_large)
  {
    Worker worker(phases);
    const Left* left;
    if constexpr (kIsCopied) {
      left = copy.get();
      worker.run(num_rows, Worker::grain_of(num_rows), [&](int64_t row) {
        const int64_t at = row * layer.num_inputs;
        copy_to_left<Type>(copy.get() + at, input + at, layer.num_inputs);
      });
    } else {
      left = input;
    }
    linear<Type>(worker, layer, left, num_rows, integers, false, [&](int64_t row, int64_t column, float* sums) {
      activate<Out::kIsRough>(activation, sums, kTileColumns);
      store_row<Out>(output + row * layer.num_outputs + column, sums, layer.num_outputs - column);
    });
  }
}

}  // namespace
}  // namespace lookonce

#pragma GCC visibility push(default)
extern "C" {

// Stores the most inputs that a word of codes of integers has in a layer of bfloat16 (`Linear::word_inputs`).
void lookonce_most_word_inputs(int64_t* number) { *number = lookonce::kMultipliesBytes ? 4 : 2; }

// `input` is [num_rows, inputs] and `output` [num_rows, outputs], both contiguous. Function names end with the type of
// input and weights and, if it differs, the type of the output. The activation is applied before rounding.
void lookonce_linear_float32(const lookonce::Linear* layer, const float* input, int64_t num_rows, float* output,
                             lookonce::Activation activation, int64_t num_threads) {
  lookonce::run<lookonce::Float32, lookonce::Float32>(*layer, input, num_rows, output, activation, num_threads);
}

void lookonce_linear_bfloat16(const lookonce::Linear* layer, const uint16_t* input, int64_t num_rows, uint16_t* output,
                              lookonce::Activation activation, int64_t num_threads) {
  lookonce::run<lookonce::BFloat16, lookonce::BFloat16>(*layer, input, num_rows, output, activation, num_threads);
}

void lookonce_linear_bfloat16_float32(const lookonce::Linear* layer, const uint16_t* input, int64_t num_rows,
                                      float* output, lookonce::Activation activation, int64_t num_threads) {
  lookonce::run<lookonce::BFloat16, lookonce::Float32>(*layer, input, num_rows, output, activation, num_threads);
}
}
#pragma GCC visibility pop
