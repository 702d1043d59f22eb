"""The tokens that replace one image's placeholder, as text or as ids, and which of them take embedding rows."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass

from lookonce.families.base import FramePlace, ImageShape


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """The tokens of an image of a given size, or of a pair of video frames."""

    # The token of which each occurrence takes one row.
    row_token_id: int
    # Replaces the placeholder in a rendered prompt. Each image token in it stands for one run of image tokens.
    text: str
    # Length of each run in tokens; runs take the image's rows in order.
    runs: tuple[int, ...]
    # Replaces the placeholder in a prompt of token ids, with every run written in full.
    token_ids: tuple[int, ...]
    # The span within `token_ids` from the first token that takes a row to the last one.
    span_start: int
    span_length: int
    # The token that takes each row, as an ascending index into the span. None: token i takes row i.
    row_tokens: tuple[int, ...] | None = None
    # Number of merged patches (frames, height, width) if positions depend on them, else None.
    grid: tuple[int, int, int] | None = None
    # Index and time of a pair of frames in its video; None for an image.
    place: FramePlace | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows of the embedding."""
        return sum(self.runs)

    @property
    def span_token_ids(self) -> tuple[int, ...]:
        """The tokens of the span."""
        return self.token_ids[self.span_start : self.span_start + self.span_length]


def layout_of(
    shape: ImageShape, image_token: str, image_token_id: int, encode: Callable[[str], Sequence[int]]
) -> ImageLayout:
    """Returns the layout of a shape. `encode` tokenizes without adding special tokens.

    Raises ValueError if tokenizing the texts between the rows adds or removes image tokens.
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
    """Yields the ids with the k-th row token repeated as often as the k-th run is long.

    `runs` must have one entry per row token in `token_ids`.
    """
    upcoming = iter(runs)
    for token_id in token_ids:
        if token_id in row_token_ids:
            yield from (token_id,) * next(upcoming)
        else:
            yield token_id


def _row_tokens(token_ids: Sequence[int], image_token_id: int) -> tuple[int, ...] | None:
    tokens = tuple(index for index, token_id in enumerate(token_ids) if token_id == image_token_id)
    return None if len(tokens) == len(token_ids) else tokens
