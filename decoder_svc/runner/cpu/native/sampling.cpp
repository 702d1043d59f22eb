// Samples the next tokens of a step's rows from their logits, each row by its own request's parameters.
//
// The tokens of a row have an order: larger logits first, of equal ones the smaller id first. Top-k, top-p and min-p
// each keep a beginning of it, and a draw is the first token whose mass, with that of all before it, is above the
// uniform number times the mass of what is kept.
//
// Nearly all draws fall on one of the likeliest tokens, so a row is sorted down to a value that is found from the
// largest logits of its blocks. A place beyond them is sought in an interval of values, one pass over the row for each
// step, until few tokens are left to sort. So no row sorts its whole vocabulary. The logits of most tokens are nearly
// normally distributed, and so is their mass over the logits: mean and variance say where the place should be, and the
// first passes only look close to it. Later ones halve the interval.

#if defined(__AVX__)
#include <immintrin.h>
#endif

#include <cfloat>
#include <cmath>
#include <vector>

#include "lanes.h"

namespace lookonce {

// The structure below has the same fields in native_sampler.py.
struct SampledRow {
  double temperature;  // 0: the likeliest token.
  double top_p;        // 1: no limit.
  double min_p;        // 0: no limit.
  double log_min_p;    // Its natural logarithm.
  double uniform;      // In [0, 1).
  int64_t top_k;       // At most the size of the vocabulary, which is no limit.
  const int64_t* seen_ids;  // Distinct tokens of prompt and output, which have penalties.
  const int64_t* seen_counts;  // Their numbers of occurrences in the output.
  int64_t num_seen;
  const int64_t* bias_ids;
  const float* biases;
  int64_t num_biases;
  const int64_t* stop_ids;  // Tokens that are not allowed yet.
  int64_t num_stops;
  const uint8_t* mask;  // Bits of the tokens that may follow, the lowest first; null: all.
  int64_t num_logprobs;  // Alternatives whose log probabilities are reported; -1: not even the sampled token's.
  int64_t* logprob_ids;  // [1 + num_logprobs]: the sampled token, then the likeliest.
  float* logprobs;
  int64_t num_likeliest;  // For a row without temperature.
  int64_t* likeliest_ids;  // [num_likeliest]: filled from the front with tokens that are not excluded, in their order.
  float repetition_penalty;
  float presence_penalty;
  float frequency_penalty;
};

namespace {

// A row is processed in blocks of this many logits.
constexpr int64_t kBlock = 4 * kLanes;
// The sorted tokens are about as many as blocks have a largest logit above their value.
constexpr size_t kSortedBlocks = 256;
// Rows with more tokens above that value have many equal logits, and their places are found by halving.
constexpr int64_t kMaxSorted = 2048;
constexpr int kMeanPasses = 24;
// Passes that look where the place is expected, and how many tokens they should find there.
constexpr int kGuesses = 3;
constexpr double kGuessedTokens = 384.0;
// Sums of float32 weights are off by up to 2e-7 of the mass. A uniform number closer to 1 than this asks for one of the
// last tokens, which they cannot tell apart: then all masses are added in float64. It is one draw in 131,072.
constexpr double kLastTokens = 0x1p-17;
// The largest uniform number that counts, as in the sampler of PyTorch operators.
constexpr double kLargestUniform = 1.0 - 0x1p-40;

struct Token {
  float value;
  int64_t id;
  bool operator<(const Token& other) const { return value > other.value || (value == other.value && id < other.id); }
};

// A number of tokens and their mass.
struct Amount {
  int64_t count = 0;
  double mass = 0.0;
};

Amount operator+(const Amount& one, const Amount& other) { return {one.count + other.count, one.mass + other.mass}; }

// All tokens with this value or a larger one.
struct Bound {
  float value;
  Amount through;
};

// The mass of a row, and its mean and variance over the logarithms to base 2 of the weights.
struct Mass {
  double total;
  double mean;
  double variance;
};

// The tokens of an interval from a value on, the least value among them, and the largest value below.
struct Division {
  Amount upper;
  float least;
  float largest_below;
};

// Integers in the order of the floats.
int64_t key_of(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits < 0 ? -static_cast<int64_t>(bits & 0x7fffffff) : bits;
}

float value_of(int64_t key) {
  const int32_t bits = key < 0 ? static_cast<int32_t>(-key) | INT32_MIN : static_cast<int32_t>(key);
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// A value above `low` and up to `top`. The mean divides most rows well. After some passes it is the value that has as
// many floats below as above, so that there are at most 32 passes more.
float between(float low, float top, int pass) {
  const float mean = low + (top - low) / 2;
  if (pass < kMeanPasses && low < mean && mean <= top) return mean;
  const int64_t key = key_of(low);
  return value_of(key + (key_of(top) - key + 1) / 2);
}

// Returns e^x for x <= 0, with an error of a few units in the last place. The exponentials and logarithms of the C
// library would need a newer one than wheels are made for.
double exp_of_negative(double x) {
  constexpr double kLn2High = 6.93147180369123816490e-01, kLn2Low = 1.90821492927058770002e-10;
  if (!(x > -708.0)) return x != x ? x : 0.0;
  const double n = std::floor(x * 1.44269504088896340736 + 0.5);
  const double f = (x - n * kLn2High) - n * kLn2Low;
  // The series of e^f, whose terms are below a unit in the last place of 1 from the fourteenth on.
  constexpr double kInverses[] = {1.0 / 13, 1.0 / 12, 1.0 / 11, 1.0 / 10, 1.0 / 9, 1.0 / 8, 1.0 / 7,
                                  1.0 / 6,  1.0 / 5,  1.0 / 4,  1.0 / 3,  1.0 / 2, 1.0};
  double sum = 1.0;
  for (const double inverse : kInverses) sum = 1.0 + sum * (f * inverse);
  const int64_t bits = (static_cast<int64_t>(n) + 1023) << 52;
  double power;
  std::memcpy(&power, &bits, sizeof power);
  return sum * power;
}

// Returns the natural logarithm of x >= 1: that of a float, improved by one step of Newton's method.
double log_of(double x) {
  const double rough = std::log(static_cast<float>(x));
  return rough + (x * exp_of_negative(-rough) - 1.0);
}

// Returns how many standard deviations above its mean a normally distributed number is with this probability, with an
// error below 5e-4 (Abramowitz and Stegun, 26.2.23).
double normal_quantile(double probability) {
  const double tail = std::min(probability, 1.0 - probability);
  if (!(tail > 0.0)) return 0.0;
  const double t = std::sqrt(2.0 * log_of(1.0 / tail));
  const double size = t - (2.515517 + t * (0.802853 + t * 0.010328)) /
                              (1.0 + t * (1.432788 + t * (0.189269 + t * 0.001308)));
  return probability < 0.5 ? size : -size;
}

// The lanes in which a condition is true, as bits.
uint32_t bits_of(IntegerRegister condition) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(condition), reinterpret_cast<__m512i>(condition));
#elif defined(__AVX__)
  return static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(condition)));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kRegisterLanes; ++i) bits |= static_cast<uint32_t>(condition[i] != 0) << i;
  return bits;
