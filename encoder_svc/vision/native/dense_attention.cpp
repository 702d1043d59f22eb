// Attention among all tokens of an image, as vision towers compute it: no mask, no KV cache.
//
// Keys and values of a head are first packed for the product in product.h. Then a few query rows at a time pass over all
// keys, so their scores stay in the L1 cache and each row's maximum is known before its weights are computed. Scores,
// sums and softmax are float32; weights have the elements' type. A row's numbers depend only on its own image.

#include <algorithm>

#include "aligned.h"
#include "phases.h"
#include "product.h"
#include "tile.h"

namespace lookonce {
namespace {

// Strides in elements; the elements of one head are contiguous.
struct Strides {
  int64_t image;
  int64_t head;
  int64_t token;

  int64_t at(int64_t of_image, int64_t of_head, int64_t of_token) const {
    return of_image * image + of_head * head + of_token * token;
  }
};

struct Shape {
  int64_t num_images;
  int64_t num_heads;
  int64_t num_tokens;
  int64_t head_dim;
  float scale;
  Strides queries;
  Strides keys;
  Strides values;
};

int64_t rounded_up(int64_t number, int64_t multiple) { return (number + multiple - 1) / multiple * multiple; }

template <typename Type>
class DenseAttention {
 public:
  using Element = typename Type::Element;
  using Left = typename Type::Left;

  DenseAttention(const Shape& shape, const Element* queries, const Element* keys, const Element* values,
                 Element* output, uint32_t* packed)
      : shape_(shape), queries_(queries), keys_(keys), values_(values), output_(output), packed_(packed),
        num_columns_(columns(shape)), num_key_words_(key_words(shape)),
        num_value_vectors_(rounded_up(shape.head_dim, kLanes) / kLanes) {}

  // Returns the number of tokens, padded so that every product has full width.
  static int64_t columns(const Shape& shape) { return rounded_up(shape.num_tokens, kTileColumns); }

  // Returns the packed words of one image; images are processed one after the other.
  static int64_t packed_words(const Shape& shape) { return shape.num_heads * words_per_head(shape); }

  // Call from all threads of a parallel region.
  void run(Worker& worker) const {
    const int64_t num_tiles = (shape_.num_tokens + kRows - 1) / kRows;
    for (int64_t image = 0; image < shape_.num_images; ++image) {
      worker.run(shape_.num_heads, 1, [&](int64_t head) { pack(image, head); });
      const int64_t num_items = shape_.num_heads * num_tiles;
      worker.run(num_items, Worker::grain_of(num_items), [&](int64_t item) {
        const int64_t first = item % num_tiles * kRows;
        attend(image, item / num_tiles, first, std::min<int64_t>(kRows, shape_.num_tokens - first));
      });
    }
  }

 private:
  // Query rows that pass over the keys together.
  static constexpr int64_t kRows = Product<Type>::kRows;

  // Words of a query or key, padded with zeros so that products need no padding.
  static int64_t key_words(const Shape& shape) {
    return rounded_up(shape.head_dim / Type::kPerWord, Product<Type>::kSteps);
  }

  static int64_t words_per_head(const Shape& shape) {
    return columns(shape) * (key_words(shape) + rounded_up(shape.head_dim, kLanes) / Type::kPerWord);
  }

  // Layout per head: keys [columns / 16, key words, 16], then values [value vectors, columns / elements per word, 16].
  uint32_t* packed_keys(int64_t head) const { return packed_ + head * words_per_head(shape_); }
  uint32_t* packed_values(int64_t head) const { return packed_keys(head) + num_columns_ * num_key_words_; }

  void pack(int64_t image, int64_t head) const {
    uint32_t* keys = packed_keys(head);
    uint32_t* values = packed_values(head);
    std::fill(keys, keys + words_per_head(shape_), 0u);
    for (int64_t token = 0; token < shape_.num_tokens; ++token) {
      const Element* key = keys_ + shape_.keys.at(image, head, token);
      uint32_t* to = keys + token / kLanes * num_key_words_ * kLanes + token % kLanes;
      for (int64_t word = 0; word < shape_.head_dim / Type::kPerWord; ++word) {
        std::memcpy(to + word * kLanes, key + word * Type::kPerWord, sizeof(uint32_t));
      }
    }
    const int64_t num_steps = num_columns_ / Type::kPerWord;
    for (int64_t token = 0; token < shape_.num_tokens; token += Type::kPerWord) {
      const int64_t num_tokens = std::min<int64_t>(Type::kPerWord, shape_.num_tokens - token);
      for (int64_t d = 0; d < shape_.head_dim; d += kLanes) {
        const int64_t count = std::min(kLanes, shape_.head_dim - d);
        Element elements[Type::kPerWord][kLanes] = {};
        for (int64_t i = 0; i < num_tokens; ++i) {
          const Element* value = values_ + shape_.values.at(image, head, token + i) + d;
          std::copy(value, value + count, elements[i]);
        }
        Element interleaved[kLanes * Type::kPerWord];
        for (int64_t lane = 0; lane < kLanes; ++lane) {
          for (int64_t i = 0; i < Type::kPerWord; ++i) interleaved[lane * Type::kPerWord + i] = elements[i][lane];
        }
        std::memcpy(values + (d / kLanes * num_steps + token / Type::kPerWord) * kLanes, interleaved,
                    sizeof(interleaved));
      }
    }
  }

