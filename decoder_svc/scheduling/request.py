"""One request as the engine sees it: prompt, parameters, progress. Plain Python."""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NewType

from lookonce.content_key import ContentKey, ProcessorOptions
from lookonce.families.base import Mask
from lookonce.image_file import ImageFile

RequestId = NewType("RequestId", str)

BlockHash = NewType("BlockHash", bytes)
"""The name of a KV block by what it holds: SHA-256, 32 bytes (block_hash.py)."""


class RowSource(enum.Enum):
    """Where an image's rows came from."""

    ENCODED = "encoded"
    SHARED_CACHE = "shared"
    # They were on this decoder already.
    DEVICE = "device"


class FinishReason(enum.Enum):
    """Why a request ended with an answer."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class RequestState(enum.Enum):
    """Where a request stands in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated sampling parameters; defaults are already filled in."""

    # 0 is greedy.
    temperature: float = 0.0
    top_p: float = 1.0
    # None: no limit.
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # (token id, addend) pairs.
    logit_bias: tuple[tuple[int, float], ...] = ()
    # Budget of generated tokens.
    max_tokens: int = 256
    # No end of sequence and no stop id before this many tokens.
    min_tokens: int = 0
    # End-of-sequence ids of the model (empty with ignore_eos) and the request's own stop ids.
    stop_token_ids: frozenset[int] = frozenset()
    # None: drawn by the server.
    seed: int | None = None
    # Alternatives reported per generated token; 0: the sampled token's only; None: no log probabilities.
    logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [offset, offset + length) of a prompt."""

    offset: int
    length: int

    @property
    def stop(self) -> int:
        """One past the last token."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class ImageItem:
    """One image (or pair of video frames) in a prompt: where its tokens are and which rows they take."""

    key: ContentKey
    span: Span
    # Rows of the embedding.
    num_rows: int
    options: ProcessorOptions
    # The original file where the request brought it; None for a reference by digest.
    data: ImageFile | None = field(repr=False)
    # Of each row its token, counted from the span's first, ascending. None: token i takes row i.
    row_tokens: tuple[int, ...] | None = None
    # Of a pair of frames that continues a video: its rotary positions' time, counted from the video's beginning.
    time: int | None = None

    def rows_between(self, start: int, stop: int) -> tuple[int, int]:
        """Rows [first, last) that the prompt's tokens [start, stop) take; first == last when they take none."""
        first = max(start, self.span.offset) - self.span.offset
        last = min(stop, self.span.stop) - self.span.offset
        if first >= last:
            return (0, 0)
        if self.row_tokens is not None:
            first, last = bisect_left(self.row_tokens, first), bisect_left(self.row_tokens, last)
        return (first, last) if first < last else (0, 0)

    def tokens_with_row(self, start: int, stop: int) -> list[int]:
        """Prompt tokens of [start, stop) that take a row, one per row of `rows_between`."""
        first, last = self.rows_between(start, stop)
        return [self.token_of_row(row) for row in range(first, last)]

    def token_of_row(self, row: int) -> int:
        """The prompt token that takes a row."""
        return self.span.offset + (row if self.row_tokens is None else self.row_tokens[row])


