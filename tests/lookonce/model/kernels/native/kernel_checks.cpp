// Compares the CPU kernels with plain loops in double. Ends with the number of failed checks; prints each.
//
// A program without Python, so that it can run under an emulator of another processor (test_native_levels.py).

#include <cstdio>
#include <limits>
#include <random>
#include <string>
#include <vector>

#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "attention.cpp"
#include "dense_attention.cpp"
#include "experts.cpp"
#include "linear.cpp"

namespace {

using namespace lookonce;

int num_failed = 0;
std::mt19937 generator(1);

void check(bool is_right, const std::string& what) {
  if (is_right) return;
  std::printf("failed: %s\n", what.c_str());
  ++num_failed;
}

template <typename Type>
typename Type::Element rounded(float value) {
  typename Type::Element all[kLanes];
  Type::store(all, Floats(value));
  return all[0];
}

template <typename Type>
double number(typename Type::Element element) {
  typename Type::Element all[kLanes];
  std::fill(all, all + kLanes, element);
  float wide[kLanes];
  store_floats(wide, Type::load(all));
  return wide[0];
}

template <typename Type>
std::vector<typename Type::Element> random_elements(int64_t count) {
  std::normal_distribution<float> normal;
  std::vector<typename Type::Element> elements(count);
  for (auto& element : elements) element = rounded<Type>(normal(generator));
  return elements;
}

template <typename Type>
constexpr double tolerance() {
  return sizeof(typename Type::Element) == 2 ? 2e-2 : 2e-5;
}

template <typename Type>
std::vector<double> numbers(const std::vector<typename Type::Element>& elements) {
  std::vector<double> all;
  for (const auto element : elements) all.push_back(number<Type>(element));
  return all;
}

// Returns the largest difference, relative to the largest wanted number.
template <typename Type>
double difference(const std::vector<typename Type::Element>& found, const std::vector<double>& wanted) {
  double largest = 1e-30, worst = 0;
  for (double one : wanted) largest = std::max(largest, std::abs(one));
  for (size_t i = 0; i < wanted.size(); ++i) {
    const double one = std::abs(number<Type>(found[i]) - wanted[i]);
    if (!(one <= worst)) worst = one;
  }
  return worst / largest;
}

template <typename Type>
void check_linear(const std::string& type, int64_t rows, int64_t inputs, int64_t outputs) {
  using Element = typename Type::Element;
  const auto weights = random_elements<Type>(outputs * inputs), input = random_elements<Type>(rows * inputs);
  const int64_t num_panels = (outputs + kTileColumns - 1) / kTileColumns;
  std::vector<Element> panels(num_panels * kTileColumns * inputs, Element{0});
  for (int64_t o = 0; o < outputs; ++o) {
    for (int64_t i = 0; i < inputs; ++i) {
      const int64_t word = (o / kTileColumns * (inputs / Type::kPerWord) + i / Type::kPerWord) * kTileColumns;
      panels[(word + o % kTileColumns) * Type::kPerWord + i % Type::kPerWord] = weights[o * inputs + i];
    }
  }
  std::vector<float> bias(num_panels * kTileColumns, 0.0f);
  for (int64_t o = 0; o < outputs; ++o) bias[o] = 0.25f * o;
  const Linear layer{reinterpret_cast<const uint32_t*>(panels.data()), bias.data(), inputs, outputs};
  const auto exact_weights = numbers<Type>(weights), exact_input = numbers<Type>(input);
  std::vector<double> wanted(rows * outputs);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t o = 0; o < outputs; ++o) {
      double sum = bias[o];
      for (int64_t i = 0; i < inputs; ++i) sum += exact_input[r * inputs + i] * exact_weights[o * inputs + i];
      wanted[r * outputs + o] = sum;
    }
  }
  std::vector<Element> found(rows * outputs), alone(outputs);
  run<Type, Type>(layer, input.data(), rows, found.data(), Activation::kNone, 2);
  const std::string what = "linear " + type + " " + std::to_string(rows) + " x " + std::to_string(inputs) + " x " +
                           std::to_string(outputs);
  check(difference<Type>(found, wanted) < tolerance<Type>(), what);
  for (int64_t r = 0; r < rows; ++r) {
    run<Type, Type>(layer, input.data() + r * inputs, 1, alone.data(), Activation::kNone, 1);
    const size_t bytes = outputs * sizeof(Element);
    check(std::memcmp(alone.data(), found.data() + r * outputs, bytes) == 0, what + ": row has other bits alone");
  }
}

