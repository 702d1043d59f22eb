// All layers of a Llama-like language model in one call: RMS norm, attention with rotary positions, gated MLP.
//
// One parallel region covers all layers and, where there are no images, the embeddings and the output head as well, so
// threads are woken once per step. The Python interpreter's lock is released during the call. Hidden states stay in
// float32 between layers; inputs of products have the weights' type.

#include <chrono>
#include <memory>

#include "activation.h"
#include "attention.h"
#include "linear.h"

namespace lookonce {

// The structures below have the same fields in native_structures.py.
struct StackLayer {
  const float* input_norm;      // [hidden_size] Weights of the norm before attention.
  const float* attended_norm;   // [hidden_size] Weights of the norm before the MLP.
  const float* query_norm;      // [head_dim] Norm of each head's queries before rotation; null: none. Keys alike.
  const float* key_norm;
  Linear query_key_value;       // Outputs: query heads, then key heads, then value heads.
  Linear attended;
  Linear gate_up;               // Outputs in alternating groups of 16: gates, then the values that they gate.
  Linear down;
  Pools pools;
  LayerOptions options;
};

struct Stack {
  const StackLayer* layers;
  const float* last_norm;  // [hidden_size]
  Heads heads;
  int64_t hidden_size;
  int64_t mlp_size;  // A multiple of 16.
  float norm_epsilon;
};

// What an adapter adds to one linear layer of the stack: its inputs times `down`, times `up` (arXiv:2106.09685).
struct LowRank {
  const void* down;  // Elements of the model's type, [rank, inputs].
  const void* up;    // Of the same type, in panels of 32 outputs in the order of the layer's: [panels, rank, 32].
  int64_t rank;      // A multiple of 4. 0: nothing is added.
};

// The linear layers of a layer, in the order of StackLayer.
enum LinearIndex { kQueryKeyValueLinear, kAttendedLinear, kGateUpLinear, kDownLinear, kNumLinears };

struct LayerAdapter {
  LowRank linears[4];
};
static_assert(kNumLinears == 4, "one for each linear layer");

// The adapters of a step's tokens.
struct StepAdapters {
  const LayerAdapter* layers;  // [adapters, layers]
  const int32_t* slots;        // [num_tokens] The adapter of each token; -1: none.
  int64_t num_layers;
  int64_t max_rank;
};

// A table of token embeddings: `rows`, or the panels of a head that is tied to it.
struct Embeddings {
  const void* rows;  // [num_embeddings, hidden_size], in the weights' type; null: they are in `tied`.
  const Linear* tied;
  int64_t num_embeddings;
};

struct StackStep {
  float* hidden;  // [num_tokens, hidden_size], changed in place; null: the embeddings of `token_ids`.
  const int64_t* token_ids;  // [num_tokens] Ids without an embedding get the last one.
  const Embeddings* embeddings;
  const float* cosines;  // [num_tokens, rotary_dim], or of all positions up to some number.
  const float* sines;
  const int64_t* angle_rows;  // [num_tokens] Each token's row in both; null: they are in the tokens' order.
  void* output;  // [num_tokens, hidden_size] Result of the last norm, in the weights' type; null: not wanted.
  const Linear* head;  // The output head; null: no logits.
  float* logits;       // [num_sampled, vocabulary]
  const int64_t* sampled;  // [num_sampled] Indexes of the tokens whose logits are computed; null: all tokens.
  int64_t num_sampled;
  int64_t rotary_dim;
  int64_t first_layer;
  int64_t stop_layer;
  int64_t* phase_ns;  // [kNumPhases] Nanoseconds of this call are added; null: no profiling.
  const StepAdapters* adapters;  // Null: no token has one.
};

namespace {

// PHASES in native_structures.py has the same order.
enum Phase { kEmbeddings, kNorms, kQueryKeyValue, kRotation, kAttention, kAttended, kGateUp, kDown, kHead, kNumPhases };

// The clock of one thread. It is read when all items of a phase are done, so a phase includes waiting for the slowest
// thread.
class PhaseClock {
 public:
  explicit PhaseClock(int64_t* phase_ns) : phase_ns_(phase_ns) {
    if (phase_ns_ != nullptr) last_ = Clock::now();
  }

  void ends(Phase phase) {
    if (phase_ns_ == nullptr) return;
    const Clock::time_point now = Clock::now();
    phase_ns_[phase] += std::chrono::duration_cast<std::chrono::nanoseconds>(now - last_).count();
    last_ = now;
  }

