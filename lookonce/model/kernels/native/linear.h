// Linear layers over packed weights: y = x Wᵀ + b, followed by a function that consumes the sums.
//
// Weights are stored in panels of 32 outputs, [ceil(outputs / 32), inputs in words, 32] (native_linear.py), so that a
// token reads each panel sequentially: at small batches memory bandwidth limits the speed. All threads of a parallel
// region must call `linear`; it is one phase.

#pragma once

#include <algorithm>

#include "layer.h"
#include "phases.h"
#include "product.h"
#include "quantized.h"
#include "tile.h"

namespace lookonce {

// Bytes of input that one thread multiplies with a panel at once; they fit into its L2 cache.
constexpr int64_t kChunkBytes = 1 << 18;

// Distance at which weights are prefetched for a single tile, words; panels follow each other in memory. The processor
// prefetches by itself, but not far enough while it computes several rows. Weights of 576 x 1536 from memory, one thread
// of 2 x AMD EPYC, with 1 / 8 / 12 rows: bfloat16 (avx512_bf16) 59 / 79 / 100 -> 59 / 63 / 69 us, float32 112 / 153 /
// 241 -> 105 / 109 / 127; avx2 with 4 / 6 rows: bfloat16 185 / 237 -> 100 / 127, float32 323 / 370 -> 180 / 184.
constexpr int64_t kAheadWords = 2048;

// Calls finish(row, first column, sums [32]) for each row of each panel, bias added. `input` is [num_rows, num_inputs].
// `integers` is a buffer for quantized layers, which are two phases unless the inputs are in it already (`is_rounded`).
template <typename Type, typename Finish>
void linear(Worker& worker, const Linear& layer, const typename Type::Left* input, int64_t num_rows,
            IntegerInputs& integers, bool is_rounded, Finish finish) {
  if (layer.codes != nullptr) {
    return quantized_linear<Type>(worker, layer, input, num_rows, integers, is_rounded, finish);
  }
  const int64_t num_panels = (layer.num_outputs + kTileColumns - 1) / kTileColumns;
  const int64_t num_words = layer.num_inputs / Type::kPerWord;
  const int64_t row_bytes = layer.num_inputs * sizeof(*input);
  constexpr int64_t kRows = Product<Type>::kRows;
  const int64_t chunk_rows = std::max<int64_t>(1, kChunkBytes / row_bytes / kRows) * kRows;
  const int64_t num_chunks = (num_rows + chunk_rows - 1) / chunk_rows;
  // A thread takes several neighbouring panels at a time if there are enough for all threads to end together.
  const int64_t side_by_side = std::max<int64_t>(1, num_chunks * num_panels / (16 * omp_get_num_threads()));
  worker.run_alike(num_chunks * num_panels, side_by_side, [&](int64_t item) {
    const int64_t chunk = item / num_panels * chunk_rows, panel = item % num_panels;
    const uint32_t* right = layer.panels + panel * num_words * kTileColumns;
    alignas(64) float sums[kRows * kTileColumns];
    Product<Type> product;
    const auto multiply_tile = [&](int64_t first, int64_t count, int64_t tile, int64_t num_tiles) {
      const Segment all{{right, right + kLanes}, num_words};
      Operands<Type> of{input + (chunk + first) * layer.num_inputs, layer.num_inputs, &all, 1, kTileColumns};
      if (num_tiles > 1 && panel + 1 < num_panels) {
        // Each tile prefetches its part of the next panel.
        of.next_stride = (kTileColumns + num_tiles - 1) / num_tiles;
        of.next[0] = right + num_words * kTileColumns + tile * num_words * of.next_stride;
      } else if (num_tiles == 1) {
        of.next_stride = kTileColumns;
        of.next[0] = right + kAheadWords;
        of.next[1] = right + kAheadWords + kLanes;
      }
      product.multiply(count, kTileVectors, sums, kTileColumns, of, false);
      for (int64_t row = 0; row < count; ++row) {
        float* of_row = sums + row * kTileColumns;
        if (layer.bias != nullptr) {
          for (int64_t c = 0; c < kTileColumns; ++c) of_row[c] += layer.bias[panel * kTileColumns + c];
        }
        finish(chunk + first + row, panel * kTileColumns, of_row);
      }
    };
    for_row_tiles<kRows>(std::min(chunk_rows, num_rows - chunk), multiply_tile);
  });
}

}  // namespace lookonce