#endif
}

// The logits of one row in whole blocks. If they are changed or padded, with -inf, they are copied to a thread's own
// memory.
class Row {
 public:
  void load(const float* logits, int64_t vocab, bool is_changed) {
    vocab_ = vocab;
    size_ = (vocab + kBlock - 1) / kBlock * kBlock;
    weights_.resize(size_);
    tops_.resize(size_ / kBlock);
    values_ = logits;
    if (!is_changed && size_ == vocab) return;
    copy_.resize(size_);
    std::copy(logits, logits + vocab, copy_.begin());
    std::fill(copy_.begin() + vocab, copy_.end(), -INFINITY);
    values_ = copy_.data();
  }

  const float* values() const { return values_; }

  // Only of a row that was loaded to be changed.
  float* changed_values() { return copy_.data(); }

  void fill(float value) { std::fill(copy_.begin(), copy_.begin() + vocab_, value); }

  // Notes the largest logits of all blocks. Other members below need it, and no change of values after it.
  void find_tops() {
    largest_ = -INFINITY;
    for (size_t block = 0; block < tops_.size(); ++block) {
      const float* from = values_ + block * kBlock;
      Floats top = -INFINITY;
      // A number that is NaN is passed over.
      for (int64_t i = 0; i < kBlock; i += kLanes) top = larger(load_floats(from + i), top);
      tops_[block] = largest_lane(top);
      if (tops_[block] > largest_) largest_ = tops_[block];
    }
  }

  float largest() const { return largest_; }

  // The likeliest token; 0 if no logit is above -inf.
  int64_t likeliest() const {
    for (size_t block = 0; block < tops_.size(); ++block) {
      if (tops_[block] != largest_) continue;
      for (int64_t id = block * kBlock; id < vocab_ && id < static_cast<int64_t>(block + 1) * kBlock; ++id) {
        if (values_[id] == largest_) return id;
      }
    }
    return 0;
  }

