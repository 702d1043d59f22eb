"""Rotary positions by their definition; that they equal the models' own is shown in test_family.py."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from decoder_svc.prompt.rotary_positions import PlacedGrid, mrope_positions, sequence_positions, xdrope_positions
from decoder_svc.scheduling.prompt import Positions, Span
from lookonce.families.base import FramePlace


def test_positions_from_zero_need_no_table() -> None:
    assert sequence_positions(4, 0) is None
    assert sequence_positions(3, 1) == Positions(((1, 2, 3),), delta=1)


def test_text_an_image_and_text() -> None:
    """Two tokens, an image of 1 × 2 × 3 cells, two tokens: the text goes on behind the image's largest position."""
    positions = mrope_positions(10, [PlacedGrid(Span(2, 6), (1, 2, 3))])
    assert positions.axes == (
        (0, 1, 2, 2, 2, 2, 2, 2, 5, 6),
        (0, 1, 2, 2, 2, 3, 3, 3, 5, 6),
        (0, 1, 2, 3, 4, 2, 3, 4, 5, 6),
    )
    # The next token has index 10 and position 7.
    assert positions.delta == -3


def test_the_pairs_of_a_video_share_height_and_width_and_differ_in_time() -> None:
    """One token, two pairs of 1 × 1 × 2 cells with one token of text between, one token."""
    pairs = [
        PlacedGrid(Span(1, 2), (1, 1, 2), FramePlace(0, 0)),
        PlacedGrid(Span(3, 2), (1, 1, 2), FramePlace(1, 4)),
    ]
    positions = mrope_positions(6, pairs)
    assert positions.axes == ((0, 1, 1, 5, 5, 6), (0, 1, 1, 1, 1, 6), (0, 1, 2, 1, 2, 6))


def test_a_second_video_begins_behind_the_first() -> None:
    pairs = [
        PlacedGrid(Span(offset, 1), (1, 1, 1), FramePlace(index, 3 * index)) for offset, index in enumerate([0, 1])
    ]
    again = [PlacedGrid(Span(2, 1), (1, 1, 1), FramePlace(0, 0))]
    assert mrope_positions(3, pairs + again).axes[0] == (0, 3, 4)


def test_text_and_images_on_four_axes() -> None:
    """A token, an image of 2 × 2 cells between markers, a token, an image of 1 × 2 cells between markers, a token."""
    positions = xdrope_positions(13, [PlacedGrid(Span(1, 6), (1, 2, 2)), PlacedGrid(Span(8, 4), (1, 1, 2))])
    assert positions.axes == (
        (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12),
        (0, 1, 0, 1, 0, 1, 6, 7, 8, 0, 1, 11, 12),
        (0, 1, 0, 0, 1, 1, 6, 7, 8, 0, 0, 11, 12),
        (0, 1, 0, 0, 0, 0, 6, 7, 8, 1, 1, 11, 12),
    )
    assert positions.delta == 0


@given(
    grids=st.lists(st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3)), max_size=3),
    gap=st.integers(0, 3),
)
def test_every_token_has_a_position_and_the_next_one_follows_the_largest(
    grids: list[tuple[int, int, int]], gap: int
) -> None:
    images: list[PlacedGrid] = []
    end = 0
    for grid in grids:
        frames, height, width = grid
        images.append(PlacedGrid(Span(end + gap, frames * height * width), grid))
        end = images[-1].span.stop
    num_tokens = end + gap
    positions = mrope_positions(num_tokens, images)
    assert [len(axis) for axis in positions.axes] == [num_tokens] * 3
    largest = max((max(axis) for axis in positions.axes if axis), default=-1)
    assert num_tokens + positions.delta == largest + 1
