// A mixture of experts: each token is computed by some of them, which are MLPs with or without gates, and their results
// are added.
//
// One parallel region covers the layer. Rows of all experts are multiplied in the same two phases, so that experts with
// few tokens keep all threads busy. Results of a token are added in the order of its experts, so they do not depend on
// the batch.

#include <cstdint>
#include <memory>
#include <vector>

#include "activation.h"
#include "linear.h"

namespace lookonce {

// The structures below have the same fields in native_structures.py.
struct Experts {
  const Linear* up;    // [num_experts] With gates: outputs in alternating groups of 16, gates, then what they gate.
  const Linear* down;  // [num_experts]
  int64_t num_experts;
  int64_t hidden_size;
  int64_t mlp_size;  // A multiple of 16.
  Activation activation;  // Of gates, or of all outputs of `up` where there are none.
  int64_t is_gated;
};

struct ExpertStep {
  const void* input;       // [num_tokens, hidden_size]
  const int64_t* experts;  // [num_tokens, num_chosen] Numbers of experts; others than those that exist are left out.
  const float* weights;    // [num_tokens, num_chosen]
  void* output;            // [num_tokens, hidden_size]
  int64_t num_tokens;
  int64_t num_chosen;
  int64_t num_threads;
};

namespace {

// The rows of one expert: neighbours in the order of experts.
struct ExpertRows {
  int64_t expert;
  int64_t first;
  int64_t count;
};

template <typename Type>
class ExpertRun {
 public:
  using Element = typename Type::Element;
  using Left = typename Type::Left;

  ExpertRun(const Experts& experts, const ExpertStep& step) : experts_(experts), step_(step) {
    sort_rows();
    const int64_t num_rows = static_cast<int64_t>(tokens_.size());
    gathered_.reset(new Left[num_rows * experts.hidden_size]);
    units_.reset(new Left[num_rows * experts.mlp_size]);
    results_.reset(new float[num_rows * experts.hidden_size]);
    if (experts.up[0].codes != nullptr || experts.down[0].codes != nullptr) {
      integers_.reserve(num_rows, std::max(experts.hidden_size, experts.mlp_size));
    }
  }

  void run() {
    Phases phases(kNumPhases);
#pragma omp parallel num_threads(step_.num_threads)
    {
      Worker worker(phases);
      gather(worker);
      multiply_all(worker, experts_.up, gathered_.get(),
                   [&](int64_t row, int64_t column, float* sums) { keep_units(row, column, sums); });
      multiply_all(worker, experts_.down, units_.get(), [&](int64_t row, int64_t column, float* sums) {
        const int64_t count = std::min(kTileColumns, experts_.hidden_size - column);
        std::copy(sums, sums + count, results_.get() + row * experts_.hidden_size + column);
      });
      add(worker);
    }
  }

 private:
  // Gathering, two products of up to two phases, and adding.
  static constexpr int64_t kNumPhases = 6;

  // Orders the pairs of a token and one of its experts by experts.
  void sort_rows() {
    const int64_t num_pairs = step_.num_tokens * step_.num_chosen;
    std::vector<int64_t> firsts(experts_.num_experts + 1, 0);
    for (int64_t pair = 0; pair < num_pairs; ++pair) {
      if (is_expert(step_.experts[pair])) ++firsts[step_.experts[pair] + 1];
    }
    for (int64_t e = 0; e < experts_.num_experts; ++e) {
      if (firsts[e + 1] > 0) active_.push_back({e, firsts[e], firsts[e + 1]});
      firsts[e + 1] += firsts[e];
    }
    tokens_.resize(firsts[experts_.num_experts]);
    rows_.assign(num_pairs, -1);
    for (int64_t pair = 0; pair < num_pairs; ++pair) {
      if (!is_expert(step_.experts[pair])) continue;
      rows_[pair] = firsts[step_.experts[pair]]++;
      tokens_[rows_[pair]] = pair / step_.num_chosen;
    }
  }

  bool is_expert(int64_t number) const { return number >= 0 && number < experts_.num_experts; }

  // Copies the inputs of all rows. A phase.
  void gather(Worker& worker) const {
    const int64_t num_rows = static_cast<int64_t>(tokens_.size()), size = experts_.hidden_size;
    worker.run(num_rows, Worker::grain_of(num_rows), [&](int64_t row) {
      const Element* from = static_cast<const Element*>(step_.input) + tokens_[row] * size;
      copy_to_left<Type>(gathered_.get() + row * size, from, size);
    });
  }