  // The value that about `num_blocks` blocks reach.
  float value_of_blocks(size_t num_blocks) {
    // An assignment would need a newer C++ library than wheels are made for.
    ordered_.resize(tops_.size());
    std::copy(tops_.begin(), tops_.end(), ordered_.begin());
    const size_t place = std::min(num_blocks, ordered_.size()) - 1;
    std::nth_element(ordered_.begin(), ordered_.begin() + place, ordered_.end(), std::greater<float>());
    return ordered_[place];
  }

  // Returns the tokens with values in [low, high), in their order, or nothing if they are more than `most`.
  void collect(float low, float high, int64_t most, std::vector<Token>& found) const {
    found.clear();
    bool are_equal = true;
    for (size_t block = 0; block < tops_.size(); ++block) {
      if (!(tops_[block] >= low)) continue;
      const int64_t stop = (block + 1) * kBlock;
      for (int64_t first = block * kBlock; first < stop; first += kRegisterLanes) {
        FloatRegister values;
        std::memcpy(&values, values_ + first, sizeof values);
        for (uint32_t inside = bits_of((values >= low) & (values < high)); inside != 0; inside &= inside - 1) {
          const int64_t id = first + __builtin_ctz(inside);
          if (id >= vocab_) break;
          are_equal = are_equal && (found.empty() || found[0].value == values_[id]);
          found.push_back({values_[id], id});
        }
      }
      if (static_cast<int64_t>(found.size()) > most) return found.clear();
    }
    if (!are_equal) std::sort(found.begin(), found.end());
  }

  // The token with this value that has as many before it, with itself, as `number`.
  int64_t place_of_equal(float value, int64_t number) const {
    for (int64_t first = 0; first < size_; first += kRegisterLanes) {
      FloatRegister values;
      std::memcpy(&values, values_ + first, sizeof values);
      uint32_t equal = bits_of(values == value);
      const int64_t count = __builtin_popcount(equal);
      if (number > count) {
        number -= count;
        continue;
      }
      while (--number > 0) equal &= equal - 1;
      return first + __builtin_ctz(equal);
    }
    return 0;
  }

  // Computes the weights of all tokens, relative to that of the likeliest.
  Mass weigh(double temperature) {
    const float scale = static_cast<float>(std::min<double>(kLog2OfE / temperature, FLT_MAX));
    double total = 0.0;
    // Of the logarithms and their squares. Their rounding errors do not matter: they only say where to look first.
    Floats first = 0.0f, second = 0.0f;
    const Floats least = -126.0f, none = 0.0f;
    for (int64_t start = 0; start < size_; start += kBlock) {
      Floats of_block = 0.0f;
      for (int64_t i = start; i < start + kBlock; i += kLanes) {
        const Floats logs = (load_floats(values_ + i) - largest_) * scale;
        // A number that is NaN is passed over.
        const Floats weights = larger(exp2_of_negative(logs), none);
        store_floats(weights_.data() + i, weights);
        of_block += weights;
        // Weights below that are 0, and a product with -inf would be NaN.
        const Floats clipped = larger(logs, least);
        const Floats product = weights * clipped;
        first += product;
        second += product * clipped;
      }
      total += sum_of_lanes(of_block);
    }
    const double mean = sum_of_lanes(first) / total;
    return {total, mean, sum_of_lanes(second) / total - mean * mean};
  }

  // The number of blocks with a logit of at least this value.
  int64_t num_blocks_at_least(float value) const {
    int64_t count = 0;
    for (const float top : tops_) count += top >= value;
    return count;
  }

  // The amounts of tokens with values in [one, high) and in [other, high), where `one` is at least `other`. The masses
  // are right after `weigh`.
  void amounts(float one, float other, float high, Amount& of_one, Amount& of_other) const {
    double mass = 0.0, other_mass = 0.0;
    IntegerRegister counts{}, other_counts{};
    for (size_t block = 0; block < tops_.size(); ++block) {
      if (!(tops_[block] >= other)) continue;
      Floats of_block = 0.0f, other_of_block = 0.0f;
      for (int64_t i = block * kBlock; i < static_cast<int64_t>(block + 1) * kBlock; i += kLanes) {
        const Floats values = load_floats(values_ + i), weights = load_floats(weights_.data() + i);
        for (int p = 0; p < kRegisters; ++p) {
          const IntegerRegister is_below = values.part[p] < high;
          const IntegerRegister is_inside = (values.part[p] >= one) & is_below;
          const IntegerRegister is_other = (values.part[p] >= other) & is_below;
          counts -= is_inside;
          other_counts -= is_other;
          of_block.part[p] += is_inside ? weights.part[p] : FloatRegister{};
          other_of_block.part[p] += is_other ? weights.part[p] : FloatRegister{};
        }
      }
      mass += sum_of_lanes(of_block);
      other_mass += sum_of_lanes(other_of_block);
    }
    of_one = {0, mass};
    of_other = {0, other_mass};
    for (int i = 0; i < kRegisterLanes; ++i) {
      of_one.count += counts[i];
      of_other.count += other_counts[i];
    }
  }

