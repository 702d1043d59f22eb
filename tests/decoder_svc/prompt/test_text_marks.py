"""Marks around texts, by which they are found in what a template writes."""

from __future__ import annotations

import json

import jinja2
import pytest
from hypothesis import example, given
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


NAMES = ("name", "type", "Title", "$ref")
SORTED = "{%% for name, text in %s %%}[{{ name }}: {{ text }}]{%% endfor %%}"


@given(
    st.lists(
        st.text(alphabet='anTyz<e 0!"#$rf', min_size=1, max_size=6)
        | st.sampled_from([*NAMES, "type1", "names", "tit", "<eos>", "$", "$re", "$refs"]),
        unique_by=str.strip,
        max_size=8,
    )
)
@example(["<eos>", '"', "#", "!", "$ref", "0", "$"])
@pytest.mark.parametrize("sorting", ["data|dictsort", "data.items()|sort(attribute=0)"])
def test_names_sort_as_without_marks_also_among_names_that_have_none(sorting: str, texts: list[str]) -> None:
    texts = [text.strip() for text in texts if text.strip()]
    marks = TextMarks(texts, NAMES)
    template = jinja2.Environment().from_string(SORTED % sorting)
    rendered = template.render(data={text if text in NAMES else marks.bordered(text): "x" for text in texts})
    pieces = marks.bordered_pieces(rendered)
    assert pieces is not None
    found = "".join(piece.text for piece in pieces)
    if len({text.lower() for text in texts}) == len(texts):
        assert found == template.render(data=dict.fromkeys(texts, "x"))
    assert [piece.text for piece in pieces if not piece.is_trusted] == sorted(
        (text for text in texts if text not in NAMES), key=lambda text: (text.lower(), text)
    )


def test_a_mark_without_its_beginning_is_noticed() -> None:
    marks = TextMarks(["typical"], ["type"])
    assert marks.bordered("typical").startswith("type")
    for text in (marks.bordered("typical")[1:], f"x{marks.whole('typical')[2:]}"):
        assert marks.bordered_pieces(text) is None
        with pytest.raises(InvalidParameterError, match="cuts"):
            marks.whole_pieces(text)


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
