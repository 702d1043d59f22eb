"""Spans, rows and cuts of a prompt, against definitions that look at one token at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from decoder_svc.scheduling.prompt import ImageItem, Prompt, Span
from decoder_svc.scheduling.window import Window
from lookonce.content_key import ProcessorOptions
from lookonce.families.base import Mask
from tests.decoder_svc.scheduling.simulation import key


@st.composite
def items(draw: st.DrawFn) -> ImageItem:
    """An image of which every token, or only some, take a row."""
    offset, length = draw(st.integers(0, 6)), draw(st.integers(1, 8))
    row_tokens = draw(st.none() | st.lists(st.integers(0, length - 1), min_size=1, unique=True).map(sorted))
    num_rows = length if row_tokens is None else len(row_tokens)
    tokens = None if row_tokens is None else tuple(row_tokens)
    return ImageItem(key("x"), Span(offset, length), num_rows, ProcessorOptions(), None, tokens)


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    """A prompt with up to three images, some of them without text between."""
    images: list[ImageItem] = []
    end = 0
    for _ in range(draw(st.integers(0, 3))):
        span = Span(end + draw(st.integers(0, 3)), draw(st.integers(1, 5)))
        images.append(ImageItem(key("x"), span, span.length, ProcessorOptions(), None))
        end = span.stop
    num_tokens = end + draw(st.integers(1, 4))
    return Prompt(tuple(range(num_tokens)), tuple(images), mask=draw(st.sampled_from(Mask)))


@given(item=items(), start=st.integers(0, 16), length=st.integers(0, 16))
def test_rows_between_are_those_whose_tokens_are_between(item: ImageItem, start: int, length: int) -> None:
    between = [row for row in range(item.num_rows) if start <= item.token_of_row(row) < start + length]
    first, last = item.rows_between(start, start + length)
    assert list(range(first, last)) == between
    assert item.tokens_with_row(start, start + length) == [item.token_of_row(row) for row in between]


def can_end_at(prompt: Prompt, index: int) -> bool:
    """Whether a step may end before token `index`, by definition."""
    return not any(span.offset < index < span.stop for span in prompt.mutual_spans)


@given(prompt=prompts(), data=st.data())
def test_the_last_cut_is_the_last_place_where_a_step_may_end(prompt: Prompt, data: st.DataObject) -> None:
    num_tokens = len(prompt.token_ids)
    start = data.draw(st.integers(0, num_tokens + 2).filter(lambda index: can_end_at(prompt, index)))
    stop = data.draw(st.integers(start, num_tokens + 3))
    allowed = [index for index in range(start, stop + 1) if index == start or can_end_at(prompt, index)]
    assert prompt.last_cut(start, stop) == allowed[-1]


@given(prompt=prompts(), data=st.data())
def test_the_first_cut_makes_progress_and_cuts_nothing(prompt: Prompt, data: st.DataObject) -> None:
    num_tokens = len(prompt.token_ids)
    start = data.draw(st.integers(0, num_tokens - 1).filter(lambda index: can_end_at(prompt, index)))
    stop = data.draw(st.integers(start + 1, num_tokens))
    cut = prompt.first_cut(start, stop)
    assert cut > start
    assert can_end_at(prompt, cut)
    # It goes beyond the wish only where every earlier end would cut a span.
    assert cut <= stop or not any(can_end_at(prompt, index) for index in range(start + 1, cut))


@given(prompt=prompts(), start=st.integers(0, 30), size=st.integers(1, 8))
def test_a_window_reaches_back_unless_the_whole_prompt_sees_itself(prompt: Prompt, start: int, size: int) -> None:
    is_inside = prompt.mask is Mask.PROMPT and start < len(prompt.token_ids)
    seen = [token for token in range(start + 1) if is_inside or start - token < size]
    assert prompt.first_seen(start, Window(size)) == seen[0]
    of_chunk = [token for token in range(start + 1) if is_inside or start // size == token // size]
    assert prompt.first_seen(start, Window(size, is_chunked=True)) == of_chunk[0]


def test_mutual_spans_follow_the_mask() -> None:
    item = ImageItem(key("x"), Span(1, 3), 3, ProcessorOptions(), None)
    by_mask = {mask: Prompt((5, 1, 1, 1, 6), (item,), mask=mask).mutual_spans for mask in Mask}
    assert by_mask == {Mask.CAUSAL: (), Mask.IMAGE: (Span(1, 3),), Mask.PROMPT: (Span(0, 5),)}
