// Embeddings of tokens out of packed weights, for models whose output head is their table of embeddings.

#include <algorithm>
#include <cstdint>

#include "linear.h"

#pragma GCC visibility push(default)
extern "C" {

// `ids` is [num_ids]; `rows` is [num_ids, inputs in words]. Ids outside the table get its last row, so that none can read
// elsewhere.
void lookonce_embedding(const lookonce::Linear* layer, const int64_t* ids, int64_t num_ids, int64_t num_words,
                        uint32_t* rows) {
  for (int64_t i = 0; i < num_ids; ++i) {
    const auto id = std::min(static_cast<uint64_t>(ids[i]), static_cast<uint64_t>(layer->num_outputs - 1));
    const int64_t panel = id / lookonce::kTileColumns, column = id % lookonce::kTileColumns;
    const uint32_t* from = layer->panels + panel * num_words * lookonce::kTileColumns + column;
    uint32_t* to = rows + i * num_words;
    for (int64_t w = 0; w < num_words; ++w) to[w] = from[w * lookonce::kTileColumns];
  }
}
}
#pragma GCC visibility pop
