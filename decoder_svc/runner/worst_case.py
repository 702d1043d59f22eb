"""Builds the heaviest step that the limits allow. Start-up runs it once to measure memory (vLLM PR #11895)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from decoder_svc.rows.fetched_rows import FetchedRows
from decoder_svc.scheduling.prompt import ImageItem, Span
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.row_range import RowRange
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.scheduler_output import (
    AdmittedRequest,
    ScheduledChunk,
    SchedulerOutput,
    SlidingTable,
    StateUse,
)
from decoder_svc.scheduling.window import Window
from lookonce.content_key import DEFAULT_TENANT, EncoderFingerprint, ProcessorOptions, content_key, image_digest
from lookonce.embedding_meta import RowDtype
from lookonce.families.base import Mask

# Blocks that all tokens share: the step runs before the KV pool is sized.
NUM_BLOCKS = 1

# The most expensive sampling parameters.
_SAMPLING = SamplingParams(temperature=1.0, top_p=0.95, repetition_penalty=1.1, max_tokens=1, seed=0, logprobs=20)


@dataclass(frozen=True, slots=True)
class WorstCase:
    """Limits of a step; each is at least 1 unless stated."""

    # Tokens computed in the step.
    num_tokens: int
    # Requests that have a token in the step.
    num_requests: int
    # Tokens of the longest request; its last token is in the step.
    context_tokens: int
    # Largest images held at the same time; may be 0.
    num_images: int
    rows_per_image: int
    row_elements: int
    row_dtype: RowDtype
    # Draft tokens per request, as far as `num_tokens` allows; may be 0.
    num_draft_tokens: int = 0


def within_pool(worst: WorstCase, free_bytes: int, block_bytes: int, block_size: int) -> WorstCase:
    """Returns the same step with no longer a request than a KV pool of `free_bytes` could hold.

    Models declare up to ten million positions, and attention over so many keys takes minutes.
    """
    most_tokens = free_bytes // block_bytes * block_size
    return replace(worst, context_tokens=min(worst.context_tokens, max(worst.num_tokens, most_tokens)))


def worst_case_rows(worst: WorstCase) -> list[FetchedRows]:
    """Returns rows of the largest images as the fetcher would deliver them, all zeros."""
    # A repeated zero byte writes the memory: untouched pages would not count as taken.
    num_bytes = worst.rows_per_image * worst.row_elements * worst.row_dtype.item_bytes
    rows = RowRange(0, worst.rows_per_image)
    return [FetchedRows(image.key, rows, bytearray(b"\0") * num_bytes, worst.row_dtype) for image in _images(worst, 0)]


def worst_case_step(
    worst: WorstCase,
    block_size: int,
    window: Window | None = None,
    mask: Mask = Mask.CAUSAL,
    *,
    has_states: bool = False,
) -> SchedulerOutput:
    """Returns a step in which one request computes the end of the longest context, with images, and the others decode.

    `window` is the window of the model's sliding group, None without one. `mask` is the family's: tokens that see later
    ones take memory for their masks, and kernels of their own, which are compiled here and not while serving.
    `has_states` says whether the model has recurrent layers.
    """
    num_others = min(worst.num_requests, worst.num_tokens) - 1
    num_drafts = min(worst.num_draft_tokens, (worst.num_tokens - 1) // num_others - 1) if num_others else 0
    num_tokens = min(worst.num_tokens - num_others * (1 + num_drafts), worst.context_tokens)
    # A prompt whose tokens all see each other is never split, so it is computed from its first token on.
    context_tokens = num_tokens if mask is Mask.PROMPT else worst.context_tokens
    start = context_tokens - num_tokens
    images = _images(worst, start)
    spans = _mutual_spans(mask, images, context_tokens)
    longest = _admitted("longest", context_tokens, images, 0, spans)
    others = [_admitted(f"other-{index}", 1, (), num_drafts) for index in range(num_others)]
    parts = [(longest, start, num_tokens, 0), *((other, 0, 1 + num_drafts, num_drafts) for other in others)]
    chunks = tuple(_chunk(*part, block_size, window) for part in parts)
    if has_states:
        chunks = tuple(replace(chunk, states=StateUse(slot, None, ())) for slot, chunk in enumerate(chunks))
    return SchedulerOutput((longest, *others), chunks, (), (), ())


def _images(worst: WorstCase, start: int) -> tuple[ImageItem, ...]:
    """Returns the images, one after the other from token `start` on. They may extend beyond the step."""
    items = []
    for index in range(worst.num_images):
        digest = image_digest(f"worst case {index}".encode())
        options = ProcessorOptions()
        key = content_key(digest, EncoderFingerprint("worst case"), options, DEFAULT_TENANT)
        span = Span(start + index * worst.rows_per_image, worst.rows_per_image)
        items.append(ImageItem(key, span, worst.rows_per_image, options, None))
    return tuple(items)


def _mutual_spans(mask: Mask, images: tuple[ImageItem, ...], context_tokens: int) -> tuple[Span, ...]:
    """Returns the spans of tokens that all see each other, inside the context."""
    if mask is Mask.PROMPT:
        return (Span(0, context_tokens),)
    if mask is Mask.CAUSAL:
        return ()
    inside = (item.span for item in images if item.span.offset < context_tokens)
    return tuple(Span(span.offset, min(span.length, context_tokens - span.offset)) for span in inside)


def _admitted(
    name: str, num_tokens: int, images: tuple[ImageItem, ...], num_drafts: int, spans: tuple[Span, ...] = ()
) -> AdmittedRequest:
    params = replace(_SAMPLING, max_tokens=1 + num_drafts)
    return AdmittedRequest(RequestId(name), (0,) * num_tokens, num_tokens, images, None, spans, params)


def _chunk(
    request: AdmittedRequest, start: int, num_tokens: int, num_drafts: int, block_size: int, window: Window | None
) -> ScheduledChunk:
    num_blocks = -(-(start + num_tokens) // block_size)
    sliding = None
    if window is not None:
        first = window.first_seen(start) // block_size
        sliding = SlidingTable(first, first, (0,) * (num_blocks - first))
    return ScheduledChunk(
        request.request_id,
        start,
        num_tokens,
        start,
        0,
        (0,) * num_blocks,
        samples=True,
        sliding=sliding,
        draft_ids=(0,) * num_drafts,
    )
