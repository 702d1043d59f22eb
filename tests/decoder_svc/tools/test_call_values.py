"""Calls whose arguments are not JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder_svc.tools.call_values import NoCallError, marked_call, python_calls, tagged_call
from decoder_svc.tools.tool_formats import TOOL_FORMATS

FORMS = {form.name: form for form in TOOL_FORMATS}
TEXTS = st.text(st.characters(exclude_characters="<>", exclude_categories=["Cs", "Cc"]), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.from_regex("[a-z]{1,4}", fullmatch=True), inner),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.from_regex("k[a-z]{1,5}", fullmatch=True), JSON, max_size=4)


@given(ARGUMENTS)
def test_python_arguments_are_read_as_written(arguments: dict[str, Any]) -> None:
    written = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    ((name, read),) = python_calls(f"[a.b({written})]")
    assert (name, json.loads(read)) == ("a.b", arguments)
    as_json = ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items())
    assert json.loads(python_calls(f"[f({as_json})]")[0][1]) == arguments


@pytest.mark.parametrize(
    "text", ["", "f()", "[]", "[f]", "[f(1)]", "[f(**{})]", "[f(x=g())]", "[f(x=1", "[f(x={1: 2})]", "[f(x=b'')]"]
)
def test_what_is_no_call_of_python(text: str) -> None:
    with pytest.raises(NoCallError):
        python_calls(text)


@given(ARGUMENTS)
def test_tagged_arguments_are_read_by_their_types(arguments: dict[str, Any]) -> None:
    kinds = {key: frozenset({"string"} if isinstance(value, str) else {"object"}) for key, value in arguments.items()}
    for name in ("glm", "qwen_xml"):
        form = FORMS[name]
        body = form.name_begin + "f" + form.name_end
        for key, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value)
            body += form.key_begin + key + form.key_end + text + form.value_end
        called, read = tagged_call(body + form.arguments_end, form, {"f": kinds})
        assert (called, json.loads(read)) == ("f", arguments)


def test_a_value_of_an_unknown_type_is_json_if_it_can_be() -> None:
    text = "f\n<arg_key>a</arg_key>\n<arg_value>5</arg_value>\n<arg_key>b</arg_key>\n<arg_value>5 cm</arg_value>\n"
    assert tagged_call(text, FORMS["glm"], {}) == ("f", '{"a": 5, "b": "5 cm"}')


@pytest.mark.parametrize("text", ["", "\n", "f\n<arg_key>a", "f\n<arg_key>a</arg_key>\n<arg_value>5"])
def test_what_is_no_tagged_call(text: str) -> None:
    with pytest.raises(NoCallError):
        tagged_call(text, FORMS["glm"], {})


def marked(value: Any, mark: str) -> str:
    if isinstance(value, str):
        return mark + value + mark
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{marked(each, mark)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(marked(each, mark) for each in value) + "]"
    return json.dumps(value)


@given(ARGUMENTS)
def test_marked_arguments_are_read_as_written(arguments: dict[str, Any]) -> None:
    for name in ("gemma", "gemma4"):
        form = FORMS[name]
        assert marked_call(f"call:f{marked(arguments, form.mark)}", form) == (
            "f",
            json.dumps(arguments, ensure_ascii=False),
        )


@pytest.mark.parametrize(
    "text", ["", "call:f", "call:{}", "call:f{a:1", "call:f{a}", "call:f{a:<escape>b}", "call:f{}}"]
)
def test_what_is_no_marked_call(text: str) -> None:
    with pytest.raises(NoCallError):
        marked_call(text, FORMS["gemma"])


def test_deep_nesting_is_no_call() -> None:
    with pytest.raises(NoCallError):
        marked_call("call:f{a:" + "[" * 1000 + "]" * 1000 + "}", FORMS["gemma"])
    with pytest.raises(NoCallError):
        python_calls("[f(a=" + "[" * 1000 + "]" * 1000 + ")]")
