"""The end of a JSON value in a text that comes piece by piece."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from decoder_svc.tools.json_scanner import JsonScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
).filter(lambda value: isinstance(value, list | dict))


@given(VALUES, st.text(), st.booleans(), st.data())
def test_the_end_is_found_behind_the_last_bracket(
    value: object, rest: str, is_ascii: bool, data: st.DataObject
) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii)
    whole = text + rest
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)), max_size=6)))
    scanner, read = JsonScanner(), 0
    for start, stop in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        end = scanner.end_in(whole[start:stop])
        if end is not None:
            read = start + end
            break
    assert read == len(text)


def test_brackets_that_are_open_already_count() -> None:
    assert JsonScanner(depth=1).end_in(', "x": {}} y') == len(', "x": {}}')
    assert JsonScanner(depth=2).end_in("}") is None