  // Divides the tokens with values in [low, high) at a value between. Their mass is right after `weigh`.
  Division divided(float low, float middle, float high) const {
    double mass = 0.0;
    IntegerRegister counts{};
    Floats least = INFINITY, largest = -INFINITY;
    const Floats most = INFINITY, none = -INFINITY;
    const float* values_from = values_;
    const float* weights_from = weights_.data();
    for (size_t block = 0; block < tops_.size(); ++block) {
      if (!(tops_[block] >= low)) continue;
      Floats of_block = 0.0f;
      for (int64_t i = block * kBlock; i < static_cast<int64_t>(block + 1) * kBlock; i += kLanes) {
        const Floats values = load_floats(values_from + i), weights = load_floats(weights_from + i);
        for (int p = 0; p < kRegisters; ++p) {
          const FloatRegister value = values.part[p];
          const IntegerRegister is_upper = (value >= middle) & (value < high);
          const IntegerRegister is_lower = (value >= low) & (value < middle);
          counts -= is_upper;
          of_block.part[p] += is_upper ? weights.part[p] : FloatRegister{};
          const FloatRegister upper = is_upper ? value : most.part[p];
          const FloatRegister lower = is_lower ? value : none.part[p];
          least.part[p] = upper < least.part[p] ? upper : least.part[p];
          largest.part[p] = lower > largest.part[p] ? lower : largest.part[p];
        }
      }
      mass += sum_of_lanes(of_block);
    }
    Division found{{0, mass}, -largest_lane(Floats(0.0f) - least), largest_lane(largest)};
    for (int i = 0; i < kRegisterLanes; ++i) found.upper.count += counts[i];
    return found;
  }

  // The amount of tokens with values in [low, high). Its mass is right after `weigh`.
  Amount amount(float low, float high) const { return divided(low, low, high).upper; }

  // Excludes the tokens that a mask does not allow.
  void exclude(const uint8_t* mask) {
    IntegerRegister bits;
    for (int i = 0; i < kRegisterLanes; ++i) bits[i] = 1 << i;
    for (int64_t i = 0; i < size_; i += kLanes) {
      // The bytes of a mask may end with the vocabulary.
      uint32_t word = i < vocab_ ? mask[i / 8] : 0;
      if (i + 8 < vocab_) word |= static_cast<uint32_t>(mask[i / 8 + 1]) << 8;
      Floats values = load_floats(copy_.data() + i);
      for (FloatRegister& part : values.part) {
        const IntegerRegister is_allowed = ((static_cast<int32_t>(word) - IntegerRegister{}) & bits) != 0;
        part = is_allowed ? part : -INFINITY - FloatRegister{};
        word >>= kRegisterLanes;
      }
      store_floats(copy_.data() + i, values);
    }
  }

 private:
  const float* values_ = nullptr;
  std::vector<float> copy_, weights_, tops_, ordered_;
  int64_t vocab_ = 0, size_ = 0;
  float largest_ = 0.0f;
};

// A token, and the amount of it and all tokens before it.
struct Place {
  int64_t id;
  Amount through;
};

// A row's tokens in their order.
class Order {
 public:
  Order(Row& row, double temperature, std::vector<Token>& sorted, std::vector<Token>& spare)
      : row_(row), temperature_(temperature), sorted_(sorted), spare_(spare) {
    sorted_.clear();
  }

  // The mass of all tokens.
  double total() {
    if (!is_weighed_) mass_ = row_.weigh(temperature_);
    is_weighed_ = true;
    return mass_.total;
  }