  void attend(int64_t image, int64_t head, int64_t first, int64_t num_rows) const {
    static thread_local AlignedVector<float> scores;
    static thread_local AlignedVector<Left> queries, weights;
    scores.resize(kRows * num_columns_);
    weights.resize(kRows * num_columns_);
    const int64_t query_stride = num_key_words_ * Type::kPerWord;
    queries.assign(num_rows * query_stride, Left{});
    for (int64_t r = 0; r < num_rows; ++r) {
      const Element* from = queries_ + shape_.queries.at(image, head, first + r);
      copy_to_left<Type>(queries.data() + r * query_stride, from, shape_.head_dim);
    }
    Product<Type> product;
    const uint32_t* keys = packed_keys(head);
    for (int64_t column = 0; column < num_columns_; column += kTileColumns) {
      const uint32_t* group = keys + column * num_key_words_;
      const Segment all{{group, group + kLanes * num_key_words_}, num_key_words_};
      product.multiply(num_rows, kTileVectors, scores.data() + column, num_columns_,
                       {queries.data(), query_stride, &all, 1, kLanes}, false);
    }
    float sums[kRows];
    for (int64_t r = 0; r < num_rows; ++r) {
      sums[r] = weigh(scores.data() + r * num_columns_, weights.data() + r * num_columns_);
    }
    const int64_t num_steps = num_columns_ / Type::kPerWord;
    for (int64_t vector = 0; vector < num_value_vectors_; vector += kTileVectors) {
      const int64_t num_vectors = std::min<int64_t>(kTileVectors, num_value_vectors_ - vector);
      const uint32_t* values = packed_values(head) + vector * num_steps * kLanes;
      const Segment all{{values, values + (num_vectors - 1) * num_steps * kLanes}, num_steps};
      alignas(64) float results[kRows * kTileColumns];
      product.multiply(num_rows, num_vectors, results, kTileColumns,
                       {weights.data(), num_columns_, &all, 1, kLanes}, false);
      for (int64_t r = 0; r < num_rows; ++r) {
        for (int64_t v = 0; v < num_vectors; ++v) {
          const int64_t d = (vector + v) * kLanes;
          store(results + r * kTileColumns + v * kLanes, sums[r], output_row(image, head, first + r), d);
        }
      }
    }
  }

  // Turns a row's scores into weights; returns their sum.
  float weigh(float* scores, Left* weights) const {
    const int64_t num_tokens = shape_.num_tokens;
    std::fill(scores + num_tokens, scores + num_columns_, -INFINITY);
    Floats tops = load_floats(scores);
    for (int64_t c = kLanes; c < num_columns_; c += kLanes) tops = larger(load_floats(scores + c), tops);
    const float scale = shape_.scale * kLog2OfE;
    const float top = largest_lane(tops);
    Floats total{};
    for (int64_t c = 0; c < num_columns_; c += kLanes) {
      // Subtracting first gives exactly 0 for the largest score. Behind the product, which is rounded or not, it would
      // not, and huge scores would give weights beyond 1.
      const Floats weight = exp2_of_negative<Type::kIsRough>((load_floats(scores + c) - top) * scale);
      total += weight;
      Type::store_left(weights + c, weight);
    }
    return sum_of_lanes(total);
  }

  Element* output_row(int64_t image, int64_t head, int64_t token) const {
    return output_ + ((image * shape_.num_tokens + token) * shape_.num_heads + head) * shape_.head_dim;
  }

  // Stores the elements [d, d + 16) of a row, cut off at its end.
  void store(const float* results, float sum, Element* row, int64_t d) const {
    const Floats value = load_floats(results) / sum;
    if (d + kLanes <= shape_.head_dim) {
      Type::store(row + d, value);
      return;
    }
    Element whole[kLanes];
    Type::store(whole, value);
    std::copy(whole, whole + shape_.head_dim - d, row + d);
  }

  const Shape& shape_;
  const Element* queries_;
  const Element* keys_;
  const Element* values_;
  Element* output_;
  uint32_t* packed_;
  const int64_t num_columns_;
  const int64_t num_key_words_;
  const int64_t num_value_vectors_;
};

template <typename Type>
void attend(const Shape& shape, int64_t num_threads, const void* queries, const void* keys, const void* values,
            void* output) {
  using Element = typename Type::Element;
  static thread_local AlignedVector<uint32_t> packed;
  packed.resize(DenseAttention<Type>::packed_words(shape));
  const DenseAttention<Type> attention(shape, static_cast<const Element*>(queries), static_cast<const Element*>(keys),
                                       static_cast<const Element*>(values), static_cast<Element*>(output),
                                       packed.data());
  // Two for each image.
  Phases phases(2 * shape.num_images);
#pragma omp parallel num_threads(num_threads)
  {
    Worker worker(phases);
    attention.run(worker);
  }
}

}  // namespace
}  // namespace lookonce

#pragma GCC visibility push(default)
extern "C" {

// `output` is [num_images, num_tokens, num_heads, head_dim], contiguous. Tokens of queries, keys and values start at
// word boundaries.
void lookonce_attend_densely_float32(const lookonce::Shape* shape, int64_t num_threads, const void* queries,
                                     const void* keys, const void* values, void* output) {
  lookonce::attend<lookonce::Float32>(*shape, num_threads, queries, keys, values, output);
}

void lookonce_attend_densely_bfloat16(const lookonce::Shape* shape, int64_t num_threads, const void* queries,
                                      const void* keys, const void* values, void* output) {
  lookonce::attend<lookonce::BFloat16>(*shape, num_threads, queries, keys, values, output);
}
}
#pragma GCC visibility pop