// Returns the number of a code of float8_e4m3fn.
double number_of_float8(int code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  const double size = exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
  return code & 0x80 ? -size : size;
}

// Whether the kernels multiply the bytes of codes in words of four inputs.
template <typename Type>
bool takes_fours(CodeForm form, int64_t group) {
  return kMultipliesBytes && Type::kIsRough && form != CodeForm::kFloat8 && group % 4 == 0;
}

// Returns the inputs of a block as native_linear.py does.
inline int64_t block_of(int64_t inputs, int64_t group, int64_t word_inputs) {
  if (group >= inputs) return std::min<int64_t>(group, 128);
  const int64_t step = std::max<int64_t>(2, word_inputs);
  int64_t size = std::min<int64_t>(group, 128) / step * step;
  while (group % size != 0) size -= step;
  return size;
}

// A layer of random codes, scales and offsets.
template <typename Type>
struct RandomCodes {
  std::vector<uint8_t> codes;
  std::vector<float> scales, offsets;
  std::vector<double> weights;
  Linear layer;

  RandomCodes(int64_t inputs, int64_t outputs, CodeForm form, int64_t group) : weights(outputs * inputs) {
    const bool is_int4 = form == CodeForm::kInt4, is_float8 = form == CodeForm::kFloat8;
    const int64_t num_panels = (outputs + kTileColumns - 1) / kTileColumns, num_groups = (inputs + group - 1) / group;
    const int64_t word_inputs = takes_fours<Type>(form, group) ? 4 : Type::kPerWord;
    const int64_t num_words = (inputs + word_inputs - 1) / word_inputs, word_elements = kTileColumns * word_inputs;
    const int64_t word_bytes = is_int4 ? word_elements / 2 : word_elements;
    codes.resize(num_panels * num_words * word_bytes);
    scales.resize(num_panels * num_groups * kTileColumns);
    offsets.resize(scales.size());
    std::uniform_int_distribution<int> any(is_int4 ? 0 : -128, is_int4 ? 15 : 127);
    std::uniform_real_distribution<float> factor(0.01f, 0.1f);
    for (float& scale : scales) scale = factor(generator);
    for (float& offset : offsets) offset = is_float8 ? 0.0f : -factor(generator);
    for (int64_t o = 0; o < outputs; ++o) {
      for (int64_t i = 0; i < inputs; ++i) {
        int code = any(generator);
        // The codes of what is not a number are refused when a folder is loaded.
        if (is_float8 && (code & 0x7f) == 0x7f) code = 0;
        const int64_t panel = o / kTileColumns, word = panel * num_words + i / word_inputs;
        const int64_t element = o % kTileColumns * word_inputs + i % word_inputs, half = word_elements / 2;
        if (is_int4) {
          codes[word * word_bytes + element % half] |= element < half ? code : code << 4;
        } else {
          codes[word * word_bytes + element] = static_cast<uint8_t>(word_inputs == 4 ? code + kExcess : code);
        }
        const int64_t at = (panel * num_groups + i / group) * kTileColumns + o % kTileColumns;
        weights[o * inputs + i] = (is_float8 ? number_of_float8(code & 0xff) : code) * scales[at] + offsets[at];
      }
    }
    layer = {nullptr, nullptr, inputs, outputs, codes.data(), scales.data(), offsets.data(), group, form, word_inputs,
             block_of(inputs, group, word_inputs), sizeof(float)};
  }
};

