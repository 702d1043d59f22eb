"""A prompt as the engine takes it: token ids, its images' spans and rows, rotary positions, attention mask."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from decoder_svc.scheduling.window import Window
from lookonce.content_key import ContentKey, ProcessorOptions
from lookonce.families.base import Mask
from lookonce.image_file import ImageFile


@dataclass(frozen=True, slots=True)
class Span:
    """The prompt tokens [offset, offset + length)."""

    offset: int
    length: int

    @property
    def stop(self) -> int:
        """One past the last token."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class ImageItem:
    """One image (or entry of video frames) in a prompt: the span of its tokens and the embedding rows they take."""

    key: ContentKey
    span: Span
    # Rows of the embedding that the prompt shows.
    num_rows: int
    options: ProcessorOptions
    # The original file if the request contained it; None for a reference by digest.
    data: ImageFile | None = field(repr=False)
    # The token that takes each row, as an ascending index into the span. None: token i takes row i.
    row_tokens: tuple[int, ...] | None = None
    # Positions also depend on this number. It is the time of the second and later pairs of frames of a video, counted
    # from its beginning, or the number of markers that end a prompt behind its last image, in families with a canvas.
    time: int | None = None
    # Rows at the end of the embedding that the prompt does not show.
    num_unused_rows: int = 0

    def rows_between(self, start: int, stop: int) -> tuple[int, int]:
        """Returns the rows [first, last) that the prompt tokens [start, stop) take; first == last if they take none."""
        first = max(start, self.span.offset) - self.span.offset
        last = min(stop, self.span.stop) - self.span.offset
        if first >= last:
            return (0, 0)
        if self.row_tokens is not None:
            first, last = bisect_left(self.row_tokens, first), bisect_left(self.row_tokens, last)
        return (first, last) if first < last else (0, 0)

    def tokens_with_row(self, start: int, stop: int) -> list[int]:
        """Returns the prompt tokens of [start, stop) that take a row, one per row of `rows_between`."""
        first, last = self.rows_between(start, stop)
        return [self.token_of_row(row) for row in range(first, last)]

    def token_of_row(self, row: int) -> int:
        """Returns the index of the prompt token that takes a row."""
        return self.span.offset + (row if self.row_tokens is None else self.row_tokens[row])


@dataclass(frozen=True, slots=True)
class Positions:
    """Rotary positions of a prompt whose positions are not simply 0, 1, 2, …"""

    # [num_axes][num_prompt_tokens].
    axes: tuple[tuple[int, ...], ...]
    # The generated token at index i has position i + delta on every axis.
    delta: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids in which every image placeholder is expanded to the image's tokens."""

    token_ids: tuple[int, ...]
    # In prompt order, with disjoint spans.
    images: tuple[ImageItem, ...] = ()
    # None: positions are 0, 1, 2, …
    positions: Positions | None = None
    mask: Mask = Mask.CAUSAL
    # Token of the last removal of images that this process had heard of when it received the request; None: unknown.
    removal_token: bytes | None = None

    @property
    def mutual_spans(self) -> tuple[Span, ...]:
        """Spans with bidirectional attention, in order: every token sees the whole span. No step may end inside one."""
        if self.mask is Mask.PROMPT:
            return (Span(0, len(self.token_ids)),)
        return tuple(item.span for item in self.images) if self.mask is Mask.IMAGE else ()

    def last_cut(self, start: int, stop: int) -> int:
        """Returns the last index in [start, stop] at which a step that begins at `start` may end."""
        # Fast path: nearly every prompt, in every step.
        if self.mask is Mask.CAUSAL:
            return stop
        for span in self._mutual_spans_behind(start):
            if span.offset < stop < span.stop:
                return max(start, span.offset)
        return stop

    def first_cut(self, start: int, stop: int) -> int:
        """Returns where a step that begins at `start` and should end at `stop` has to end at the earliest.

        That is `stop`, unless it lies inside a bidirectional span: then the span's begin, or its end if the step begins
        in the span.
        """
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

    def first_seen(self, start: int, window: Window) -> int:
        """Returns the first token that a layer with this window attends to when tokens from `start` on are computed.

        A prompt with a fully bidirectional mask ignores the window.
        """
        if self.mask is Mask.PROMPT and start < len(self.token_ids):
            return 0
        return window.first_seen(start)

    @property
    def num_image_tokens(self) -> int:
        """Number of placeholder tokens that take a row."""
        return sum(item.num_rows for item in self.images)