  // Multiplies the rows of each expert with its layer and calls finish(row, first column, sums [32]).
  template <typename Finish>
  void multiply_all(Worker& worker, const Linear* layers, const Left* input, Finish finish) {
    const Linear& any = layers[0];
    if (any.codes != nullptr) round_inputs<Type>(worker, any, input, tokens_.size(), integers_);
    const int64_t num_panels = (any.num_outputs + kTileColumns - 1) / kTileColumns;
    const int64_t num_items = static_cast<int64_t>(active_.size()) * num_panels;
    const int64_t side_by_side = std::max<int64_t>(1, num_items / (16 * omp_get_num_threads()));
    worker.run(num_items, side_by_side, [&](int64_t item) {
      const ExpertRows& rows = active_[item / num_panels];
      const Linear& layer = layers[rows.expert];
      const int64_t panel = item % num_panels, stop = rows.first + rows.count;
      alignas(64) float sums[kExpandedRows * kTileColumns];
      for (int64_t first = rows.first; first < stop; first += kExpandedRows) {
        const int64_t count = std::min(kExpandedRows, stop - first);
        if (layer.codes != nullptr) {
          quantized_sums<Type>(layer, panel, input, integers_, first, count, sums);
        } else {
          whole_sums(layer, panel, input + first * layer.num_inputs, count, sums);
        }
        for (int64_t row = 0; row < count; ++row) finish(first + row, panel * kTileColumns, sums + row * kTileColumns);
      }
    });
  }

  // Stores the units of a row that 32 outputs of its first product stand for.
  void keep_units(int64_t row, int64_t column, float* sums) const {
    Left* to = units_.get() + row * experts_.mlp_size;
    if (experts_.is_gated) {
      activate<Type::kIsRough>(experts_.activation, sums, kLanes);
      Type::store_left(to + column / 2, load_floats(sums) * load_floats(sums + kLanes));
      return;
    }
    const int64_t count = std::min(kTileColumns, experts_.mlp_size - column);
    activate<Type::kIsRough>(experts_.activation, sums, count);
    for (int64_t i = 0; i < count; i += kLanes) Type::store_left(to + column + i, load_floats(sums + i));
  }

  static void whole_sums(const Linear& layer, int64_t panel, const Left* input, int64_t num_rows, float* sums) {
    const int64_t num_words = layer.num_inputs / Type::kPerWord;
    const uint32_t* right = layer.panels + panel * num_words * kTileColumns;
    const Segment all{{right, right + kLanes}, num_words};
    Product<Type> product;
    for_row_tiles<Product<Type>::kRows>(num_rows, [&](int64_t row, int64_t rows, int64_t, int64_t num_tiles) {
      Operands<Type> of{input + row * layer.num_inputs, layer.num_inputs, &all, 1, kTileColumns};
      if (num_tiles == 1) {
        of.next_stride = kTileColumns;
        of.next[0] = right + kAheadWords;
        of.next[1] = right + kAheadWords + kLanes;
      }
      product.multiply(rows, kTileVectors, sums + row * kTileColumns, kTileColumns, of, false);
    });
  }

  // Adds the results of each token's experts. A phase.
  void add(Worker& worker) const {
    const int64_t size = experts_.hidden_size;
    worker.run(step_.num_tokens, Worker::grain_of(step_.num_tokens), [&](int64_t token) {
      Element* to = static_cast<Element*>(step_.output) + token * size;
      for (int64_t i = 0; i < size; i += kLanes) {
        Floats total(0.0f);
        for (int64_t pair = token * step_.num_chosen; pair < (token + 1) * step_.num_chosen; ++pair) {
          if (rows_[pair] >= 0) total += load_floats(results_.get() + rows_[pair] * size + i) * step_.weights[pair];
        }
        Type::store(to + i, total);
      }
    });
  }

  const Experts& experts_;
  const ExpertStep& step_;
  // The token of each row, and the row of each pair of a token and one of its experts; -1: none.
  std::vector<int64_t> tokens_, rows_;
  std::vector<ExpertRows> active_;
  // Inputs and units of the MLP by row, and results.
  std::unique_ptr<Left[]> gathered_, units_;
  std::unique_ptr<float[]> results_;
  IntegerInputs integers_;
};

}  // namespace
}  // namespace lookonce

#pragma GCC visibility push(default)
extern "C" {

// The hidden size is a multiple of 16. Function names end with the type of weights, inputs and outputs.
void lookonce_experts_float32(const lookonce::Experts* experts, const lookonce::ExpertStep* step) {
  lookonce::ExpertRun<lookonce::Float32>(*experts, *step).run();
}

void lookonce_experts_bfloat16(const lookonce::Experts* experts, const lookonce::ExpertStep* step) {
  lookonce::ExpertRun<lookonce::BFloat16>(*experts, *step).run();
}
}
#pragma GCC visibility pop