@dataclass(frozen=True, slots=True)
class Positions:
    """Rotary positions of a prompt where they are not simply 0, 1, 2, …"""

    # [num_axes][num_prompt_tokens].
    axes: tuple[tuple[int, ...], ...]
    # A generated token at index i has position i + delta on every axis.
    delta: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids with every image placeholder expanded."""

    token_ids: tuple[int, ...]
    # In prompt order, spans disjoint.
    images: tuple[ImageItem, ...] = ()
    # None: 0, 1, 2, …
    positions: Positions | None = None
    mask: Mask = Mask.CAUSAL

    @property
    def mutual_spans(self) -> tuple[Span, ...]:
        """Stretches whose tokens all see each other, also those behind them; in order. A step never cuts one."""
        if self.mask is Mask.PROMPT:
            return (Span(0, len(self.token_ids)),)
        return tuple(item.span for item in self.images) if self.mask is Mask.IMAGE else ()

    def last_cut(self, start: int, stop: int) -> int:
        """Where a step that computes from `start` on may end: the last such place up to `stop`, or `start` itself."""
        # Nearly every prompt, in every step.
        if self.mask is Mask.CAUSAL:
            return stop
        for span in self._mutual_spans_behind(start):
            if span.offset < stop < span.stop:
                return max(start, span.offset)
        return stop

    def first_cut(self, start: int, stop: int) -> int:
        """Where a step that computes from `start` on may end at the earliest if it should end at `stop`."""
        if self.mask is Mask.CAUSAL:
            return stop
        for span in self._mutual_spans_behind(start):
            if span.offset <= start:
                return span.stop
            if span.offset < stop:
                return span.offset
        return stop

    def _mutual_spans_behind(self, start: int) -> Iterator[Span]:
        if start < len(self.token_ids):
            yield from (span for span in self.mutual_spans if span.stop > start)

    def first_seen(self, start: int, window: int) -> int:
        """The first token that a layer with this window looks at when tokens from `start` on are computed.

        `window` counts the token that looks. Where the whole prompt sees itself, it does so beyond the window.
        """
        if self.mask is Mask.PROMPT and start < len(self.token_ids):
            return 0
        return max(0, start - window + 1)

    @property
    def num_image_tokens(self) -> int:
        """Placeholder tokens that take a row."""
        return sum(item.num_rows for item in self.images)


@dataclass(frozen=True, slots=True)
class CacheScope:
    """With whom a request shares KV blocks, beyond having the same tokens and images."""

    # Tenant and salt of the caller; requests with different ones never share. Empty: the default tenant, no salt.
    salt: bytes = b""
    # Adapter that changes keys and values; None: the base model.
    adapter: str | None = None
    # Neither look for cached blocks nor let others find what is computed.
    bypass: bool = False


DEFAULT_SCOPE = CacheScope()


@dataclass(slots=True)
class RequestUsage:
    """Token accounting of one request; the words are those of the wire contract's Usage."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    image_tokens: int = 0
    cached_image_tokens: int = 0
    encoded_image_tokens: int = 0
    skipped_image_tokens: int = 0
    completion_tokens: int = 0
    accepted_draft_tokens: int = 0
    queue_time_s: float = 0.0
    time_to_first_token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one generated position: (token id, logprob), the sampled token first."""

    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What happened to a request since the previous output; several steps are coalesced when its reader is behind."""

    # Newly generated ids; empty in the first output (admission) and possibly in the last.
    token_ids: tuple[int, ...]
    # One per new token where they were asked for, else empty.
    logprobs: tuple[TokenLogprobs, ...]
    # Set in exactly one output, the last.
    finish_reason: FinishReason | None
    # A snapshot.
    usage: RequestUsage
    # Of each new token whether it was guessed before it was sampled; empty: none was.
    was_draft: tuple[bool, ...] = ()


class Request:
    """The scheduler's record of one request. Only the engine thread touches it after submission."""

    def __init__(
        self,
        request_id: RequestId,
        prompt: Prompt,
        params: SamplingParams,
        *,
        arrival_s: float,
        priority: int = 0,
        deadline_s: float | None = None,
        cache_scope: CacheScope = DEFAULT_SCOPE,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        # Monotonic clock, seconds.
        self.arrival_s = arrival_s
        self.deadline_s = deadline_s
        # Lower runs earlier.
        self.priority = priority
        self.cache_scope = cache_scope
        # Prompt, then generated.
        self.token_ids = list(prompt.token_ids)
        # Shows an image that is to be forgotten: its blocks get no names any more.
        self.is_private = False
        # Tokens whose KV is in the cache; catches up with len(token_ids).
        self.num_computed_tokens = 0
        self.state = RequestState.WAITING
        self.finish_reason: FinishReason | None = None
        self.num_preemptions = 0
        # Of the full blocks, as far as anybody needed them; extended by BlockHasher only, never computed again.
        self.block_hashes: list[BlockHash] = []
        # Images before this index end before the first block without a hash.
        self.num_images_hashed = 0
        # Keys and values of tokens before this index are in blocks that were found: others' too, never to be written.
        self.num_shared_tokens = 0
        # Rows of each image whose tokens the prefix cache had when the request was first admitted.
        self.num_skipped_rows = [0] * len(prompt.images)
        # Images before this index are computed to their last token.
        self.num_images_passed = 0
        # Images already counted in `usage`; a recomputation after preemption does not count again.
        self.num_images_accounted = 0
        # Where each image's rows came from as this request first saw them; None: they were not there yet.
        self.row_sources: dict[ContentKey, RowSource | None] = {}
        self.usage = RequestUsage(prompt_tokens=len(prompt.token_ids), image_tokens=prompt.num_image_tokens)

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens, image placeholders included."""
        return len(self.prompt.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens."""
        return len(self.token_ids) - len(self.prompt.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """Generated ids."""
        return self.token_ids[self.num_prompt_tokens :]

    def finish_reason_now(self, max_context_tokens: int) -> FinishReason | None:
        """Why the latest generated token is the last; None when another may follow."""
        if self.token_ids[-1] in self.params.stop_token_ids and self.num_output_tokens >= self.params.min_tokens:
            return FinishReason.STOP
        if self.num_output_tokens >= self.params.max_tokens or self.num_tokens >= max_context_tokens:
            return FinishReason.LENGTH
        return None

    def __repr__(self) -> str:
        return f"Request({self.request_id}, {self.state.value}, {self.num_computed_tokens}/{self.num_tokens} tokens)"