// Inputs have one large number in each row, as those of real models do.
template <typename Type>
void check_quantized_linear(const std::string& type, int64_t rows, int64_t inputs, int64_t outputs, CodeForm form,
                            int64_t group) {
  auto input = random_elements<Type>(rows * inputs);
  for (int64_t r = 0; r < rows; ++r) input[r * inputs + r % inputs] = rounded<Type>(50.0f);
  const RandomCodes<Type> random(inputs, outputs, form, group);
  const Linear& layer = random.layer;
  const std::vector<double>& weights = random.weights;
  const auto exact_input = numbers<Type>(input);
  std::vector<double> wanted(rows * outputs);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t o = 0; o < outputs; ++o) {
      double sum = 0;
      for (int64_t i = 0; i < inputs; ++i) sum += exact_input[r * inputs + i] * weights[o * inputs + i];
      wanted[r * outputs + o] = sum;
    }
  }
  std::vector<float> found(rows * outputs), alone(outputs);
  run<Type, Float32>(layer, input.data(), rows, found.data(), Activation::kNone, 2);
  const std::string what = "codes " + std::to_string(static_cast<int64_t>(form)) + " in groups of " +
                           std::to_string(group) + ", " + type + " " +
                           std::to_string(rows) + " x " + std::to_string(inputs) + " x " + std::to_string(outputs);
  // Inputs are rounded to 50 / 32639, and weights are up to 13.
  check(difference<Float32>(found, wanted) < 3e-4, what);
  for (int64_t r = 0; r < rows; ++r) {
    run<Type, Float32>(layer, input.data() + r * inputs, 1, alone.data(), Activation::kNone, 1);
    const size_t bytes = outputs * sizeof(float);
    check(std::memcmp(alone.data(), found.data() + r * outputs, bytes) == 0, what + ": row has other bits alone");
  }
}

// Five experts of 48 units, with SiLU of gates or with ReLU² alone, for inputs of 80. Each token has two of them, or one
// and a number that no expert has.
template <typename Type>
void check_experts(const std::string& type, int64_t num_tokens, CodeForm form, bool is_gated) {
  using Element = typename Type::Element;
  constexpr int64_t kNumExperts = 5, kHidden = 80, kMlp = 48, kChosen = 2;
  std::vector<RandomCodes<Type>> up, down;
  std::vector<Linear> up_layers, down_layers;
  for (int64_t e = 0; e < kNumExperts; ++e) {
    up.emplace_back(kHidden, is_gated ? 2 * kMlp : kMlp, form, 32);
    down.emplace_back(kMlp, kHidden, form, 32);
    // The vectors' contents stay where they are when the structures move.
    up_layers.push_back(up.back().layer);
    down_layers.push_back(down.back().layer);
  }
  const auto input = random_elements<Type>(num_tokens * kHidden);
  const auto exact_input = numbers<Type>(input);
  std::vector<int64_t> chosen;
  std::vector<float> shares;
  for (int64_t t = 0; t < num_tokens; ++t) {
    chosen.insert(chosen.end(), {t % kNumExperts, t % 3 == 2 ? kNumExperts : (t + 2) % kNumExperts});
    shares.insert(shares.end(), {0.25f, 0.5f + 0.1f * t});
  }
  std::vector<double> wanted(num_tokens * kHidden);
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int64_t k = 0; k < kChosen; ++k) {
      const int64_t e = chosen[t * kChosen + k];
      if (e == kNumExperts) continue;
      const auto product = [&](int64_t row) {
        double sum = 0;
        for (int64_t i = 0; i < kHidden; ++i) sum += exact_input[t * kHidden + i] * up[e].weights[row * kHidden + i];
        return sum;
      };
      double units[kMlp];
      for (int64_t m = 0; m < kMlp; ++m) {
        if (is_gated) {
          const int64_t row = m / kLanes * 2 * kLanes + m % kLanes;
          const double gate = product(row);
          units[m] = gate / (1 + std::exp(-gate)) * product(row + kLanes);
        } else {
          units[m] = std::pow(std::max(product(m), 0.0), 2);
        }
      }
      for (int64_t h = 0; h < kHidden; ++h) {
        for (int64_t m = 0; m < kMlp; ++m) {
          wanted[t * kHidden + h] += shares[t * kChosen + k] * units[m] * down[e].weights[h * kMlp + m];
        }
      }
    }
  }
  std::vector<Element> found(num_tokens * kHidden);
  const Activation activation = is_gated ? Activation::kSilu : Activation::kReluSquared;
  const Experts experts{up_layers.data(), down_layers.data(), kNumExperts, kHidden, kMlp, activation, is_gated};
  const ExpertStep step{input.data(), chosen.data(), shares.data(), found.data(), num_tokens, kChosen, 2};
  ExpertRun<Type>(experts, step).run();
  check(difference<Type>(found, wanted) < tolerance<Type>(),
        "experts of codes " + std::to_string(static_cast<int64_t>(form)) + ", " + type + (is_gated ? ", gated" : ""));
}

