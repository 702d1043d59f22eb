// Attention of a step's new tokens over keys and values in the blocks of a pool, read in place.
//
// Each key and value is read once for all query heads that share it, and for several tokens of a prompt at once. Softmax
// is computed online (arXiv:1805.02867) over pieces of 256 keys. The results of pieces are always combined in the same
// order, by one thread or several. A token's numbers therefore depend neither on the batch, nor on how a prompt is cut
// into chunks, nor on the number of threads. Scores, sums and softmax are float32; weights have the elements' type.

#pragma once

#include <algorithm>
#include <vector>

#include "aligned.h"
#include "latent_values.h"
#include "phases.h"
#include "pools.h"
#include "product.h"
#include "tile.h"

namespace lookonce {

constexpr int64_t kPieceKeys = 256;
// Keys whose scores are computed before their values are read.
constexpr int64_t kTileKeys = 64;
constexpr int64_t kTileGroups = kTileKeys / kLanes;
// Largest number of rows (tokens × the query heads that share a key head) that pass over the keys together.
#if defined(__AMX_BF16__)
constexpr int64_t kMaxRows = 32;
#else
constexpr int64_t kMaxRows = 36;
#endif
// The same where values are parts of keys: they are copied out of the keys once for all of these rows.
constexpr int64_t kMaxLatentRows = 128;

// One work item: a part of a sequence's attention for one key head.
struct AttentionItem {
  int64_t sequence;
  int64_t head;
  int64_t first_token;  // Index in the step.
  int64_t num_tokens;
  int64_t first_key;
  int64_t stop_key;
  int64_t partial;  // Index of the partial result; -1: the item covers all keys.
};

// Partial results of several items that are combined into one.
struct AttentionSum {
  int64_t first_token;
  int64_t head;
  int64_t first_partial;
  int64_t num_partials;
};

// The keys [first, stop) that a token of the step sees.
struct Sight {
  int64_t first;
  int64_t stop;
};

inline Sight sight(const Step& step, const LayerOptions& options, int64_t sequence, int64_t token) {
  const int64_t position = step.num_keys[sequence] - (step.first_tokens[sequence + 1] - token);
  int64_t first = 0;
  if (options.is_chunked) {
    first = position / options.window * options.window;
  } else if (options.window > 0) {
    first = std::max<int64_t>(0, position - options.window + 1);
  }
  Sight seen{first, position + 1};
  const bool has_span = step.span_starts != nullptr && step.span_starts[token] < step.span_stops[token];
  if (has_span && !options.is_causal) {
    seen.stop = std::max(seen.stop, step.span_stops[token]);
    if (step.is_mutual_beyond_window) seen.first = std::min(seen.first, step.span_starts[token]);
  }
  return seen;
}

// The division of a step's attention into items. Layers with the same group, window and sight share a plan.
struct AttentionPlan {
  int64_t group;
  int64_t window;
  int64_t is_causal;
  int64_t is_chunked;
  std::vector<AttentionItem> items;
  std::vector<AttentionSum> sums;
  int64_t num_partials = 0;

  AttentionPlan(const Step& step, const Heads& heads, const LayerOptions& options)
      : group(options.group), window(options.window), is_causal(options.is_causal), is_chunked(options.is_chunked) {
    const int64_t rows_per_token = heads.num_heads / heads.num_kv_heads;
    const int64_t most_rows = heads.value_dim > 0 ? kMaxLatentRows : kMaxRows;
    const int64_t tokens_each = std::max<int64_t>(1, most_rows / rows_per_token);
    // With fewer items, threads would wait for the longest sequence: divide its keys.
    const bool is_short = step.num_sequences * heads.num_kv_heads < 8 * step.num_threads;
    for (int64_t s = 0; s < step.num_sequences; ++s) {
      const int64_t begin = step.first_tokens[s], end = step.first_tokens[s + 1];
      // Start with the last tokens, which see most keys, so that the last items are small.
      for (int64_t stop = end; stop > begin; stop -= std::min(tokens_each, stop - begin)) {
        const int64_t first = std::max(begin, stop - tokens_each);
        Sight all = sight(step, options, s, first);
        for (int64_t token = first + 1; token < stop; ++token) {
          const Sight one = sight(step, options, s, token);
          all = {std::min(all.first, one.first), std::max(all.stop, one.stop)};
        }
        for (int64_t head = 0; head < heads.num_kv_heads; ++head) {
          add(s, head, first, stop - first, all, is_short && end - begin == 1);
        }
      }
    }
  }