  // The first token for which `is_there(amount of the token and all before it)`; the last one if there is none.
  // `is_there` must stay true behind it. `target` is the mass at which it is expected to become true, or NaN.
  template <typename Predicate>
  Place first(double target, Predicate is_there) {
    Guess guess = guessed(target);
    if (is_sorted_ || !is_far(guess.value)) {
      sort_top();
      for (size_t i = 0; i < sorted_.size(); ++i) {
        const Amount through{static_cast<int64_t>(i) + 1, masses_[i]};
        if (is_there(through)) return {sorted_[i].id, through};
      }
    }
    total();
    // The token is below `high`, and not below `low` if that is known.
    Bound high = below_sorted(), low = kUnknown;
    for (const Bound& bound : bounds_) {
      if (is_there(bound.through)) {
        if (bound.value > low.value) low = bound;
      } else if (bound.value < high.value) {
        high = bound;
      }
    }
    // Sums of the same masses in another order may differ in their last places.
    if (!(low.value < high.value)) low = kUnknown;
    for (int i = 0; i < kGuesses && !is_near(low, high); ++i) {
      if (!improve(guess, target, low, high, is_there)) break;
    }
    if (is_near(low, high)) {
      row_.collect(low.value, high.value, INT64_MAX, spare_);
      if (!spare_.empty()) return first_of_spare(high.through, is_there);
    }
    return halved(low, high, is_there);
  }

  // The token for a draw without limits, from masses in float64.
  int64_t last_token(double uniform) {
    row_.collect(-FLT_MAX, INFINITY, INT64_MAX, spare_);
    double total = 0.0, mass = 0.0;
    for (const Token& token : spare_) total += weight(token.value);
    const double point = std::min(uniform, kLargestUniform) * total;
    for (const Token& token : spare_) {
      mass += weight(token.value);
      if (mass > point) return token.id;
    }
    return row_.likeliest();
  }

  // The amount of tokens whose weight is at least `least`.
  Amount at_least(double least, double log_least) {
    const double lowest = std::max<double>(row_.largest() + log_least * temperature_, -FLT_MAX);
    if (!is_sorted_ && is_far(static_cast<float>(lowest))) {
      total();
      return row_.amount(static_cast<float>(lowest), INFINITY);
    }
    sort_top();
    size_t count = 0;
    while (count < sorted_.size() && weight(sorted_[count].value) >= least) ++count;
    Amount found{static_cast<int64_t>(count), count == 0 ? 0.0 : masses_[count - 1]};
    if (count < sorted_.size()) return found;
    total();
    const Amount more = row_.amount(static_cast<float>(lowest), low_);
    return {found.count + more.count, found.mass + more.mass};
  }

 private:
  // Where a place is expected, and how far from there it may be.
  struct Guess {
    float value;
    float reach;
  };

  static constexpr Bound kUnknown{-INFINITY, {}};

  // The sorted tokens.
  Bound below_sorted() const {
    if (sorted_.empty()) return {INFINITY, {}};
    return {low_, {static_cast<int64_t>(sorted_.size()), masses_.back()}};
  }

  double weight(float value) const {
    return exp_of_negative((static_cast<double>(value) - row_.largest()) / temperature_);
  }

  void sort_top() {
    if (is_sorted_) return;
    is_sorted_ = true;
    // Tokens that are excluded are never sorted.
    low_ = std::max(row_.value_of_blocks(kSortedBlocks), -FLT_MAX);
    row_.collect(low_, INFINITY, kMaxSorted, sorted_);
    if (sorted_.empty()) low_ = INFINITY;
    masses_.clear();
    double mass = 0.0;
    for (const Token& token : sorted_) masses_.push_back(mass += weight(token.value));
  }

  // Whether more tokens than are sorted are above a value. False for NaN.
  bool is_far(float value) const {
    return row_.num_blocks_at_least(value) > static_cast<int64_t>(2 * kSortedBlocks);
  }

  static bool is_near(const Bound& low, const Bound& high) {
    return low.value > -INFINITY && low.through.count - high.through.count <= kMaxSorted / 2;
  }

  // The value at which the tokens above have this mass, if the mass is normally distributed over the logits.
  Guess guessed(double target) const {
    if (!is_weighed_ || !(target > 0.0 && target < mass_.total && mass_.variance > 0.0)) return {NAN, 0.0f};
    const double deviation = std::sqrt(mass_.variance), away = normal_quantile(target / mass_.total);
    const double log_weight = std::min(mass_.mean + deviation * away, 0.0);
    const double logit = temperature_ / kLog2OfE;
    // The number of tokens in an interval is its mass over the weight of each.
    const double each = exp_of_negative(log_weight / kLog2OfE);
    const double density = mass_.total * 0.39894228 * exp_of_negative(-away * away / 2) / deviation / each;
    return {static_cast<float>(row_.largest() + log_weight * logit),
            static_cast<float>(kGuessedTokens / 2 / density * logit)};
  }

