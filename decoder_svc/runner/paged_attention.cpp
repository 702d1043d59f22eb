// Attention of single tokens over keys and values that lie in blocks of a pool: what a decode step does in every layer.
//
// Memory decides its speed: each key and value is read once for all query heads that share it. A sequence's keys are
// taken in pieces of a fixed length, so that long ones occupy all threads, and what a piece gives does not depend on who
// else is in the batch. Softmax is computed online (arXiv:1805.02867) and in fp32, whatever the pool's element type.
//
// Plain C++ without headers of PyTorch: pointers come through ctypes (cpu_attention.py). Compiled by native_library.py.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t kPieceTokens = 256;
constexpr int64_t kTileTokens = 32;

}  // namespace

extern "C" {

// The sequences of one step with one new token each; mirrored in cpu_attention.py.
struct DecodeStep {
  const int64_t* blocks;        // Of all sequences, one after the other.
  const int64_t* first_blocks;  // [num_sequences] Where each sequence's blocks begin in `blocks`.
  const int64_t* first_keys;    // [num_sequences] The token in the first slot of the first block.
  const int64_t* num_keys;      // [num_sequences] Tokens that the sequence has, the new one included.
  const int64_t* rows;          // [num_sequences] The new token's row in queries and output.
  int64_t num_sequences;
};

// One layer; mirrored in cpu_attention.py.
struct DecodeLayer {
  int64_t num_kv_heads;
  int64_t num_groups;  // Query heads per key head.
  int64_t head_dim;
  int64_t block_size;
  int64_t query_row_stride;  // In elements.
  int64_t query_head_stride;
  int64_t window;  // Keys that a token sees, itself included; 0: all.
  float scale;
  float softcap;  // 0: none.
};

}  // extern "C"

namespace {

inline float to_float(float value) { return value; }

inline float to_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

inline void from_float(float value, float* out) { *out = value; }

// Rounds to the nearest bfloat16, ties to even.
inline void from_float(float value, uint16_t* out) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    *out = 0x7fc0;
    return;
  }
  *out = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// e^x for x <= 0, to about two units of the last place; 0 below -87. Cephes' polynomial after reduction by powers of 2.