 private:
  using Clock = std::chrono::steady_clock;

  int64_t* phase_ns_;
  Clock::time_point last_;
};

inline float squares(const float* values, int64_t count) {
  Floats total{};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) total += load_floats(values + i) * load_floats(values + i);
  float sum = sum_of_lanes(total);
  for (; i < count; ++i) sum += values[i] * values[i];
  return sum;
}

template <typename Type>
class StackRun {
 public:
  using Element = typename Type::Element;
  using Left = typename Type::Left;

  StackRun(const Stack& stack, const Step& step, const StackStep& io)
      : stack_(stack), step_(step), io_(io), is_last_(last_tokens(step)) {
    const Heads& heads = stack.heads;
    const int64_t tokens = step.num_tokens, query_size = heads.num_heads * heads.head_dim;
    int64_t num_partials = 0;
    for (int64_t l = io.first_layer; l < io.stop_layer; ++l) {
      const AttentionPlan& plan = plan_of(stack.layers[l].options);
      num_partials = std::max(num_partials, TypeAttention::partial_floats(plan, heads));
    }
    normed_.reset(new Left[tokens * stack.hidden_size]);
    projected_.reset(new float[tokens * (query_size + 2 * heads.num_kv_heads * heads.head_dim)]);
    queries_.reset(new Left[tokens * query_size]);
    attended_.reset(new Left[tokens * query_size]);
    gated_.reset(new Left[tokens * stack.mlp_size]);
    partials_.reset(new float[num_partials]);
    integers_.reserve(tokens, std::max({stack.hidden_size, query_size, stack.mlp_size}));
    if (io.adapters != nullptr) lowered_.reset(new float[tokens * io.adapters->max_rank]);
    if (io.hidden == nullptr) looked_up_.reset(new float[tokens * stack.hidden_size]);
    hidden_ = io.hidden == nullptr ? looked_up_.get() : io.hidden;
  }

  void run() {
    const int64_t per_layer = kPhasesPerLayer + (io_.adapters == nullptr ? int64_t{0} : int64_t{kNumLinears});
    Phases phases((io_.stop_layer - io_.first_layer) * per_layer + kPhasesAround);
#pragma omp parallel num_threads(step_.num_threads)
    {
      Worker worker(phases);
      PhaseClock clock(omp_get_thread_num() == 0 ? io_.phase_ns : nullptr);
      if (io_.hidden == nullptr) {
        look_up(worker);
        clock.ends(kEmbeddings);
      }
      for (int64_t l = io_.first_layer; l < io_.stop_layer; ++l) layer(l, worker, clock);
      if (io_.output != nullptr) {
        normalise<Type>(worker, stack_.last_norm, static_cast<Element*>(io_.output));
        clock.ends(kNorms);
      }
      if (io_.head != nullptr && io_.num_sampled > 0) head(worker, clock);
    }
  }

 private:
  using TypeAttention = Attention<Type, LeftOf<Type>>;

  const AttentionPlan& plan_of(const LayerOptions& options) {
    for (const AttentionPlan& plan : plans_) {
      if (plan.fits(options)) return plan;
    }
    return plans_.emplace_back(step_, stack_.heads, options);
  }

  const AttentionPlan& known_plan(const LayerOptions& options) const {
    size_t i = 0;
    while (!plans_[i].fits(options)) ++i;
    return plans_[i];
  }

  // Rows of `down` that one item multiplies with a token, so that a step of one token keeps all threads busy.
  static constexpr int64_t kRanksPerItem = 8;
  // Rows of them whose sums run side by side.
  static constexpr int64_t kRanksAtOnce = 4;
  // Four linear layers of up to two phases, two norms, rotation and attention.
  static constexpr int64_t kPhasesPerLayer = 7 + kNumLinears + TypeAttention::kNumPhases;
  // Embeddings, one norm for the output and one for the head, and its linear layer.
  static constexpr int64_t kPhasesAround = 5;

