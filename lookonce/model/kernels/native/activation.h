// Activations of sixteen sums in float32. The numbers are those of activation.py.

#pragma once

#include "lanes.h"

namespace lookonce {

enum class Activation : int64_t { kNone, kRelu, kSilu, kGelu, kGeluTanh, kGeluQuick, kReluSquared };

// Returns x σ(s), the sigmoid of s times x. `kIsRough` as in exp2_of_negative.
template <bool kIsRough>
inline Floats gated_by_sigmoid(const Floats& x, const Floats& s) {
  const Floats e = exp2_of_negative<kIsRough>(select(s < 0.0f, s, 0.0f - s) * kLog2OfE);
  return x * (select(s < 0.0f, e, 1.0f) / (e + 1.0f));
}

// Returns x Φ(x), with the distribution function Φ of the normal distribution. Its error function is formula 7.1.26 of
// Abramowitz and Stegun, with an absolute error up to 1.5e-7.
template <bool kIsRough>
inline Floats gelu(const Floats& x) {
  const Floats z = select(x < 0.0f, 0.0f - x, x) * 0.707106781f;
  const Floats t = Floats(1.0f) / (z * 0.3275911f + 1.0f);
  Floats p = t * 1.061405429f + -1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t + -0.284496736f;
  p = p * t + 0.254829592f;
  const Floats tail = p * t * exp2_of_negative<kIsRough>(z * z * -kLog2OfE) * 0.5f;
  return x * select(x < 0.0f, tail, Floats(1.0f) - tail);
}

// Applies an activation to `count` numbers in place; `count` is a multiple of 16.
template <bool kIsRough>
inline void activate(Activation activation, float* values, int64_t count) {
  if (activation == Activation::kNone) return;
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats x = load_floats(values + i);
    Floats y = x;
    switch (activation) {
      case Activation::kNone:
        break;
      case Activation::kRelu:
        y = select(x < 0.0f, 0.0f, x);
        break;
      case Activation::kSilu:
        y = gated_by_sigmoid<kIsRough>(x, x);
        break;
      case Activation::kGelu:
        y = gelu<kIsRough>(x);
        break;
      case Activation::kGeluTanh:
        // (1 + tanh(u)) / 2 = σ(2u) with u = √(2/π) (x + 0.044715 x³).
        y = gated_by_sigmoid<kIsRough>(x, x * (x * x * 0.044715f + 1.0f) * 1.59576912f);
        break;
      case Activation::kGeluQuick:
        y = gated_by_sigmoid<kIsRough>(x, x * 1.702f);
        break;
      case Activation::kReluSquared:
        y = select(x < 0.0f, 0.0f, x);
        y = y * y;
        break;
    }
    store_floats(values + i, y);
  }
}

}  // namespace lookonce