  bool fits(const LayerOptions& options) const {
    return group == options.group && window == options.window && is_causal == options.is_causal &&
           is_chunked == options.is_chunked;
  }

 private:
  void add(int64_t sequence, int64_t head, int64_t first_token, int64_t num_tokens, Sight keys, bool is_divided) {
    if (!is_divided || keys.first / kPieceKeys == (keys.stop - 1) / kPieceKeys) {
      items.push_back({sequence, head, first_token, num_tokens, keys.first, keys.stop, -1});
      return;
    }
    AttentionSum sum{first_token, head, num_partials, 0};
    for (int64_t key = keys.first; key < keys.stop; ++sum.num_partials) {
      const int64_t stop = std::min(keys.stop, (key / kPieceKeys + 1) * kPieceKeys);
      items.push_back({sequence, head, first_token, num_tokens, key, stop, num_partials++});
      key = stop;
    }
    sums.push_back(sum);
  }
};

// Weighted sums of values of some rows, not yet divided by the sums of weights.
struct Sums {
  float* values;   // [rows, size of values]
  float* largest;  // [rows] Largest score, as an exponent of 2.
  float* weights;  // [rows] Sums of weights.
};

// Adds the result of a later piece to one row of the total.
inline void fold(const Sums& total, const Sums& piece, int64_t row, int64_t dim, bool is_first) {
  float* to = total.values + row * dim;
  const float* from = piece.values + row * dim;
  if (is_first) {
    std::copy(from, from + dim, to);
    total.largest[row] = piece.largest[row];
    total.weights[row] = piece.weights[row];
    return;
  }
  const float top = std::max(total.largest[row], piece.largest[row]);
  // A row without any visible key has the factor 0.
  const float kept = total.largest[row] == -INFINITY ? 0.0f : exp2_of_negative(total.largest[row] - top);
  const float added = piece.largest[row] == -INFINITY ? 0.0f : exp2_of_negative(piece.largest[row] - top);
  for (int64_t d = 0; d < dim; d += kLanes) {
    store_floats(to + d, load_floats(to + d) * kept + load_floats(from + d) * added);
  }
  total.weights[row] = total.weights[row] * kept + piece.weights[row] * added;
  total.largest[row] = top;
}

// `Rows` is the type of queries and output: `Type`, or `LeftOf<Type>`.
template <typename Type, typename Rows>
class Attention {
 public:
  using Element = typename Rows::Element;
  using Left = typename Type::Left;

  // `queries` are [num_tokens, num_heads, head_dim], `output` [num_tokens, num_heads, size of values].
  Attention(const Step& step, const Heads& heads, const AttentionPlan& plan, const Pools& pools,
            const LayerOptions& options, const Element* queries, Element* output, float* partials)
      : step_(step), heads_(heads), plan_(plan), pools_(pools), options_(options), queries_(queries), output_(output),
        partials_(partials), group_(step.groups[options.group]), dim_(heads.head_dim), num_values_(size_of_value(heads)),
        rows_per_token_(heads.num_heads / heads.num_kv_heads), scale_(options.scale * kLog2OfE) {}

  // Returns the number of floats that a plan's partial results take.
  static int64_t partial_floats(const AttentionPlan& plan, const Heads& heads) {
    return plan.num_partials * heads.num_heads / heads.num_kv_heads * (size_of_value(heads) + 2);
  }

  // Phases of `run`.
  static constexpr int64_t kNumPhases = 2;

  // Call from all threads of a parallel region.
  void run(Worker& worker) const {
    worker.run(plan_.items.size(), 1, [&](int64_t i) { attend(plan_.items[i]); });
    worker.run(plan_.sums.size(), Worker::grain_of(plan_.sums.size()), [&](int64_t i) { put_together(plan_.sums[i]); });
  }

 private:
  // Buffers of one thread; they grow to the largest item.
  struct Workspace {
    AlignedVector<Left> queries;     // [rows, head_dim]
    AlignedVector<float> scores;     // [rows, kTileKeys]
    AlignedVector<Left> weights;     // [rows, kTileKeys]
    AlignedVector<float> total;      // Memory of Sums: of all pieces so far, and of the current piece.
    AlignedVector<float> piece;
    std::vector<Sight> sights;  // [tokens]
    // Of the current tile, if keys and values are rounded: scales by column.
    float key_scales[kTileKeys] = {};
    float value_scales[kTileKeys] = {};
    // Of the current tile: expanded keys and values, or values that are parts of keys.
    AlignedVector<typename Type::Element> expanded;
  };