  // Called by all threads, like all functions below.
  void look_up(Worker& worker) const {
    const Embeddings& table = *io_.embeddings;
    const int64_t size = stack_.hidden_size, words = size / Type::kPerWord;
    worker.run(step_.num_tokens, Worker::grain_of(step_.num_tokens), [&](int64_t token) {
      const auto last = static_cast<uint64_t>(table.num_embeddings - 1);
      const auto id = static_cast<int64_t>(std::min(static_cast<uint64_t>(io_.token_ids[token]), last));
      float* to = hidden_ + token * size;
      if (table.rows != nullptr) {
        const Element* from = static_cast<const Element*>(table.rows) + id * size;
        for (int64_t i = 0; i < size; i += kLanes) store_floats(to + i, Type::load(from + i));
        return;
      }
      const uint32_t* from = table.tied->panels + id / kTileColumns * words * kTileColumns + id % kTileColumns;
      alignas(64) uint32_t gathered[kLanes];
      constexpr int64_t kWords = kLanes / Type::kPerWord;
      for (int64_t w = 0; w < words; w += kWords) {
        for (int64_t i = 0; i < kWords; ++i) gathered[i] = from[(w + i) * kTileColumns];
        store_floats(to + w * Type::kPerWord, Type::load(reinterpret_cast<const Element*>(gathered)));
      }
    });
  }

  void head(Worker& worker, PhaseClock& clock) const {
    const int64_t size = stack_.hidden_size, vocabulary = io_.head->num_outputs;
    worker.run(io_.num_sampled, Worker::grain_of(io_.num_sampled), [&](int64_t row) {
      const int64_t token = io_.sampled == nullptr ? row : io_.sampled[row];
      normalise_token<LeftOf<Type>>(token, stack_.last_norm, normed_.get() + row * size);
      round_input_row<Type>(*io_.head, normed_.get(), row, integers_);
    });
    clock.ends(kNorms);
    linear<Type>(worker, *io_.head, normed_.get(), io_.num_sampled, integers_, true,
                 [&](int64_t row, int64_t column, const float* sums) {
      const int64_t count = std::min(kTileColumns, vocabulary - column);
      std::copy(sums, sums + count, io_.logits + row * vocabulary + column);
    });
    clock.ends(kHead);
  }

  void layer(int64_t index, Worker& worker, PhaseClock& clock) const {
    const StackLayer& layer = stack_.layers[index];
    const int64_t size = stack_.hidden_size, tokens = step_.num_tokens;
    float* hidden = hidden_;
    const auto add_to_hidden = [&](LinearIndex linear) {
      return [this, index, linear, hidden, size](int64_t row, int64_t column, float* sums) {
        add_low_rank(index, linear, row, column, sums);
        float* to = hidden + row * size + column;
        const int64_t count = std::min(kTileColumns, size - column);
        for (int64_t c = 0; c < count; ++c) to[c] += sums[c];
      };
    };
    normalise_inputs(worker, layer.input_norm, layer.query_key_value);
    clock.ends(kNorms);
    const int64_t projected_size = layer.query_key_value.num_outputs;
    lower(worker, index, kQueryKeyValueLinear, layer.query_key_value, normed_.get());
    linear<Type>(worker, layer.query_key_value, normed_.get(), tokens, integers_, true,
                 [&](int64_t row, int64_t column, float* sums) {
      add_low_rank(index, kQueryKeyValueLinear, row, column, sums);
      const int64_t count = std::min(kTileColumns, projected_size - column);
      std::copy(sums, sums + count, projected_.get() + row * projected_size + column);
    });
    clock.ends(kQueryKeyValue);
    rotate_and_write(worker, layer);
    clock.ends(kRotation);
    const AttentionPlan& plan = known_plan(layer.options);
    TypeAttention(step_, stack_.heads, plan, layer.pools, layer.options, queries_.get(), attended_.get(),
                    partials_.get())
        .run(worker);
    clock.ends(kAttention);
    lower(worker, index, kAttendedLinear, layer.attended, attended_.get());
    linear<Type>(worker, layer.attended, attended_.get(), tokens, integers_, false, add_to_hidden(kAttendedLinear));
    clock.ends(kAttended);
    normalise_inputs(worker, layer.attended_norm, layer.gate_up);
    clock.ends(kNorms);
    lower(worker, index, kGateUpLinear, layer.gate_up, normed_.get());
    linear<Type>(worker, layer.gate_up, normed_.get(), tokens, integers_, true,
                 [&](int64_t row, int64_t column, float* sums) {
      add_low_rank(index, kGateUpLinear, row, column, sums);
      const Floats gate = load_floats(sums), gated = gated_by_sigmoid<Type::kIsRough>(gate, gate);
      Type::store_left(gated_.get() + row * stack_.mlp_size + column / 2, gated * load_floats(sums + kLanes));
    });
    clock.ends(kGateUp);
    lower(worker, index, kDownLinear, layer.down, gated_.get());
    linear<Type>(worker, layer.down, gated_.get(), tokens, integers_, false, add_to_hidden(kDownLinear));
    clock.ends(kDown);
  }

