"""The budget of embedding rows: how many a step may ask for, and how many the decoder holds (vLLM PR #11895).

Both limits are at least the rows of the model's largest image; a smaller budget could never serve it.

The cache also gets the rows of one block. Consider two equal prompts whose length is a multiple of the block size: the
second one recomputes its last token while the first may still fill the cache, and needs the rows of that token in
addition. An engine that recomputes the whole last block and moves whole images must reserve a whole image instead.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EncoderBudget:
    """Limits in embedding rows, and the worst case that start-up profiles."""

    # Rows asked for in one step.
    compute_rows: int
    # Rows held on the device.
    cache_rows: int
    # Images of the largest size that can be needed at the same time.
    num_profiled_images: int


def encoder_budget(
    *,
    max_num_batched_tokens: int,
    max_rows_per_image: int,
    max_num_seqs: int,
    max_images_per_prompt: int,
    block_size: int,
    configured_cache_rows: int | None = None,
) -> EncoderBudget:
    """Returns the budget of a model. Logs a warning for each limit that another one raises."""
    if max_images_per_prompt == 0 or max_rows_per_image == 0:
        return EncoderBudget(0, 0, 0)
    compute = max(max_num_batched_tokens, max_rows_per_image)
    if compute > max_num_batched_tokens:
        logger.warning(
            "the largest image has %d embedding rows, over max_num_batched_tokens (%d): a step may still ask for one",
            max_rows_per_image, max_num_batched_tokens,
        )  # fmt: skip
    wanted = configured_cache_rows or max_num_batched_tokens
    if configured_cache_rows is not None and configured_cache_rows < max_rows_per_image:
        logger.warning(
            "encoder_cache_rows is %d, but the largest image has %d rows: the cache is raised to that",
            configured_cache_rows, max_rows_per_image,
        )  # fmt: skip
    cache = max(wanted, max_rows_per_image) + min(block_size, max_rows_per_image)
    num_images = min(-(-min(compute, cache) // max_rows_per_image), max_num_seqs * max_images_per_prompt)
    budget = EncoderBudget(compute, cache, num_images)
    logger.info("encoder budget: %s", budget)
    return budget