  Sums sums_in(float* memory, int64_t num_rows) const {
    return {memory, memory + num_rows * num_values_, memory + num_rows * (num_values_ + 1)};
  }

  Sums partial(int64_t index) const {
    return sums_in(partials_ + index * rows_per_token_ * (num_values_ + 2), rows_per_token_);
  }

  Element* output_row(int64_t token, int64_t head, int64_t of_token) const {
    return output_ + (token * heads_.num_heads + head * rows_per_token_ + of_token) * num_values_;
  }

  void attend(const AttentionItem& item) const {
    static thread_local Workspace space;
    const int64_t num_rows = item.num_tokens * rows_per_token_;
    space.queries.resize(num_rows * dim_);
    space.scores.resize(num_rows * kTileKeys);
    space.weights.resize(num_rows * kTileKeys);
    space.total.resize(num_rows * (num_values_ + 2));
    space.piece.resize(num_rows * (num_values_ + 2));
    space.sights.resize(item.num_tokens);
    for (int64_t t = 0; t < item.num_tokens; ++t) {
      const int64_t token = item.first_token + t;
      space.sights[t] = sight(step_, options_, item.sequence, token);
      const Element* from = queries_ + (token * heads_.num_heads + item.head * rows_per_token_) * dim_;
      Left* to = space.queries.data() + t * rows_per_token_ * dim_;
      for (int64_t d = 0; d < rows_per_token_ * dim_; d += kLanes) Type::store_left(to + d, Rows::load(from + d));
    }
    const bool is_whole = item.partial < 0;
    const Sums total = is_whole ? sums_in(space.total.data(), num_rows) : partial(item.partial);
    const Sums piece = sums_in(space.piece.data(), num_rows);
    for (int64_t key = item.first_key; key < item.stop_key;) {
      const int64_t stop = std::min(item.stop_key, (key / kPieceKeys + 1) * kPieceKeys);
      attend_piece(item, num_rows, key, stop, space, piece);
      for (int64_t row = 0; row < num_rows; ++row) fold(total, piece, row, num_values_, key == item.first_key);
      key = stop;
    }
    if (!is_whole) return;
    for (int64_t row = 0; row < num_rows; ++row) {
      finish(total, row, output_row(item.first_token + row / rows_per_token_, item.head, row % rows_per_token_));
    }
  }

  void put_together(const AttentionSum& sum) const {
    const Sums total = partial(sum.first_partial);
    for (int64_t row = 0; row < rows_per_token_; ++row) {
      for (int64_t p = 1; p < sum.num_partials; ++p) fold(total, partial(sum.first_partial + p), row, num_values_, false);
      finish(total, row, output_row(sum.first_token, sum.head, row));
    }
  }

  void finish(const Sums& total, int64_t row, Element* to) const {
    const float weight = total.weights[row];
    const float* values = total.values + row * num_values_;
    for (int64_t d = 0; d < num_values_; d += kLanes) Rows::store(to + d, load_floats(values + d) / weight);
  }

  // Attends over the keys [first_key, stop_key) of one piece. Tiles start at multiples of their size even if the keys do
  // not.
  void attend_piece(const AttentionItem& item, int64_t num_rows, int64_t first_key, int64_t stop_key, Workspace& space,
                    const Sums& piece) const {
    Product<Type> product;
    std::fill(piece.values, piece.values + num_rows * num_values_, 0.0f);
    std::fill(piece.largest, piece.largest + num_rows, -INFINITY);
    std::fill(piece.weights, piece.weights + num_rows, 0.0f);
    for (int64_t tile = first_key / kTileKeys * kTileKeys; tile < stop_key; tile += kTileKeys) {
      KeyTile keys(*this, item, tile, std::max(first_key, tile), std::min(stop_key, tile + kTileKeys));
      KeyTile next = following(item, tile);
      if (heads_.is_rounded) {
        expand(keys, next, space);
        next.num_groups = 0;
      }
      if (heads_.value_dim > 0) take_values_from_keys(keys, space);
      score(keys, next, num_rows, space, product);
      for (int64_t row = 0; row < num_rows; ++row) {
        weigh(space.sights[row / rows_per_token_], tile, row, space, piece);
      }
      add_values(keys, next, num_rows, space, piece, product);
    }
  }

  struct KeyTile;