  // Returns what the token's adapter adds to a linear layer; null: nothing.
  const LowRank* low_rank_of(int64_t layer, LinearIndex linear, int64_t token) const {
    const StepAdapters& adapters = *io_.adapters;
    if (adapters.slots[token] < 0) return nullptr;
    const LowRank& found = adapters.layers[adapters.slots[token] * adapters.num_layers + layer].linears[linear];
    return found.rank == 0 ? nullptr : &found;
  }

  // Multiplies the inputs of a linear layer with the `down` of each token's adapter. A phase, if any token has one.
  void lower(Worker& worker, int64_t layer, LinearIndex linear, const Linear& of, const Left* inputs) const {
    if (io_.adapters == nullptr) return;
    const int64_t num_groups = (io_.adapters->max_rank + kRanksPerItem - 1) / kRanksPerItem;
    const int64_t num_items = step_.num_tokens * num_groups;
    worker.run(num_items, Worker::grain_of(num_items), [&](int64_t item) {
      const int64_t token = item / num_groups, first = item % num_groups * kRanksPerItem;
      const LowRank* low = low_rank_of(layer, linear, token);
      if (low == nullptr) return;
      const Left* input = inputs + token * of.num_inputs;
      float* to = lowered_.get() + token * io_.adapters->max_rank;
      const int64_t stop = std::min(low->rank, first + kRanksPerItem);
      const int64_t size = of.num_inputs;
      for (int64_t r = first; r < stop; r += kRanksAtOnce) {
        const Element* down = static_cast<const Element*>(low->down) + r * size;
        Floats totals[kRanksAtOnce] = {};
        for (int64_t i = 0; i < size; i += kLanes) {
          const Floats values = Type::load_left(input + i);
          for (int64_t k = 0; k < kRanksAtOnce; ++k) totals[k] += values * Type::load(down + k * size + i);
        }
        for (int64_t k = 0; k < kRanksAtOnce; ++k) to[r + k] = sum_of_lanes(totals[k]);
      }
    });
  }

  // Adds the other half of the product to 32 sums of a linear layer.
  void add_low_rank(int64_t layer, LinearIndex linear, int64_t token, int64_t column, float* sums) const {
    if (io_.adapters == nullptr) return;
    const LowRank* low = low_rank_of(layer, linear, token);
    if (low == nullptr) return;
    const float* lowered = lowered_.get() + token * io_.adapters->max_rank;
    const Element* up = static_cast<const Element*>(low->up) + column * low->rank;
    // Two sums for each output, so that an addition need not wait for the one before it.
    Floats even[] = {load_floats(sums), load_floats(sums + kLanes)}, odd[2] = {};
    for (int64_t r = 0; r < low->rank; r += 2, up += 2 * kTileColumns) {
      for (int64_t v = 0; v < 2; ++v) {
        even[v] += Type::load(up + v * kLanes) * lowered[r];
        odd[v] += Type::load(up + kTileColumns + v * kLanes) * lowered[r + 1];
      }
    }
    for (int64_t v = 0; v < 2; ++v) store_floats(sums + v * kLanes, even[v] + odd[v]);
  }

  // Normalises the hidden states for a linear layer, and rounds them if it multiplies integers.
  void normalise_inputs(Worker& worker, const float* weights, const Linear& next) const {
    worker.run(step_.num_tokens, Worker::grain_of(step_.num_tokens), [&](int64_t token) {
      normalise_token<LeftOf<Type>>(token, weights, normed_.get() + token * stack_.hidden_size);
      round_input_row<Type>(next, normed_.get(), token, integers_);
    });
  }

  template <typename Out>
  void normalise(Worker& worker, const float* weights, typename Out::Element* to) const {
    worker.run(step_.num_tokens, Worker::grain_of(step_.num_tokens), [&](int64_t token) {
      normalise_token<Out>(token, weights, to + token * stack_.hidden_size);
    });
  }