inline float exp_of_negative(float x) {
  const float clipped = x < -87.0f ? -87.0f : x;
  // Towards zero, and so to the nearest.
  const int32_t power_of_two = static_cast<int32_t>(clipped * 1.44269504088896341f - 0.5f);
  const float n = static_cast<float>(power_of_two);
  const float r = clipped - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (power_of_two + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return x < -87.0f ? 0.0f : p * power;
}

// Consecutive keys of one sequence. All heads take them together: a token's keys lie side by side.
struct Piece {
  int64_t sequence;
  int64_t first_key;
  int64_t stop_key;
};

// What a thread works in.
struct Workspace {
  std::vector<float> queries;  // [heads, head_dim]
  std::vector<float> row;      // [kv_heads, head_dim]
  std::vector<float> scores;   // [heads, kTileTokens]
};

// `sums` [heads, head_dim], `largest` and `weights` [heads]: weighted values, largest score, sum of weights. `kDim` is the
// head's dimension where the compiler shall know it, else 0.
template <typename Element, int64_t kDim>
void attend_piece(const DecodeStep& step, const DecodeLayer& layer, const Piece& piece, const Element* query,
                  const Element* keys, const Element* values, float* sums, float* largest, float* weights) {
  const int64_t dim = kDim > 0 ? kDim : layer.head_dim;
  const int64_t groups = layer.num_groups, heads = layer.num_kv_heads * groups;
  const int64_t row_elements = layer.num_kv_heads * dim;
  const int64_t* blocks = step.blocks + step.first_blocks[piece.sequence];
  const int64_t first_slot_key = step.first_keys[piece.sequence];
  static thread_local Workspace workspace;
  workspace.queries.resize(heads * dim);
  workspace.row.resize(row_elements);
  workspace.scores.resize(heads * kTileTokens);
  float* queries = workspace.queries.data();
  float* row = workspace.row.data();
  float* scores = workspace.scores.data();
  // Of each token of the piece in the pools.
  int64_t offsets[kPieceTokens];
  const int64_t num_tokens = piece.stop_key - piece.first_key;
  int64_t block = (piece.first_key - first_slot_key) / layer.block_size;
  int64_t slot = (piece.first_key - first_slot_key) % layer.block_size;
  for (int64_t t = 0; t < num_tokens; ++t, ++slot) {
    if (slot == layer.block_size) {
      slot = 0;
      ++block;
    }
    offsets[t] = (blocks[block] * layer.block_size + slot) * row_elements;
  }
  for (int64_t h = 0; h < heads; ++h) {
    const Element* head = query + step.rows[piece.sequence] * layer.query_row_stride + h * layer.query_head_stride;
    for (int64_t d = 0; d < dim; ++d) queries[h * dim + d] = to_float(head[d]) * layer.scale;
    largest[h] = -INFINITY;
    weights[h] = 0.0f;
  }
  std::fill(sums, sums + heads * dim, 0.0f);

  for (int64_t first = 0; first < num_tokens; first += kTileTokens) {
    const int64_t count = std::min(kTileTokens, num_tokens - first);
    for (int64_t t = 0; t < count; ++t) {
      const Element* key = keys + offsets[first + t];
#pragma omp simd
      for (int64_t e = 0; e < row_elements; ++e) row[e] = to_float(key[e]);
      const float* head = queries;
      float* score_of_head = scores + t;
      for (const float* own = row; own < row + row_elements; own += dim) {
        for (int64_t g = 0; g < groups; ++g, head += dim, score_of_head += kTileTokens) {
          float score = 0.0f;
#pragma omp simd reduction(+ : score)
          for (int64_t d = 0; d < dim; ++d) score += head[d] * own[d];
          *score_of_head = score;
        }
      }
    }
    for (int64_t h = 0; h < heads; ++h) {
      float* tile = scores + h * kTileTokens;
      if (layer.softcap > 0.0f) {
        for (int64_t t = 0; t < count; ++t) tile[t] = layer.softcap * std::tanh(tile[t] / layer.softcap);
      }
      float top = largest[h];
#pragma omp simd reduction(max : top)
      for (int64_t t = 0; t < count; ++t) top = tile[t] > top ? tile[t] : top;
      const float kept = exp_of_negative(largest[h] - top);
      float total = 0.0f;
#pragma omp simd reduction(+ : total)
      for (int64_t t = 0; t < count; ++t) {
        tile[t] = exp_of_negative(tile[t] - top);
        total += tile[t];
      }
      weights[h] = weights[h] * kept + total;
      largest[h] = top;
      float* sum = sums + h * dim;
#pragma omp simd
      for (int64_t d = 0; d < dim; ++d) sum[d] *= kept;
    }
    for (int64_t t = 0; t < count; ++t) {
      const Element* value = values + offsets[first + t];
#pragma omp simd
      for (int64_t e = 0; e < row_elements; ++e) row[e] = to_float(value[e]);
      float* sum = sums;
      const float* weight_of_head = scores + t;
      for (const float* own = row; own < row + row_elements; own += dim) {
        for (int64_t g = 0; g < groups; ++g, sum += dim, weight_of_head += kTileTokens) {
          const float weight = *weight_of_head;
#pragma omp simd
          for (int64_t d = 0; d < dim; ++d) sum[d] += weight * own[d];
        }
      }
    }
  }
}

template <typename Element, int64_t kDim>
void decode(const DecodeStep& step, const DecodeLayer& layer, const Element* query, const Element* keys,
            const Element* values, Element* output) {
  const int64_t dim = layer.head_dim, heads = layer.num_kv_heads * layer.num_groups;
  static thread_local std::vector<Piece> pieces;
  static thread_local std::vector<int64_t> firsts;
  static thread_local std::vector<float> partial;
  pieces.clear();
  firsts.clear();
  for (int64_t s = 0; s < step.num_sequences; ++s) {
    const int64_t stop = step.num_keys[s];
    const int64_t start = layer.window > 0 ? std::max(step.first_keys[s], stop - layer.window) : step.first_keys[s];
    firsts.push_back(static_cast<int64_t>(pieces.size()));
    for (int64_t first = start; first < stop; first += kPieceTokens) {
      pieces.push_back({s, first, std::min(stop, first + kPieceTokens)});
    }
  }
  firsts.push_back(static_cast<int64_t>(pieces.size()));
  const int64_t num_pieces = static_cast<int64_t>(pieces.size());
  const int64_t stride = heads * (dim + 2);
  partial.resize(static_cast<size_t>(num_pieces * stride));
  // Other threads have vectors of their own.
  const Piece* all = pieces.data();
  const int64_t* first_pieces = firsts.data();
  float* results = partial.data();

// Waking other threads takes longer than a short sequence.
#pragma omp parallel if (num_pieces > 1)
  {
#pragma omp for schedule(dynamic, 1)
    for (int64_t p = 0; p < num_pieces; ++p) {
      float* sums = results + p * stride;
      attend_piece<Element, kDim>(step, layer, all[p], query, keys, values, sums, sums + heads * dim,
                                  sums + heads * (dim + 1));
    }
#pragma omp for schedule(static)
    for (int64_t o = 0; o < step.num_sequences * heads; ++o) {
      const int64_t s = o / heads, h = o % heads;
      float top = -INFINITY;
      for (int64_t p = first_pieces[s]; p < first_pieces[s + 1]; ++p) {
        top = std::max(top, results[p * stride + heads * dim + h]);
      }
      float* sum = results + first_pieces[s] * stride + h * dim;
      float total = 0.0f;
      for (int64_t p = first_pieces[s]; p < first_pieces[s + 1]; ++p) {
        const float* piece = results + p * stride;
        const float kept = exp_of_negative(piece[heads * dim + h] - top);
        total += piece[heads * (dim + 1) + h] * kept;
        const float* from = piece + h * dim;
        if (p == first_pieces[s]) {
          for (int64_t d = 0; d < dim; ++d) sum[d] *= kept;
        } else {
          for (int64_t d = 0; d < dim; ++d) sum[d] += from[d] * kept;
        }
      }
      Element* out = output + (step.rows[s] * heads + h) * dim;
      for (int64_t d = 0; d < dim; ++d) from_float(sum[d] / total, out + d);
    }
  }
}

template <typename Element>
void decode_any(const DecodeStep& step, const DecodeLayer& layer, const Element* query, const Element* keys,
                const Element* values, Element* output) {
  switch (layer.head_dim) {
    case 64:
      return decode<Element, 64>(step, layer, query, keys, values, output);
    case 128:
      return decode<Element, 128>(step, layer, query, keys, values, output);
    default:
      return decode<Element, 0>(step, layer, query, keys, values, output);
  }
}

}  // namespace

extern "C" {

// `query` by its strides, `keys` and `values` [blocks, block_size, num_kv_heads, head_dim], `output` [rows, heads,
// head_dim]; all of one element type.
void lookonce_decode_float32(const DecodeStep* step, const DecodeLayer* layer, const float* query, const float* keys,
                             const float* values, float* output) {
  decode_any(*step, *layer, query, keys, values, output);
}

void lookonce_decode_bfloat16(const DecodeStep* step, const DecodeLayer* layer, const uint16_t* query,
                              const uint16_t* keys, const uint16_t* values, uint16_t* output) {
  decode_any(*step, *layer, query, keys, values, output);
}

}  // extern "C"
