"""The tokens that replace one image's placeholder, as text or as ids, and which of them take embedding rows."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass

from lookonce.families.base import FramePlace, ImageShape, SharedRow, SliceGrid


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """The tokens of an image of a given size, or of an entry of video frames."""

    # The token of which each occurrence takes one of the image's own rows.
    row_token_id: int
    # Replaces the placeholder in a rendered prompt. Each image token in it stands for one run of image tokens.
    text: str
    # Length of each run in tokens; runs take the image's own rows in order.
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
    # Rows at the end of the embedding that the prompt does not show.
    num_unused_rows: int = 0
    # The slices behind the whole image; None if there are none or positions do not depend on them.
    slices: SliceGrid | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows that the prompt shows."""
        return self.span_length if self.row_tokens is None else len(self.row_tokens)

    @property
    def span_token_ids(self) -> tuple[int, ...]:
        """The tokens of the span."""
        return self.token_ids[self.span_start : self.span_start + self.span_length]


def layout_of(
    shape: ImageShape, image_token: str, image_token_id: int, encode: Callable[[str], Sequence[int]]
) -> ImageLayout:
    """Returns the layout of a shape. `encode` tokenizes without adding special tokens.

    Raises ValueError if tokenizing the texts between the rows adds or removes tokens that take rows.
    """
    text = shape.text(image_token)
    runs = tuple(part for part in shape.parts if isinstance(part, int))
    compact = [image_token_id] if text == image_token else list(encode(text))
    if compact.count(image_token_id) != len(runs):
        raise ValueError(f"{text!r} has {compact.count(image_token_id)} image tokens instead of {len(runs)}")
    token_ids = tuple(expanded(compact, (image_token_id,), runs))
    shared = {token_id for part in shape.parts if isinstance(part, SharedRow) for token_id in encode(part.text)}
    takers = [index for index, token_id in enumerate(token_ids) if token_id == image_token_id or token_id in shared]
    if len(takers) != shape.num_rows:
        raise ValueError(f"{text!r} has {len(takers)} tokens for {shape.num_rows} rows")
    start, stop = takers[0], takers[-1] + 1
    return ImageLayout(
        row_token_id=image_token_id,
        text=text,
        runs=runs,
        token_ids=token_ids,
        span_start=start,
        span_length=stop - start,
        row_tokens=None if len(takers) == stop - start else tuple(index - start for index in takers),
        grid=shape.grid,
        place=shape.place,
        num_unused_rows=shape.num_unused_rows,
        slices=shape.slices,
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
