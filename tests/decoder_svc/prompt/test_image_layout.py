"""Layouts: which tokens replace a placeholder, and which of them take rows."""

from __future__ import annotations

import pytest

from decoder_svc.prompt.image_layout import expanded, layout_of
from lookonce.families.base import FramePlace, ImageShape, SharedRow

IMAGE, IMAGE_ID = "<i>", 9


def encode(text: str) -> list[int]:
    """One token per image token, else one per character."""
    ids: list[int] = []
    for index, part in enumerate(text.split(IMAGE)):
        ids += [IMAGE_ID] * (index > 0) + [ord(char) for char in part]
    return ids


def test_an_image_of_rows_only_needs_no_table_of_rows() -> None:
    layout = layout_of(ImageShape((4,), grid=(1, 2, 2)), IMAGE, IMAGE_ID, encode)
    assert (layout.text, layout.runs, layout.token_ids) == (IMAGE, (4,), (IMAGE_ID,) * 4)
    assert (layout.span_start, layout.span_length, layout.num_rows) == (0, 4, 4)
    assert layout.row_tokens is None
    assert layout.grid == (1, 2, 2)


def test_texts_between_and_around_the_rows_take_none() -> None:
    layout = layout_of(ImageShape(("[", 2, "\n", 3, "]")), IMAGE, IMAGE_ID, encode)
    assert layout.text == "[<i>\n<i>]"
    assert layout.token_ids == (ord("["), 9, 9, ord("\n"), 9, 9, 9, ord("]"))
    # The span is from the first row's token to the last one's, without the brackets.
    assert (layout.span_start, layout.span_length) == (1, 6)
    assert layout.span_token_ids == (9, 9, ord("\n"), 9, 9, 9)
    assert layout.row_tokens == (0, 1, 3, 4, 5)
    assert layout.num_rows == 5


def test_markers_take_rows_among_those_of_the_image() -> None:
    shape = ImageShape(("a", SharedRow("[", 1), 2, SharedRow("-", 4), 1, "\n", SharedRow("]", 0)))
    layout = layout_of(shape, IMAGE, IMAGE_ID, encode)
    assert layout.text == "a[<i>-<i>\n]"
    assert layout.span_token_ids == (ord("["), 9, 9, ord("-"), 9, ord("\n"), ord("]"))
    assert (layout.span_start, layout.runs, layout.row_tokens) == (1, (2, 1), (0, 1, 2, 3, 4, 6))
    assert layout.num_rows == shape.num_rows == 6
    assert shape.shared_rows == {0: 1, 3: 4, 5: 0}


def test_a_marker_of_several_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="3 tokens for 2 rows"):
        layout_of(ImageShape((SharedRow("ab", 0), 1)), IMAGE, IMAGE_ID, encode)


def test_the_place_of_a_frame_pair_is_kept() -> None:
    assert layout_of(ImageShape((1,), place=FramePlace(2, 5)), IMAGE, IMAGE_ID, encode).place == FramePlace(2, 5)


@pytest.mark.parametrize("text", ["<i>", "a<i>b"])
def test_a_text_that_spells_the_image_token_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="2 image tokens instead of 1"):
        layout_of(ImageShape((text, 2)), IMAGE, IMAGE_ID, encode)


def test_a_tokenizer_that_does_not_know_the_image_token_is_refused() -> None:
    with pytest.raises(ValueError, match="0 image tokens instead of 1"):
        layout_of(ImageShape(("[", 2)), IMAGE, IMAGE_ID, lambda text: [1] * len(text))


def test_each_row_token_becomes_its_run_in_order() -> None:
    assert list(expanded([1, 8, 2, 9, 9], (8, 9), [2, 1, 3])) == [1, 8, 8, 2, 9, 9, 9, 9]