  // Returns the tile that this thread probably reads next, for prefetching: of this item, else of the item that it gets
  // next if all items take equally long.
  KeyTile following(const AttentionItem& item, int64_t tile) const {
    const AttentionItem* next = &item;
    int64_t first = tile + kTileKeys;
    if (first >= item.stop_key) {
      const int64_t index = next - plan_.items.data() + omp_get_num_threads();
      if (index >= static_cast<int64_t>(plan_.items.size())) return KeyTile(*this);
      next = &plan_.items[index];
      first = next->first_key;
    }
    return KeyTile(*this, *next, first / kTileKeys * kTileKeys, first,
                   std::min(next->stop_key, (first / kTileKeys + 1) * kTileKeys));
  }

  // 64 consecutive keys, in groups of at most 16 that are in one block.
  struct KeyTile {
    // An empty tile.
    explicit KeyTile(const Attention& of) : group_words(of.dim_ * kLanes / Type::kPerWord) {}

    KeyTile(const Attention& of, const AttentionItem& item, int64_t tile, int64_t first, int64_t stop)
        : group_words(of.dim_ * kLanes / Type::kPerWord) {
      const int64_t block_size = of.heads_.block_size;
      // Start at a whole word; the neighbour in it is read but masked.
      int64_t key = first / Type::kPerWord * Type::kPerWord;
      const int64_t slot = key - of.group_.first_keys[item.sequence];
      const int64_t* block = of.group_.blocks + of.group_.first_blocks[item.sequence] + slot / block_size;
      for (int64_t in_block = slot % block_size; key < stop; ++block, in_block = 0) {
        while (in_block < block_size && key < stop) {
          const int64_t count = std::min({kLanes - in_block % kLanes, block_size - in_block, stop - key});
          point(of, *block, in_block, item.head);
          lane[num_groups] = in_block % kLanes;
          column[num_groups] = key - tile;
          counts[num_groups++] = count;
          in_block += count;
          key += count;
        }
      }
    }

    // Returns the address of a cache line of keys or values by its number; null behind the end.
    const uint32_t* line(const uint32_t* const* groups, int64_t number) const {
      const int64_t in_group = group_words / kLanes, group = number / in_group;
      return group < num_groups ? groups[group] + number % in_group * kLanes : nullptr;
    }

    const int64_t group_words;
    // Whether the scores of these groups form a contiguous part of a row.
    bool is_full(int64_t first, int64_t count) const {
      return counts[first] == kLanes && counts[first + count - 1] == kLanes &&
             column[first + count - 1] == column[first] + (count - 1) * kLanes;
    }

    // Sets the addresses of the next group: that of `slot` in a block.
    void point(const Attention& of, int64_t block, int64_t slot, int64_t head) {
      const int64_t first = HeadPlaces<Type>::group(slot, of.dim_);
      if (of.heads_.is_rounded) {
        const RoundedBlock own_keys(of.heads_, of.pools_.keys, block, head);
        const RoundedBlock own_values(of.heads_, of.pools_.values, block, head);
        codes[0][num_groups] = own_keys.codes + first;
        codes[1][num_groups] = own_values.codes + first;
        scales[0][num_groups] = own_keys.scales + slot;
        scales[1][num_groups] = own_values.scales + slot;
        return;
      }
      const HeadBlock<Type> own(of.heads_, of.pools_, block, head);
      keys[num_groups] = reinterpret_cast<const uint32_t*>(own.keys + first);
      if (of.heads_.value_dim > 0) return;
      values[num_groups] = reinterpret_cast<const uint32_t*>(own.values + first);
    }

    int64_t num_groups = 0;
    // Words of each group; those of rounded keys and values are set when their codes are expanded.
    const uint32_t* keys[kTileKeys];
    const uint32_t* values[kTileKeys];
    // Codes of each group, and the scales from its first key on: of keys, and of values.
    const int8_t* codes[2][kTileKeys];
    const float* scales[2][kTileKeys];
    // Per group: lane of its first key, that key's column in the tile, and the number of keys.
    int64_t lane[kTileKeys];
    int64_t column[kTileKeys];
    int64_t counts[kTileKeys];
  };

