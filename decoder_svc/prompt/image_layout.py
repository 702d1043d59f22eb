"""What one image's placeholder becomes: text to tokenize with the prompt, or token ids, and which tokens take rows."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass

from lookonce.families.base import FramePlace, ImageShape


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """The tokens of an image of a given size, or of a pair of video frames."""

    # The token that takes rows.
    row_token_id: int
    # Takes the placeholder's place in a rendered prompt; each image token in it stands for a run of them.
    text: str
    # Length of each run, in tokens that take the next rows.
    runs: tuple[int, ...]
    # Takes the placeholder's place in a prompt of token ids, runs in full.
    token_ids: tuple[int, ...]
    # Of `token_ids`: those from the first that takes a row to the last that does.
    span_start: int
    span_length: int
    # Of each row its token, counted from the span's first, ascending. None: token i takes row i.
    row_tokens: tuple[int, ...] | None = None
    # Merged patches (frames, height, width) where positions depend on them, else None.
    grid: tuple[int, int, int] | None = None
    # Of a pair of frames whose time counts from its video's beginning.
    place: FramePlace | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the embedding."""
        return sum(self.runs)

    @property
    def span_token_ids(self) -> tuple[int, ...]:
        """The tokens of the span."""
        return self.token_ids[self.span_start : self.span_start + self.span_length]


def layout_of(
    shape: ImageShape, image_token: str, image_token_id: int, encode: Callable[[str], Sequence[int]]
) -> ImageLayout:
    """The layout of a shape. `encode` tokenizes without adding special tokens.

    Raises ValueError when the texts between the rows spell the image token themselves.
    """
    text = "".join(image_token if isinstance(part, int) else part for part in shape.parts)
    runs = tuple(part for part in shape.parts if isinstance(part, int))
    compact = [image_token_id] if text == image_token else list(encode(text))
    if compact.count(image_token_id) != len(runs):
        raise ValueError(f"{text!r} has {compact.count(image_token_id)} image tokens instead of {len(runs)}")
    token_ids = tuple(expanded(compact, (image_token_id,), runs))
    start = token_ids.index(image_token_id)
    stop = len(token_ids) - token_ids[::-1].index(image_token_id)
    return ImageLayout(
        row_token_id=image_token_id,
        text=text,
        runs=runs,
        token_ids=token_ids,
        span_start=start,
        span_length=stop - start,
        row_tokens=_row_tokens(token_ids[start:stop], image_token_id),
        grid=shape.grid,
        place=shape.place,
    )


def expanded(token_ids: Sequence[int], row_token_ids: Container[int], runs: Sequence[int]) -> Iterator[int]:
    """The ids with the k-th token that takes rows as often as the k-th run says; there are as many runs as those."""
    upcoming = iter(runs)
    for token_id in token_ids:
        if token_id in row_token_ids:
            yield from (token_id,) * next(upcoming)
        else:
            yield token_id


def _row_tokens(token_ids: Sequence[int], image_token_id: int) -> tuple[int, ...] | None:
    tokens = tuple(index for index, token_id in enumerate(token_ids) if token_id == image_token_id)
    return None if len(tokens) == len(token_ids) else tokens
