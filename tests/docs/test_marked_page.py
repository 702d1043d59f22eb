"""Tests of replacing the generated part of a page."""

from __future__ import annotations

import pytest

from docs.marked_page import replace_between


def test_only_the_text_between_the_marks_changes() -> None:
    page = "# Title\n<!-- begin -->\nold\n<!-- end -->\ntail\n"
    expected = "# Title\n<!-- begin -->\n\nnew\n\n<!-- end -->\ntail\n"
    assert replace_between(page, "<!-- begin -->", "<!-- end -->", "new") == expected
    assert replace_between(expected, "<!-- begin -->", "<!-- end -->", "new") == expected


@pytest.mark.parametrize("page", ["# Title\n", "<!-- begin -->\n", "<!-- end -->\n"])
def test_a_page_without_both_marks_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="lacks the marks"):
        replace_between(page, "<!-- begin -->", "<!-- end -->", "new")