  // Expands the codes of a tile's keys and values, and prefetches those of the next tile.
  void expand(KeyTile& keys, const KeyTile& next, Workspace& space) const {
    const int64_t group_size = kLanes * dim_;
    const size_t size = 2 * keys.num_groups * group_size;
    if (space.expanded.size() < size) space.expanded.resize(size);
    // Columns without a key have the weight 0, and a scale that is left from another sequence may be NaN.
    std::fill(space.key_scales, space.key_scales + kTileKeys, 0.0f);
    std::fill(space.value_scales, space.value_scales + kTileKeys, 0.0f);
    typename Type::Element* to = space.expanded.data();
    for (int64_t group = 0; group < keys.num_groups; ++group) {
      for (int part = 0; part < 2; ++part, to += group_size) {
        if (group < next.num_groups) {
          for (int64_t i = 0; i < group_size; i += 64) __builtin_prefetch(next.codes[part][group] + i, 0, 2);
          __builtin_prefetch(next.scales[part][group], 0, 2);
        }
        expand_codes<Type>(keys.codes[part][group], group_size, to);
        (part == 0 ? keys.keys : keys.values)[group] = reinterpret_cast<const uint32_t*>(to);
        const float* scales = keys.scales[part][group];
        std::copy(scales, scales + keys.counts[group],
                  (part == 0 ? space.key_scales : space.value_scales) + keys.column[group]);
      }
    }
  }

  // Copies the values of a tile out of its keys, in the order in which `add_values` reads them. Elements that share a
  // word with the last value, and belong to no key, become 0: they may be NaN, and their weight is 0.
  void take_values_from_keys(KeyTile& keys, Workspace& space) const {
    const int64_t group_words = kLanes / Type::kPerWord * num_values_;
    const size_t size = keys.num_groups * group_words * Type::kPerWord;
    if (space.expanded.size() < size) space.expanded.resize(size);
    uint32_t* to = reinterpret_cast<uint32_t*>(space.expanded.data());
    for (int64_t group = 0; group < keys.num_groups; ++group, to += group_words) {
      for (int64_t d = 0; d < num_values_; d += kLanes) {
        keys_to_values<Type>(keys.keys[group] + d / Type::kPerWord * kLanes, keys.lane[group] + keys.counts[group],
                             to + d, num_values_);
      }
      keys.values[group] = to;
    }
  }

  // Computes scores, and prefetches the next tile's keys, a few cache lines per step. Blocks are scattered, so the
  // hardware prefetcher cannot guess the next one; requesting all lines at once would stall the computation.
  void score(const KeyTile& keys, const KeyTile& next, int64_t num_rows, Workspace& space,
             Product<Type>& product) const {
    const int64_t num_words = dim_ / Type::kPerWord;
    for (int64_t group = 0; group < keys.num_groups; group += kTileVectors) {
      const int64_t num_vectors = std::min<int64_t>(kTileVectors, keys.num_groups - group);
      const Segment all{{keys.keys[group], keys.keys[group + num_vectors - 1]}, num_words};
      const bool is_full = keys.is_full(group, num_vectors);
      for_row_tiles<Product<Type>::kRows>(num_rows, [&](int64_t first, int64_t count, int64_t, int64_t) {
        Operands<Type> of{space.queries.data() + first * dim_, dim_, &all, 1, kLanes};
        if (first == 0) {
          for (int64_t i = 0; i < 2; ++i) of.next[i] = next.line(next.keys, (group + i) * num_words);
          of.next_stride = kLanes;
        }
        float* to = space.scores.data() + first * kTileKeys;
        if (is_full) {
          product.multiply(count, num_vectors, to + keys.column[group], kTileKeys, of, false);
          return;
        }
        alignas(64) float scores[Product<Type>::kRows * kTileColumns];
        product.multiply(count, num_vectors, scores, kTileColumns, of, false);
        for (int64_t row = 0; row < count; ++row) {
          for (int64_t v = 0; v < num_vectors; ++v) {
            const float* from = scores + row * kTileColumns + v * kLanes + keys.lane[group + v];
            std::copy(from, from + keys.counts[group + v], to + row * kTileKeys + keys.column[group + v]);
          }
        }
      });
    }
  }

