// Samples the next tokens of a step's rows from their logits, each row by its own request's parameters.
//
// The tokens of a row have an order: larger logits first, of equal ones the smaller id first. Top-k, top-p and min-p
// each keep a beginning of it, and a draw is the first token whose mass, with that of all before it, is above the
// uniform number times the mass of what is kept.
//
// Nearly all draws fall on one of the likeliest tokens, so a row is sorted down to a value that is found from the
// largest logits of its blocks. A place beyond them is found by halving an interval of values, one pass over the row
// for each half, until few tokens are left to sort. So no row sorts its whole vocabulary.

#if defined(__AVX__)
#include <immintrin.h>
#endif

#include <cfloat>
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

// The logits of one row in a thread's own memory, padded with -inf to whole blocks.
class Row {
 public:
  void load(const float* logits, int64_t vocab) {
    size_ = (vocab + kBlock - 1) / kBlock * kBlock;
    values_.resize(size_);
    weights_.resize(size_);
    tops_.resize(size_ / kBlock);
    std::copy(logits, logits + vocab, values_.begin());
    std::fill(values_.begin() + vocab, values_.end(), -INFINITY);
    vocab_ = vocab;
  }

  float* values() { return values_.data(); }

  void fill(float value) { std::fill(values_.begin(), values_.begin() + vocab_, value); }

  // Notes the largest logits of all blocks. Other members below need it, and no change of values after it.
  void find_tops() {
    largest_ = -INFINITY;
    for (size_t block = 0; block < tops_.size(); ++block) {
      const float* from = values_.data() + block * kBlock;
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
        std::memcpy(&values, values_.data() + first, sizeof values);
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
      std::memcpy(&values, values_.data() + first, sizeof values);
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

  // Computes the weights of all tokens, relative to that of the likeliest. Returns their sum.
  double weigh(double temperature) {
    const float scale = static_cast<float>(std::min<double>(kLog2OfE / temperature, FLT_MAX));
    double sum = 0.0;
    for (int64_t start = 0; start < size_; start += kBlock) {
      Floats of_block = 0.0f;
      for (int64_t i = start; i < start + kBlock; i += kLanes) {
        const Floats weights = exp2_of_negative((load_floats(values_.data() + i) - largest_) * scale);
        store_floats(weights_.data() + i, weights);
        of_block += weights;
      }
      sum += sum_of_lanes(of_block);
    }
    return sum;
  }

  // Divides the tokens with values in [low, high) at a value between. Their mass is right after `weigh`.
  Division divided(float low, float middle, float high) const {
    double mass = 0.0;
    IntegerRegister counts{};
    Floats least = INFINITY, largest = -INFINITY;
    const Floats most = INFINITY, none = -INFINITY;
    const float* values_from = values_.data();
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
      Floats values = load_floats(values_.data() + i);
      for (FloatRegister& part : values.part) {
        const IntegerRegister is_allowed = ((static_cast<int32_t>(word) - IntegerRegister{}) & bits) != 0;
        part = is_allowed ? part : -INFINITY - FloatRegister{};
        word >>= kRegisterLanes;
      }
      store_floats(values_.data() + i, values);
    }
  }

 private:
  std::vector<float> values_, weights_, tops_, ordered_;
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
    // Tokens that are excluded are never sorted.
    low_ = std::max(row.value_of_blocks(kSortedBlocks), -FLT_MAX);
    row.collect(low_, INFINITY, kMaxSorted, sorted_);
    if (sorted_.empty()) low_ = INFINITY;
    mass_.clear();
    double mass = 0.0;
    for (const Token& token : sorted_) mass_.push_back(mass += weight(token.value));
  }

  // The mass of all tokens.
  double total() {
    if (total_ < 0.0) total_ = row_.weigh(temperature_);
    return total_;
  }

