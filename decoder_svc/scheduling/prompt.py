"""A prompt as the engine takes it: token ids, its images' spans and rows, rotary positions, attention mask."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from lookonce.content_key import ContentKey, ProcessorOptions
from lookonce.families.base import Mask
from lookonce.image_file import ImageFile


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