template <bool kIsRough>
void check_activation(Activation activation, double (*exact)(double), const std::string& what) {
  alignas(64) float values[kLanes];
  double worst = 0;
  for (int step = -1600; step < 1600; ++step) {
    for (int64_t i = 0; i < kLanes; ++i) values[i] = 0.01f * step + 0.0005f * i;
    double wanted[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) wanted[i] = exact(values[i]);
    activate<kIsRough>(activation, values, kLanes);
    for (int64_t i = 0; i < kLanes; ++i) {
      const double one = std::abs(values[i] - wanted[i]) / (1 + std::abs(wanted[i]));
      if (!(one <= worst)) worst = one;
    }
  }
  check(worst < (kIsRough ? 1e-5 : 5e-7), what + (kIsRough ? ", rough" : ""));
  for (int64_t i = 0; i < kLanes; ++i) values[i] = std::numeric_limits<float>::quiet_NaN();
  activate<kIsRough>(activation, values, kLanes);
  check(std::isnan(values[0]), what + " of NaN");
}

template <bool kIsRough>
void check_activations() {
  const auto relu = [](double x) { return x < 0 ? 0.0 : x; };
  const auto relu_squared = [](double x) { return x < 0 ? 0.0 : x * x; };
  const auto silu = [](double x) { return x / (1 + std::exp(-x)); };
  const auto gelu = [](double x) { return 0.5 * x * std::erfc(-x / std::sqrt(2.0)); };
  const auto gelu_tanh = [](double x) {
    return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x)));
  };
  const auto gelu_quick = [](double x) { return x / (1 + std::exp(-1.702 * x)); };
  check_activation<kIsRough>(Activation::kRelu, relu, "relu");
  check_activation<kIsRough>(Activation::kSilu, silu, "silu");
  check_activation<kIsRough>(Activation::kGelu, gelu, "gelu");
  check_activation<kIsRough>(Activation::kGeluTanh, gelu_tanh, "gelu, tanh");
  check_activation<kIsRough>(Activation::kGeluQuick, gelu_quick, "gelu, quick");
  check_activation<kIsRough>(Activation::kReluSquared, relu_squared, "relu, squared");
}

// Attention of one row over keys and values [keys, dim], in double.
void attend_plainly(const double* query, const std::vector<const double*>& keys,
                    const std::vector<const double*>& values, int64_t dim, double scale, double* to) {
  std::vector<double> scores;
  double top = -std::numeric_limits<double>::infinity(), total = 0;
  for (const double* key : keys) {
    double score = 0;
    for (int64_t d = 0; d < dim; ++d) score += query[d] * key[d];
    scores.push_back(score * scale);
    top = std::max(top, scores.back());
  }
  std::fill(to, to + dim, 0.0);
  for (size_t k = 0; k < keys.size(); ++k) {
    const double weight = std::exp(scores[k] - top);
    total += weight;
    for (int64_t d = 0; d < dim; ++d) to[d] += weight * values[k][d];
  }
  for (int64_t d = 0; d < dim; ++d) to[d] /= total;
}

template <typename Type>
void check_dense_attention(const std::string& type, int64_t tokens, int64_t dim) {
  const int64_t heads = 2, size = tokens * heads * dim;
  const auto queries = random_elements<Type>(size), keys = random_elements<Type>(size),
             values = random_elements<Type>(size);
  const Strides strides{size, dim, heads * dim};
  const Shape shape{1, heads, tokens, dim, 0.2f, strides, strides, strides};
  std::vector<typename Type::Element> found(size);
  attend<Type>(shape, 2, queries.data(), keys.data(), values.data(), found.data());
  const auto exact_queries = numbers<Type>(queries), exact_keys = numbers<Type>(keys),
             exact_values = numbers<Type>(values);
  std::vector<double> wanted(size);
  for (int64_t head = 0; head < heads; ++head) {
    std::vector<const double*> all_keys, all_values;
    for (int64_t t = 0; t < tokens; ++t) {
      all_keys.push_back(exact_keys.data() + (t * heads + head) * dim);
      all_values.push_back(exact_values.data() + (t * heads + head) * dim);
    }
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t at = (t * heads + head) * dim;
      attend_plainly(exact_queries.data() + at, all_keys, all_values, dim, shape.scale, wanted.data() + at);
    }
  }
  check(difference<Type>(found, wanted) < tolerance<Type>(),
        "dense attention " + type + " " + std::to_string(tokens) + " x " + std::to_string(dim));
}