  // Turns scores into weights and rescales the earlier sums to the new maximum.
  void weigh(Sight seen, int64_t tile, int64_t row, Workspace& space, const Sums& piece) const {
    float* scores = space.scores.data() + row * kTileKeys;
    Floats scaled[kTileGroups];
    Floats tops = Floats(-INFINITY);
    for (int64_t group = 0; group < kTileGroups; ++group) {
      scaled[group] = load_floats(scores + group * kLanes) * scale_;
      if (heads_.is_rounded) scaled[group] = scaled[group] * load_floats(space.key_scales + group * kLanes);
      if (options_.softcap > 0.0f) scaled[group] = capped(scaled[group]);
    }
    if (seen.first > tile || seen.stop < tile + kTileKeys) hide(seen, tile, scaled);
    for (int64_t group = 0; group < kTileGroups; ++group) tops = larger(scaled[group], tops);
    const float top = std::max(piece.largest[row], largest_lane(tops));
    Left* weights = space.weights.data() + row * kTileKeys;
    if (top == -INFINITY) {
      std::fill(weights, weights + kTileKeys, Left{0});
      // The only keys that are seen may have scores that are NaN.
      Floats none{};
      for (int64_t group = 0; group < kTileGroups; ++group) {
        none += select(scaled[group] < INFINITY, 0.0f, scaled[group]);
      }
      piece.weights[row] += sum_of_lanes(none);
      return;
    }
    Floats total{};
    for (int64_t group = 0; group < kTileGroups; ++group) {
      const Floats weight = exp2_of_negative<Type::kIsRough>(scaled[group] - top);
      total += weight;
      Type::store_left(weights + group * kLanes,
                       heads_.is_rounded ? weight * load_floats(space.value_scales + group * kLanes) : weight);
    }
    if (piece.largest[row] != top) {
      const float kept = exp2_of_negative(piece.largest[row] - top);
      float* values = piece.values + row * num_values_;
      for (int64_t d = 0; d < num_values_; d += kLanes) store_floats(values + d, load_floats(values + d) * kept);
      piece.weights[row] *= kept;
      piece.largest[row] = top;
    }
    piece.weights[row] += sum_of_lanes(total);
  }

  static void hide(Sight seen, int64_t tile, Floats* scores) {
    static constexpr int32_t kNumbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Integers lanes;
    std::memcpy(&lanes, kNumbers, sizeof lanes);
    const int32_t first = static_cast<int32_t>(std::clamp<int64_t>(seen.first - tile, 0, kTileKeys));
    const int32_t stop = static_cast<int32_t>(std::clamp<int64_t>(seen.stop - tile, 0, kTileKeys));
    for (int32_t group = 0; group < kTileGroups; ++group) {
      const Integers column = lanes + group * static_cast<int32_t>(kLanes);
      scores[group] = select(column < first, -INFINITY, select(column < stop, scores[group], -INFINITY));
    }
  }

  // Applies the soft cap; scores before and after are exponents of 2.
  Floats capped(Floats scores) const {
    const float cap = options_.softcap * kLog2OfE;
    float one_by_one[kLanes];
    store_floats(one_by_one, scores);
    for (float& score : one_by_one) score = cap * std::tanh(score / cap);
    return load_floats(one_by_one);
  }

  // Adds weighted values, and prefetches the next tile's values like `score`.
  void add_values(const KeyTile& keys, const KeyTile& next, int64_t num_rows, Workspace& space, const Sums& piece,
                  Product<Type>& product) const {
    const Left* weights = space.weights.data();
    const int64_t num_words = kTileKeys / Type::kPerWord;
    for (int64_t d = 0; d < num_values_; d += kTileColumns) {
      const int64_t num_vectors = std::min(kTileVectors * kLanes, num_values_ - d) / kLanes;
      Segment segments[kTileKeys];
      for (int64_t group = 0; group < keys.num_groups; ++group) {
        const uint32_t* values = keys.values[group] + keys.lane[group] / Type::kPerWord * num_values_ + d;
        const int64_t num_steps = (keys.counts[group] + Type::kPerWord - 1) / Type::kPerWord;
        segments[group] = {{values, values + (num_vectors - 1) * kLanes}, num_steps};
      }
      for_row_tiles<Product<Type>::kRows>(num_rows, [&](int64_t first, int64_t count, int64_t, int64_t) {
        Operands<Type> of{weights + first * kTileKeys + keys.column[0], kTileKeys, segments, keys.num_groups, num_values_};
        // The keys that values are parts of are prefetched already.
        if (first == 0 && heads_.value_dim == 0) {
          for (int64_t i = 0; i < 2; ++i) of.next[i] = next.line(next.values, (2 * d / kTileColumns + i) * num_words);
          of.next_stride = kLanes;
        }
        product.multiply(count, num_vectors, piece.values + first * num_values_ + d, num_values_, of, true);
      });
    }
  }

  const Step& step_;
  const Heads& heads_;
  const AttentionPlan& plan_;
  const Pools& pools_;
  const LayerOptions& options_;
  const Element* queries_;
  Element* output_;
  float* partials_;
  const BlockGroup& group_;
  int64_t dim_;
  int64_t num_values_;
  int64_t rows_per_token_;
  // Includes log2(e), because weights are computed as powers of 2.
  float scale_;
};

}  // namespace lookonce