  // Looks at both ends of a guess, moves the bounds, and the guess to where the place should be after that. Returns
  // whether another pass with it makes sense.
  template <typename Predicate>
  bool improve(Guess& guess, double target, Bound& low, Bound& high, Predicate is_there) {
    const float from = std::max(guess.value - guess.reach, std::max(low.value, -FLT_MAX));
    const float to = std::min(guess.value + guess.reach, value_of(key_of(high.value) - 1));
    if (!(from < to)) return false;
    Amount upper, lower;
    row_.amounts(to, from, high.value, upper, lower);
    const Bound at_to{to, high.through + upper}, at_from{from, high.through + lower};
    bounds_.push_back(at_to);
    bounds_.push_back(at_from);
    if (is_there(at_to.through)) {
      low = at_to;
    } else if (is_there(at_from.through)) {
      high = at_to;
      low = at_from;
    } else {
      high = at_from;
    }
    const double num_tokens = static_cast<double>(lower.count - upper.count), mass = lower.mass - upper.mass;
    if (!(num_tokens > 0.0 && mass > 0.0)) return false;
    const double width = static_cast<double>(to) - from;
    guess.value = static_cast<float>(from + (at_from.through.mass - target) / mass * width);
    guess.reach = static_cast<float>(kGuessedTokens / 2 / num_tokens * width);
    return true;
  }

  template <typename Predicate>
  Place first_of_spare(Amount above, Predicate is_there) const {
    Place found{spare_.front().id, above};
    for (const Token& token : spare_) {
      ++above.count;
      above.mass += weight(token.value);
      found = {token.id, above};
      if (is_there(above)) break;
    }
    return found;
  }

  // The same as `first`, between two bounds, by halving the interval of values.
  template <typename Predicate>
  Place halved(const Bound& known_low, const Bound& known_high, Predicate is_there) {
    // Below that, weights are 0.
    const double least = std::max<double>(row_.largest() - 126.0 / kLog2OfE * temperature_, -FLT_MAX);
    float high = known_high.value;
    Amount above = known_high.through;
    // Tokens with values from `low` up to `top`, which is below `high`, are searched.
    Division division =
        row_.divided(-INFINITY, std::max(static_cast<float>(least), known_low.value), high);
    // Sums of the same masses in another order may differ in their last places, so that bounds have nothing between.
    const bool is_bounded = known_low.value > -INFINITY || known_high.value < below_sorted().value;
    if (division.upper.count == 0 && is_bounded) return halved(kUnknown, below_sorted(), is_there);
    float low = division.least, top = value_of(key_of(high) - 1);
    int64_t count = division.upper.count;
    for (int pass = 0; count > kMaxSorted / 2 && low < top; ++pass) {
      const float middle = between(low, top, pass);
      division = row_.divided(low, middle, high);
      const Amount upper = division.upper;
      if (is_there(above + upper)) {
        low = division.least;
        count = upper.count;
      } else {
        high = middle;
        top = division.largest_below;
        above = above + upper;
        count -= upper.count;
      }
    }
    if (low == top) return first_of_equals(low, count, above, is_there);
    row_.collect(low, high, INT64_MAX, spare_);
    if (!spare_.empty()) return first_of_spare(above, is_there);
    return {sorted_.empty() ? row_.likeliest() : sorted_.back().id, above};
  }

  // The same among `count` tokens of one value, behind those `above`.
  template <typename Predicate>
  Place first_of_equals(float value, int64_t count, const Amount& above, Predicate is_there) {
    const double each = weight(value);
    int64_t low = 1, high = count;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (is_there(Amount{above.count + middle, above.mass + middle * each})) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return {row_.place_of_equal(value, low), {above.count + low, above.mass + low * each}};
  }

  Row& row_;
  double temperature_;
  // The sorted tokens, whose values are at least `low_`, and the mass through each.
  std::vector<Token>& sorted_;
  std::vector<Token>& spare_;
  std::vector<double> masses_;
  float low_ = INFINITY;
  bool is_sorted_ = false;
  Mass mass_{};
  bool is_weighed_ = false;
  // Amounts that earlier passes have found.
  std::vector<Bound> bounds_;
};

