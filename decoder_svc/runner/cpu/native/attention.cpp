// Attention as a single call, for models whose other layers run in PyTorch.

#include "attention.h"

namespace lookonce {
namespace {

template <typename Type>
void write(Worker& worker, const Step& step, const Heads& heads, const Pools& pools, const int64_t* slots,
           const char* is_last, const typename Type::Element* keys, const typename Type::Element* values) {
  worker.run(step.num_tokens, Worker::grain_of(step.num_tokens), [&](int64_t token) {
    for (int64_t head = 0; head < heads.num_kv_heads; ++head) {
      const int64_t at = (token * heads.num_kv_heads + head) * heads.head_dim;
      write_token<Type>(heads, pools, slots[token], head, keys + at, values + at, is_last[token]);
    }
  });
}

template <typename Type>
void attend(const Step& step, const Heads& heads, const Pools& pools, const LayerOptions& options, const void* queries,
            const void* keys, const void* values, void* output) {
  using Element = typename Type::Element;
  const AttentionPlan plan(step, heads, options);
  static thread_local std::vector<float> partials;
  partials.resize(Attention<Type, Type>::partial_floats(plan, heads));
  const Attention<Type, Type> attention(step, heads, plan, pools, options, static_cast<const Element*>(queries),
                                  static_cast<Element*>(output), partials.data());
  const std::vector<char> is_last = last_tokens(step);
  Phases phases(1 + Attention<Type, Type>::kNumPhases);
  // For a short sequence, waking other threads would take longer than the work.
#pragma omp parallel num_threads(step.num_threads) if (plan.items.size() > static_cast<size_t>(heads.num_kv_heads))
  {
    Worker worker(phases);
    if (keys != nullptr) {
      write<Type>(worker, step, heads, pools, step.groups[options.group].slots, is_last.data(),
                  static_cast<const Element*>(keys), static_cast<const Element*>(values));
    }
    attention.run(worker);
  }
}

}  // namespace
}  // namespace lookonce

#pragma GCC visibility push(default)
extern "C" {

// Writes `keys` and `values` [num_tokens, num_kv_heads, head_dim] to their slots, then attends. Both may be null: another
// layer has written them. `queries` are [num_tokens, num_heads, head_dim]. `output` has the same shape, or the size of
// values instead of head_dim where values are parts of keys.
void lookonce_attend_float32(const lookonce::Step* step, const lookonce::Heads* heads, const lookonce::Pools* pools,
                             const lookonce::LayerOptions* options, const void* queries, const void* keys,
                             const void* values, void* output) {
  lookonce::attend<lookonce::Float32>(*step, *heads, *pools, *options, queries, keys, values, output);
}

void lookonce_attend_bfloat16(const lookonce::Step* step, const lookonce::Heads* heads, const lookonce::Pools* pools,
                              const lookonce::LayerOptions* options, const void* queries, const void* keys,
                              const void* values, void* output) {
  lookonce::attend<lookonce::BFloat16>(*step, *heads, *pools, *options, queries, keys, values, output);
}
}
#pragma GCC visibility pop