// What is left of a head's keys or values when they are rounded to codes.
void round_heads(std::vector<double>& all, int64_t dim) {
  for (size_t head = 0; head < all.size(); head += dim) {
    double largest = 0;
    for (int64_t d = 0; d < dim; ++d) largest = std::max(largest, std::abs(all[head + d]));
    const float scale = static_cast<float>(largest) / 127.0f;
    for (int64_t d = 0; d < dim; ++d) all[head + d] = std::round(all[head + d] / scale) * scale;
  }
}

// A prompt in one step, and then one more token: causal attention over blocks in any order.
template <typename Type>
void check_paged_attention(const std::string& type, int64_t tokens, int64_t dim, int64_t block_size, bool is_rounded) {
  using Element = typename Type::Element;
  // A number that is half-way between two codes may become either. With these numbers there is none, whatever other
  // checks have drawn before.
  generator.seed(1);
  const int64_t num_heads = 4, num_kv_heads = 2, slots = (block_size + kLanes - 1) / kLanes * kLanes;
  const int64_t num_blocks = (tokens + block_size) / block_size;
  const Heads heads{num_heads, num_kv_heads, dim, block_size, slots, is_rounded};
  std::vector<int64_t> blocks(num_blocks);
  for (int64_t b = 0; b < num_blocks; ++b) blocks[b] = num_blocks - 1 - b;
  // Memory that was never written holds NaN.
  std::vector<Element> key_pool(num_blocks * num_kv_heads * slots * dim, rounded<Type>(NAN)), value_pool = key_pool;
  std::vector<float> rounded_keys(num_blocks * num_kv_heads * slots * (dim + 4) / 4, NAN), rounded_values = rounded_keys;
  const Pools pools = is_rounded ? Pools{rounded_keys.data(), rounded_values.data()}
                                 : Pools{key_pool.data(), value_pool.data()};
  const LayerOptions options{0, 0, 0.2f, 0.0f};
  const auto queries = random_elements<Type>((tokens + 1) * num_heads * dim),
             keys = random_elements<Type>((tokens + 1) * num_kv_heads * dim),
             values = random_elements<Type>((tokens + 1) * num_kv_heads * dim);
  std::vector<Element> found((tokens + 1) * num_heads * dim);
  for (const auto& [first, stop] : {std::pair<int64_t, int64_t>{0, tokens}, {tokens, tokens + 1}}) {
    std::vector<int64_t> slot_of, nothing{0, 0}, ends{0, stop - first}, num_keys{stop};
    for (int64_t t = first; t < stop; ++t) slot_of.push_back(blocks[t / block_size] * block_size + t % block_size);
    const BlockGroup group{slot_of.data(), blocks.data(), nothing.data(), nothing.data()};
    const Step step{ends.data(), num_keys.data(), nullptr, nullptr, {group, group}, 1, stop - first, 0, 2};
    attend<Type>(step, heads, pools, options, queries.data() + first * num_heads * dim,
                 keys.data() + first * num_kv_heads * dim, values.data() + first * num_kv_heads * dim,
                 found.data() + first * num_heads * dim);
  }
  const auto exact_queries = numbers<Type>(queries);
  auto exact_keys = numbers<Type>(keys), exact_values = numbers<Type>(values);
  if (is_rounded) round_heads(exact_keys, dim), round_heads(exact_values, dim);
  std::vector<double> wanted(found.size());
  for (int64_t t = 0; t <= tokens; ++t) {
    for (int64_t head = 0; head < num_heads; ++head) {
      std::vector<const double*> seen_keys, seen_values;
      for (int64_t k = 0; k <= t; ++k) {
        const int64_t at = (k * num_kv_heads + head / (num_heads / num_kv_heads)) * dim;
        seen_keys.push_back(exact_keys.data() + at);
        seen_values.push_back(exact_values.data() + at);
      }
      const int64_t at = (t * num_heads + head) * dim;
      attend_plainly(exact_queries.data() + at, seen_keys, seen_values, dim, options.scale, wanted.data() + at);
    }
  }
  check(difference<Type>(found, wanted) < tolerance<Type>(), (is_rounded ? "rounded attention " : "paged attention ") + type + " " + std::to_string(tokens) +
                                                                 " x " + std::to_string(dim) + " in blocks of " +
                                                                 std::to_string(block_size));
}