int64_t drawn(Order& order, const SampledRow& row, int64_t vocab) {
  Amount kept{vocab, -1.0};
  if (row.top_k < vocab) {
    kept = order.first(NAN, [&](const Amount& through) { return through.count >= row.top_k; }).through;
  }
  if (row.top_p < 1.0) {
    const double least = row.top_p * (kept.mass < 0.0 ? order.total() : kept.mass);
    const Amount limit = order.first(least, [&](const Amount& through) { return through.mass >= least; }).through;
    if (limit.count < kept.count) kept = limit;
  }
  if (row.min_p > 0.0) {
    const Amount limit = order.at_least(row.min_p, row.log_min_p);
    if (limit.count < kept.count) kept = limit;
  }
  if (kept.mass < 0.0 && row.uniform > 1.0 - kLastTokens) return order.last_token(row.uniform);
  const double point = row.uniform * (kept.mass < 0.0 ? order.total() : kept.mass);
  return order
      .first(point, [&](const Amount& through) { return through.mass > point || through.count >= kept.count; })
      .id;
}

void adjust(Row& memory, const float* logits, const SampledRow& row, int64_t vocab) {
  float* values = memory.changed_values();
  for (int64_t i = 0; i < row.num_seen; ++i) {
    // Image placeholders may have ids beyond the vocabulary of the logits.
    if (row.seen_ids[i] >= vocab) continue;
    float& value = values[row.seen_ids[i]];
    if (row.repetition_penalty != 1.0f) {
      value = value > 0.0f ? value / row.repetition_penalty : value * row.repetition_penalty;
      value = std::min(std::max(value, -FLT_MAX), FLT_MAX);
    }
    const float count = static_cast<float>(row.seen_counts[i]);
    if (count > 0.0f) value -= row.presence_penalty + row.frequency_penalty * count;
  }
  for (int64_t i = 0; i < row.num_biases; ++i) {
    if (row.bias_ids[i] < vocab) values[row.bias_ids[i]] += row.biases[i];
  }
  for (int64_t i = 0; i < row.num_stops; ++i) {
    if (row.stop_ids[i] < vocab) values[row.stop_ids[i]] = -INFINITY;
  }
  if (row.mask != nullptr) memory.exclude(row.mask);
  memory.find_tops();
  if (row.mask != nullptr && memory.largest() == -INFINITY) {
    // A constraint is stronger than biases and `min_tokens`.
    memory.load(logits, vocab, true);
    memory.exclude(row.mask);
    memory.find_tops();
    if (memory.largest() == -INFINITY) {
      // The logits of all that may follow are -inf or NaN. One of them must be taken all the same.
      memory.fill(0.0f);
      memory.exclude(row.mask);
      memory.find_tops();
    }
  }
}

// Makes log probabilities of logits.
struct LogProbs {
  double largest;    // Subtracted first: beside a large number the logarithm would be lost.
  double log_total;  // The logarithm of the mass, relative to the likeliest token's.
  float operator()(float value) const { return static_cast<float>(value - largest - log_total); }
};

// Log probabilities of the raw logits: of the likeliest tokens, and room for the sampled one.
LogProbs report(Row& memory, const float* logits, const SampledRow& row, int64_t vocab, std::vector<Token>& sorted) {
  const double total = memory.weigh(1.0).total;
  const LogProbs log_probs{memory.largest(), log_of(total >= 1.0 ? total : NAN)};
  const int64_t wanted = std::min(row.num_logprobs, vocab);
  if (wanted > 0) {
    memory.collect(memory.value_of_blocks(wanted), INFINITY, INT64_MAX, sorted);
    // A vocabulary of few blocks has fewer largest logits than are wanted.
    if (static_cast<int64_t>(sorted.size()) < wanted) memory.collect(-INFINITY, INFINITY, INT64_MAX, sorted);
    for (int64_t i = 0; i < wanted && i < static_cast<int64_t>(sorted.size()); ++i) {
      row.logprob_ids[1 + i] = sorted[i].id;
      row.logprobs[1 + i] = log_probs(sorted[i].value);
    }
    // Behind all numbers come those that are NaN, which have no probability.
    int64_t num_reported = std::min<int64_t>(wanted, sorted.size());
    for (int64_t id = 0; id < vocab && num_reported < wanted; ++id) {
      if (!std::isnan(logits[id])) continue;
      ++num_reported;
      row.logprob_ids[num_reported] = id;
      row.logprobs[num_reported] = -INFINITY;
    }
  }
  return log_probs;
}

// The first of the largest logits.
int64_t likeliest(const float* logits, int64_t vocab) {
  const int64_t num_whole = vocab / kLanes * kLanes;
  Floats tops = -INFINITY;
  for (int64_t i = 0; i < num_whole; i += kLanes) tops = larger(load_floats(logits + i), tops);
  float largest = largest_lane(tops);
  for (int64_t i = num_whole; i < vocab; ++i) largest = std::max(largest, logits[i]);
  const float* found = std::find(logits, logits + vocab, largest);
  return found == logits + vocab ? 0 : found - logits;
}

