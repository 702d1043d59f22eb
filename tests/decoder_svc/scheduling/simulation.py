"""Builds small requests and drives a scheduler without a model, for the scheduler's tests."""

from __future__ import annotations

import zlib
from collections.abc import Callable

from decoder_svc.scheduling.encoder_cache_manager import EncoderCacheManager
from decoder_svc.scheduling.kv_cache.kv_cache_manager import KVCacheManager, PrefixHit
from decoder_svc.scheduling.kv_cache.kv_group import SlidingGroupSize
from decoder_svc.scheduling.kv_cache.state_group import StateGroupSize
from decoder_svc.scheduling.prompt import ImageItem, Prompt, Span
from decoder_svc.scheduling.request import DEFAULT_SCOPE, CacheScope, Request, RequestId
from decoder_svc.scheduling.row_range import RowRange
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.scheduler import Scheduler
from decoder_svc.scheduling.scheduler_limits import SchedulerLimits
from decoder_svc.scheduling.scheduler_output import SampledToken, SchedulerOutput, TokenUpdate
from decoder_svc.scheduling.speculation import NO_SPECULATION, SpeculationLimits
from lookonce.content_key import (
    DEFAULT_TENANT,
    ContentKey,
    EncoderFingerprint,
    ProcessorOptions,
    content_key,
    image_digest,
)
from lookonce.families.base import Mask

IMAGE_TOKEN = 1
BLOCK_SIZE = 4


def key(name: str) -> ContentKey:
    """The key of a picture that is only a name."""
    return content_key(image_digest(name.encode()), EncoderFingerprint("f"), ProcessorOptions(), DEFAULT_TENANT)


def image(name: str, offset: int, num_rows: int, *, data: bytes | None = b"file") -> ImageItem:
    """A picture whose every token takes a row."""
    return ImageItem(key(name), Span(offset, num_rows), num_rows, ProcessorOptions(), data)


def rows(start: int, stop: int) -> RowRange:
    """Returns the rows [start, stop)."""
    return RowRange(start, stop)


def request(
    name: str,
    num_tokens: int,
    images: tuple[ImageItem, ...] = (),
    *,
    max_tokens: int = 3,
    arrival_s: float = 0.0,
    priority: int = 0,
    stop_token_ids: frozenset[int] = frozenset(),
    text: str | None = None,
    deadline_s: float | None = None,
    cache_scope: CacheScope = DEFAULT_SCOPE,
    mask: Mask = Mask.CAUSAL,
    tenant: str = "",
) -> Request:
    """A request whose prompt is text but for its images; requests with the same `text` (default: name) share it."""
    first_id = 1000 * (1 + zlib.crc32((name if text is None else text).encode()))
    token_ids = [first_id + i for i in range(num_tokens)]
    for item in images:
        token_ids[item.span.offset : item.span.stop] = [IMAGE_TOKEN] * item.span.length
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_token_ids)
    return Request(
        RequestId(name),
        Prompt(tuple(token_ids), images, mask=mask),
        params,
        arrival_s=arrival_s,
        priority=priority,
        deadline_s=deadline_s,
        cache_scope=cache_scope,
        tenant=tenant,
    )


def scheduler(
    *,
    token_budget: int = 16,
    num_blocks: int = 64,
    cache_rows: int = 64,
    max_num_seqs: int = 8,
    context: int = 200,
    rows_asked: int = 64,
    block_size: int = BLOCK_SIZE,
    deterministic: bool = False,
    min_tokens_before_missing_row: int = 1,
    overlap_encode: bool = True,
    sliding: SlidingGroupSize | None = None,
    states: StateGroupSize | None = None,
    speculation: SpeculationLimits = NO_SPECULATION,
    clock: Callable[[], float] = lambda: 0.0,
) -> Scheduler:
    """A scheduler with blocks of four tokens and a clock that stands still."""
    return Scheduler(
        SchedulerLimits(
            token_budget,
            max_num_seqs,
            context,
            rows_asked,
            deterministic,
            min_tokens_before_missing_row,
            overlap_encode,
            speculation=speculation,
        ),
        KVCacheManager(num_blocks, block_size, deterministic=deterministic, sliding=sliding, states=states),
        EncoderCacheManager(cache_rows),
        clock=clock,
    )


def fill(manager: KVCacheManager, one: Request) -> PrefixHit:
    """Admits a request and computes all its tokens; returns what was found for it."""
    hit = manager.find_prefix(one)
    assert manager.can_admit(one, hit)
    manager.admit(one, hit)
    one.num_computed_tokens = hit.num_tokens
    manager.allocate(one, one.num_tokens - hit.num_tokens)
    one.num_computed_tokens = one.num_tokens
    manager.publish(one, one.num_tokens)
    manager.release_unseen(one)
    manager.check_integrity()
    return hit


def finish_step(target: Scheduler, output: SchedulerOutput, token_id: int = 7) -> list[TokenUpdate]:
    """Pretends that the runner computed the step and sampled `token_id` everywhere."""
    sampled = [SampledToken(chunk.request_id, token_id, None) for chunk in output.chunks if chunk.samples]
    updates = target.update(output, sampled)
    target.check_integrity()
    return updates


def step(target: Scheduler, *, rows_arrive: bool = True, are_encoded: bool = True) -> SchedulerOutput:
    """One whole step; fetches that it started arrive right after it, from an encoder or else from the shared cache."""
    output = target.schedule()
    finish_step(target, output)
    if rows_arrive:
        for fetch in output.fetches:
            target.rows_arrived(fetch.key, fetch.rows, fetch.num_image_rows if are_encoded else 0)
    return output


def chunks(output: SchedulerOutput) -> list[tuple[str, int, int]]:
    """(request, start, tokens) of a step."""
    return [(chunk.request_id, chunk.start, chunk.num_tokens) for chunk in output.chunks]