template <typename Type>
void check_type(const std::string& type) {
  for (int64_t rows : {1, 2, 3, 4, 5, 7, 12, 13, 25, 40}) {
    for (int64_t inputs : {2, 34, 130}) check_linear<Type>(type, rows, inputs, 70);
  }
  for (int64_t outputs : {1, 16, 31, 32, 33}) check_linear<Type>(type, 6, 64, outputs);
  for (CodeForm form : {CodeForm::kInt4, CodeForm::kInt8, CodeForm::kFloat8}) {
    for (int64_t rows : {1, 5, 13, 33, 100}) {
      for (int64_t group : {18, 32, 36, 96, 128, 192, 256}) check_quantized_linear<Type>(type, rows, 302, 70, form, group);
    }
    check_quantized_linear<Type>(type, 3, 64, 33, form, 1024);
    check_quantized_linear<Type>(type, 2, 2, 1, form, 128);
    for (int64_t tokens : {1, 9}) {
      for (bool is_gated : {false, true}) check_experts<Type>(type, tokens, form, is_gated);
    }
  }
  for (int64_t tokens : {1, 13, 33, 70}) {
    for (int64_t dim : {16, 72, 80}) check_dense_attention<Type>(type, tokens, dim);
  }
  for (int64_t block_size : {4, 16, 32}) {
    for (int64_t tokens : {1, 15, 40, 300}) {
      for (bool is_rounded : {false, true}) check_paged_attention<Type>(type, tokens, 32, block_size, is_rounded);
    }
  }
}

void check_exponentials() {
  for (float x = 0.0f; x > -130.0f; x -= 0.013f) {
    const double wanted = x < -126.0f ? 0.0 : std::exp2(double{x});
    const double found = exp2_of_negative(x);
    check(std::abs(found - wanted) <= 3e-7 * wanted, "exp2 of " + std::to_string(x));
    float rough[kLanes];
    store_floats(rough, exp2_of_negative<true>(Floats(x)));
    check(std::abs(rough[kLanes - 1] - wanted) <= 8e-6 * wanted, "rough exp2 of " + std::to_string(x));
  }
  check(exp2_of_negative(0.0f) == 1.0f, "exp2 of 0 is exactly 1");
  check(exp2_of_negative(-INFINITY) == 0.0f, "exp2 of -inf");
  check(std::isnan(exp2_of_negative(NAN)), "exp2 of NaN");
}

void check_rounding() {
  const std::pair<uint32_t, uint16_t> cases[] = {
      {0x3f800000, 0x3f80}, {0x3f808000, 0x3f80}, {0x3f818000, 0x3f82}, {0x3f808001, 0x3f81}, {0x7f800000, 0x7f80},
      {0xff800000, 0xff80}, {0x7f800001, 0x7fc0}, {0xffffffff, 0x7fc0}, {0x7f7fffff, 0x7f80}, {0x80000000, 0x8000},
  };
  for (const auto& [bits, wanted] : cases) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    check(rounded<BFloat16>(value) == wanted, "rounding " + std::to_string(bits));
    BFloat16::Left left[kLanes];
    BFloat16::Element elements[kLanes];
    BFloat16::store_left(left, Floats(value));
    BFloat16::store(elements, BFloat16::load_left(left));
    check(elements[3] == wanted, "rounding a left side " + std::to_string(bits));
  }
}

}  // namespace

int main() {
#if defined(__AMX_TILE__)
  // ARCH_REQ_XCOMP_PERM for tile data: https://docs.kernel.org/arch/x86/xstate.html
  check(syscall(SYS_arch_prctl, 0x1023, 18) == 0, "the system does not allow AMX");
#endif
  check_exponentials();
  check_rounding();
  check_activations<false>();
  check_activations<true>();
  check_type<Float32>("float32");
  check_type<BFloat16>("bfloat16");
  std::printf("%d checks failed, registers of %d bytes\n", num_failed, kRegisterBytes);
  return num_failed == 0 ? 0 : 1;
}