// Writes the first tokens in their order, as far as their logits are above -inf. Returns the first one; 0: there is none.
int64_t likeliest_of(const float* logits, int64_t vocab, int64_t* ids, int64_t wanted) {
  static thread_local std::vector<float> tops, ordered;
  static thread_local std::vector<Token> found;
  const int64_t num_blocks = (vocab + kBlock - 1) / kBlock;
  tops.resize(num_blocks);
  for (int64_t block = 0; block < num_blocks; ++block) {
    const float* from = logits + block * kBlock;
    const int64_t num = std::min<int64_t>(kBlock, vocab - block * kBlock);
    // A number that is NaN is passed over.
    Floats top = -INFINITY;
    for (int64_t i = 0; i + kLanes <= num; i += kLanes) top = larger(load_floats(from + i), top);
    tops[block] = largest_lane(top);
    for (int64_t i = num / kLanes * kLanes; i < num; ++i) {
      if (from[i] > tops[block]) tops[block] = from[i];
    }
  }
  float low = -FLT_MAX;
  if (wanted <= num_blocks) {
    ordered.resize(num_blocks);
    std::copy(tops.begin(), tops.end(), ordered.begin());
    std::nth_element(ordered.begin(), ordered.begin() + wanted - 1, ordered.end(), std::greater<float>());
    low = std::max(ordered[wanted - 1], low);
  }
  found.clear();
  for (int64_t block = 0; block < num_blocks; ++block) {
    if (!(tops[block] >= low)) continue;
    const int64_t stop = std::min<int64_t>(vocab, (block + 1) * kBlock);
    for (int64_t id = block * kBlock; id < stop; ++id) {
      if (logits[id] >= low) found.push_back({logits[id], id});
    }
  }
  const int64_t count = std::min<int64_t>(wanted, found.size());
  std::partial_sort(found.begin(), found.begin() + count, found.end());
  for (int64_t i = 0; i < count; ++i) ids[i] = found[i].id;
  return count == 0 ? 0 : found[0].id;
}

bool is_plain(const SampledRow& row) {
  return row.num_seen == 0 && row.num_biases == 0 && row.num_stops == 0 && row.mask == nullptr;
}

int64_t sampled(Row& memory, const float* logits, const SampledRow& row, int64_t vocab) {
  static thread_local std::vector<Token> sorted, spare;
  if (row.temperature == 0.0 && row.num_logprobs < 0 && is_plain(row)) {
    return row.num_likeliest == 0 ? likeliest(logits, vocab)
                                  : likeliest_of(logits, vocab, row.likeliest_ids, row.num_likeliest);
  }
  memory.load(logits, vocab, !is_plain(row));
  LogProbs log_probs{};
  if (row.num_logprobs >= 0) {
    memory.find_tops();
    log_probs = report(memory, logits, row, vocab, sorted);
  }
  adjust(memory, logits, row, vocab);
  int64_t chosen;
  if (row.num_likeliest > 0) {
    chosen = likeliest_of(memory.values(), vocab, row.likeliest_ids, row.num_likeliest);
  } else if (row.temperature == 0.0 || !(std::abs(memory.largest()) < INFINITY)) {
    chosen = memory.likeliest();
  } else {
    Order order(memory, row.temperature, sorted, spare);
    chosen = drawn(order, row, vocab);
  }
  if (row.num_logprobs >= 0) {
    row.logprob_ids[0] = chosen;
    row.logprobs[0] = log_probs(logits[chosen]);
  }
  return chosen;
}

}  // namespace
}  // namespace lookonce

#pragma GCC visibility push(default)
extern "C" {

// Samples one token for each row of `logits` [num_rows, vocab]. A row of NaN gives -1 minus a token: if a hidden state is
// NaN, no logit of it is a number.
void lookonce_sample(const float* logits, int64_t num_rows, int64_t vocab, const lookonce::SampledRow* rows,
                     int64_t* chosen, int64_t num_threads) {
#pragma omp parallel num_threads(num_threads) if (num_rows > 1)
  {
    static thread_local lookonce::Row memory;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_rows; ++i) {
      const int64_t token = lookonce::sampled(memory, logits + i * vocab, rows[i], vocab);
      chosen[i] = std::isnan(logits[i * vocab]) ? -1 - token : token;
    }
  }
}
}
#pragma GCC visibility pop
