"""Marks around texts, by which they are found in what a template writes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder_svc.prompt.text_marks import TextMarks
from lookonce.errors import InvalidParameterError


@given(st.lists(st.text(max_size=6), max_size=6))
def test_texts_are_found_and_the_rest_is_the_template(texts: list[str]) -> None:
    marks = TextMarks()
    rendered = "".join(f"<{marks.bordered(text)}>" for text in texts)
    pieces = marks.bordered_pieces(rendered)
    assert pieces is not None
    assert "".join(piece.text for piece in pieces) == "".join(f"<{text}>" for text in texts)
    untrusted = [piece.text for piece in pieces if not piece.is_trusted]
    assert untrusted == [text.strip() for text in texts if text.strip()]
    whole = TextMarks()
    rendered = "".join(f"<{whole.whole(text)}>" for text in texts)
    assert whole.whole_pieces(rendered) == pieces


@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=8))
def test_marked_values_compare_and_sort_as_texts_do(texts: list[str]) -> None:
    marks = TextMarks(texts)
    texts = [text.strip() for text in texts if text.strip()]
    marked = {text: marks.bordered(text) for text in texts}
    assert len(set(marked.values())) == len(set(texts))
    in_order = sorted(set(texts), key=lambda text: (text.lower(), text))
    assert sorted(marked.values()) == [marked[text] for text in in_order]


def test_values_in_json_are_found_as_json_writes_them() -> None:
    marks = TextMarks(['a "b"\n'])
    rendered = json.dumps({"x": marks.bordered('a "b"\n')})
    pieces = marks.whole_pieces(rendered)
    assert [(piece.text, piece.is_trusted) for piece in pieces] == [
        ('{"x": "', True),
        ('a \\"b\\"', False),
        ('\\n"}', True),
    ]


def test_a_piece_without_marks_is_noticed() -> None:
    """The middle of a text that a template has split looks like the template's own text."""
    marks = TextMarks(["never written"])
    rendered = f"<{marks.bordered('aX<eos>Xc').split('X')[1]}>"
    assert marks.bordered_pieces(rendered) is None


@pytest.mark.parametrize("damaged", [slice(0, -1), slice(1, None), slice(0, 50), slice(50, None)])
def test_a_text_that_was_cut_is_noticed(damaged: slice) -> None:
    marks = TextMarks(["value"])
    rendered = marks.bordered("value")[damaged]
    assert marks.bordered_pieces(rendered) is None
    with pytest.raises(InvalidParameterError, match="cuts"):
        marks.whole_pieces(rendered)