  // The first token for which `is_there(amount of the token and all before it)`; the last one if there is none.
  // `is_there` must stay true behind it.
  template <typename Predicate>
  Place first(Predicate is_there) {
    for (size_t i = 0; i < sorted_.size(); ++i) {
      const Amount through{static_cast<int64_t>(i) + 1, mass_[i]};
      if (is_there(through)) return {sorted_[i].id, through};
    }
    total();
    Amount above = sorted_.empty() ? Amount{} : Amount{static_cast<int64_t>(sorted_.size()), mass_.back()};
    // Tokens with values from `low` up to `top`, which is below `high`, are searched. Below that, weights are 0.
    float high = low_;
    const double lowest = row_.largest() - 126.0 / kLog2OfE * temperature_;
    Division division = row_.divided(-INFINITY, static_cast<float>(std::max<double>(lowest, -FLT_MAX)), high);
    float low = division.least, top = value_of(key_of(high) - 1);
    int64_t count = division.upper.count;
    for (int pass = 0; count > kMaxSorted / 2 && low < top; ++pass) {
      const float middle = between(low, top, pass);
      division = row_.divided(low, middle, high);
      const Amount upper = division.upper;
      if (is_there(Amount{above.count + upper.count, above.mass + upper.mass})) {
        low = division.least;
        count = upper.count;
      } else {
        high = middle;
        top = division.largest_below;
        above.count += upper.count;
        above.mass += upper.mass;
        count -= upper.count;
      }
    }
    if (low == top) return first_of_equals(low, count, above, is_there);
    row_.collect(low, high, INT64_MAX, spare_);
    Place found{sorted_.empty() ? row_.likeliest() : sorted_.back().id, above};
    for (const Token& token : spare_) {
      ++above.count;
      above.mass += weight(token.value);
      found = {token.id, above};
      if (is_there(above)) break;
    }
    return found;
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

  // The amount of tokens whose weight is at least `least`.
  Amount at_least(double least, double log_least) {
    size_t count = 0;
    while (count < sorted_.size() && weight(sorted_[count].value) >= least) ++count;
    Amount found{static_cast<int64_t>(count), count == 0 ? 0.0 : mass_[count - 1]};
    if (count < sorted_.size()) return found;
    total();
    const double lowest = row_.largest() + log_least * temperature_;
    const Amount more = row_.amount(static_cast<float>(std::max<double>(lowest, -FLT_MAX)), low_);
    return {found.count + more.count, found.mass + more.mass};
  }

 private:
  double weight(float value) const {
    return exp_of_negative((static_cast<double>(value) - row_.largest()) / temperature_);
  }

  Row& row_;
  double temperature_;
  // The sorted tokens, whose values are at least `low_`, and the mass through each.
  std::vector<Token>& sorted_;
  std::vector<Token>& spare_;
  std::vector<double> mass_;
  float low_;
  double total_ = -1.0;
};

int64_t drawn(Order& order, const SampledRow& row, int64_t vocab) {
  Amount kept{vocab, -1.0};
  if (row.top_k < vocab) {
    kept = order.first([&](const Amount& through) { return through.count >= row.top_k; }).through;
  }
  if (row.top_p < 1.0) {
    const double least = row.top_p * (kept.mass < 0.0 ? order.total() : kept.mass);
    const Amount limit = order.first([&](const Amount& through) { return through.mass >= least; }).through;
    if (limit.count < kept.count) kept = limit;
  }
  if (row.min_p > 0.0) {
    const Amount limit = order.at_least(row.min_p, row.log_min_p);
    if (limit.count < kept.count) kept = limit;
  }
  const double point = row.uniform * (kept.mass < 0.0 ? order.total() : kept.mass);
  return order
      .first([&](const Amount& through) { return through.mass > point || through.count >= kept.count; })
      .id;
}

void adjust(Row& memory, const float* logits, const SampledRow& row, int64_t vocab) {
  float* values = memory.values();
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
    memory.load(logits, vocab);
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

// Log probabilities of the raw logits: of the likeliest tokens, and room for the sampled one.
double report(Row& memory, const SampledRow& row, int64_t vocab, std::vector<Token>& sorted) {
  const double log_total = memory.largest() + log_of(memory.weigh(1.0));
  const int64_t wanted = std::min(row.num_logprobs, vocab);
  if (wanted > 0) {
    memory.collect(memory.value_of_blocks(wanted), INFINITY, INT64_MAX, sorted);
    // A vocabulary of few blocks has fewer largest logits than are wanted.
    if (static_cast<int64_t>(sorted.size()) < wanted) memory.collect(-INFINITY, INFINITY, INT64_MAX, sorted);
    for (int64_t i = 0; i < wanted && i < static_cast<int64_t>(sorted.size()); ++i) {
      row.logprob_ids[1 + i] = sorted[i].id;
      row.logprobs[1 + i] = static_cast<float>(sorted[i].value - log_total);
    }
  }
  return log_total;
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
  memory.load(logits, vocab);
  double log_total = 0.0;
  if (row.num_logprobs >= 0) {
    memory.find_tops();
    log_total = report(memory, row, vocab, sorted);
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
    row.logprobs[0] = static_cast<float>(logits[chosen] - log_total);
  }
  return chosen;
}

}  // namespace
}  // namespace lookonce

#pragma GCC visibility push(default)
extern "C" {

// Samples one token for each row of `logits` [num_rows, vocab].
void lookonce_sample(const float* logits, int64_t num_rows, int64_t vocab, const lookonce::SampledRow* rows,
                     int64_t* chosen, int64_t num_threads) {
#pragma omp parallel num_threads(num_threads) if (num_rows > 1)
  {
    static thread_local lookonce::Row memory;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_rows; ++i) {
      chosen[i] = lookonce::sampled(memory, logits + i * vocab, rows[i], vocab);
    }
  }
}
}
#pragma GCC visibility pop