  template <typename Out>
  void normalise_token(int64_t token, const float* weights, typename Out::Element* to) const {
    const int64_t size = stack_.hidden_size;
    const float* from = hidden_ + token * size;
    const float factor = 1.0f / std::sqrt(squares(from, size) / size + stack_.norm_epsilon);
    for (int64_t i = 0; i < size; i += kLanes) {
      Out::store(to + i, load_floats(from + i) * factor * load_floats(weights + i));
    }
  }

  // Rotates and stores queries in their buffer, and keys and values in the pools.
  void rotate_and_write(Worker& worker, const StackLayer& layer) const {
    const Heads& heads = stack_.heads;
    const int64_t dim = heads.head_dim, width = layer.query_key_value.num_outputs;
    const int64_t* slots = step_.groups[layer.options.group].slots;
    worker.run(step_.num_tokens, Worker::grain_of(step_.num_tokens), [&](int64_t token) {
      const float* from = projected_.get() + token * width;
      for (int64_t head = 0; head < heads.num_heads; ++head, from += dim) {
        rotate<LeftOf<Type>>(from, layer.query_norm, token, queries_.get() + (token * heads.num_heads + head) * dim);
      }
      const float* values = from + heads.num_kv_heads * dim;
      alignas(64) Element key[kMaxHeadDim], value[kMaxHeadDim];
      for (int64_t head = 0; head < heads.num_kv_heads; ++head, from += dim, values += dim) {
        rotate<Type>(from, layer.key_norm, token, key);
        for (int64_t d = 0; d < dim; d += kLanes) Type::store(value + d, load_floats(values + d));
        write_token<Type>(heads, layer.pools, slots[token], head, key, value, is_last_[token]);
      }
    });
  }

  // Rotates the first `rotary_dim` elements of a head as two halves (arXiv:2104.09864, in the order of Llama).
  template <typename Out>
  void rotate(const float* head, const float* norm, int64_t token, typename Out::Element* to) const {
    const int64_t dim = stack_.heads.head_dim, half = io_.rotary_dim / 2;
    const int64_t row = io_.angle_rows == nullptr ? token : io_.angle_rows[token];
    const float* cosines = io_.cosines + row * io_.rotary_dim;
    const float* sines = io_.sines + row * io_.rotary_dim;
    alignas(64) float own[kMaxHeadDim], rotated[kMaxHeadDim];
    const float factor = norm == nullptr ? 1.0f : 1.0f / std::sqrt(squares(head, dim) / dim + stack_.norm_epsilon);
    for (int64_t d = 0; d < dim; ++d) rotated[d] = own[d] = norm == nullptr ? head[d] : head[d] * factor * norm[d];
    for (int64_t d = 0; d < half; ++d) {
      rotated[d] = own[d] * cosines[d] - own[d + half] * sines[d];
      rotated[d + half] = own[d + half] * cosines[d + half] + own[d] * sines[d + half];
    }
    for (int64_t d = 0; d < dim; d += kLanes) Out::store(to + d, load_floats(rotated + d));
  }

  const Stack& stack_;
  const Step& step_;
  const StackStep& io_;
  const std::vector<char> is_last_;
  std::vector<AttentionPlan> plans_;
  // Hidden states, [num_tokens, hidden_size]: those of the step, or `looked_up_`.
  float* hidden_;
  // Buffers for all tokens, uninitialised.
  std::unique_ptr<float[]> looked_up_;
  std::unique_ptr<Left[]> normed_, queries_, attended_, gated_;
  std::unique_ptr<float[]> projected_, partials_;
  // Inputs of quantized layers.
  mutable IntegerInputs integers_;
  // Products with the adapters' `down`, [num_tokens, max_rank].
  std::unique_ptr<float[]> lowered_;
};

}  // namespace
}  // namespace lookonce

#pragma GCC visibility push(default)
extern "C" {

void lookonce_stack_float32(const lookonce::Stack* stack, const lookonce::Step* step, const lookonce::StackStep* io) {
  lookonce::StackRun<lookonce::Float32>(*stack, *step, *io).run();
}

void lookonce_stack_bfloat16(const lookonce::Stack* stack, const lookonce::Step* step, const lookonce::StackStep* io) {
  lookonce::StackRun<lookonce::BFloat16>(*stack, *step, *io).run();
}
}
#pragma GCC visibility pop
