"""How many embedding rows a step may ask for, and how many the decoder holds (vLLM PR #11895, in rows).

Both are at least the rows of the model's largest image: a smaller budget could never serve it. The cache is one image
larger where a prompt's last block is computed again as a whole: of two equal prompts whose length is a multiple of the
block size the second computes that block again while the first may hold the cache, and needs the image's rows beside
it. Here one token is computed again and rows move by range, so what is added is the rows of one block.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EncoderBudget:
    """Limits in embedding rows, and the worst case that start-up tries."""

    # Asked for in one step.
    compute_rows: int
    # Held on the device.
    cache_rows: int
    # Largest images that can be needed at the same time.
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
    """The budget of a model. A warning names each limit that had to give way to another."""
    if max_images_per_prompt == 0 or max_rows_per_image == 0:
        return EncoderBudget(0, 0, 0)
    compute = max(max_num_batched_tokens, max_rows_per_image)
    if compute > max_num_batched_tokens:
        logger.warning(
            "the largest image has %d embedding rows, more than max_num_batched_tokens (%d): a step may ask for one",
            max_rows_per_image, max_num_batched_tokens,
        )  # fmt: skip
    wanted = configured_cache_rows or max_num_batched_tokens
    if configured_cache_rows is not None and configured_cache_rows < max_rows_per_image:
        logger.warning(
            "encoder_cache_rows is %d, but the largest image has %d: raised to that",
            configured_cache_rows, max_rows_per_image,
        )  # fmt: skip
    cache = max(wanted, max_rows_per_image) + min(block_size, max_rows_per_image)
    num_images = min(-(-min(compute, cache) // max_rows_per_image), max_num_seqs * max_images_per_prompt)
    budget = EncoderBudget(compute, cache, num_images)
    logger.info("encoder budget: %s", budget)
    return budget
