"""The form of an answer in requests to the gateway: a field without effect is refused, not dropped."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway_svc.apis.chat import json_schema_of
from gateway_svc.apis.parsing.fields import Fields
from lookonce.errors import InvalidParameterError

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
# The schema stands in an object of its own in chats, and in the format itself in responses.
NAMED = {"name": "n", "description": "d", "strict": True, "schema": SCHEMA}
NESTED = {"type": "json_schema", "json_schema": NAMED}
FLAT = {"type": "json_schema", "name": "n", "strict": False, "schema": SCHEMA}


def schema_of(given: object, nested: str | None = "json_schema") -> str | None:
    return json_schema_of(Fields({"format": given}), "format", nested)


def test_a_schema_is_taken_from_where_it_stands() -> None:
    assert json.loads(schema_of(NESTED) or "") == SCHEMA
    assert json.loads(schema_of(FLAT, None) or "") == SCHEMA
    assert schema_of({"type": "text"}) is None
    assert schema_of(None) is None
    assert json.loads(schema_of({"type": "json_object"}) or "") == {"type": "object"}


@pytest.mark.parametrize(
    ("given", "place"),
    [
        # Some servers take a schema there.
        ({"type": "json_object", "schema": SCHEMA}, "format.schema"),
        ({"type": "text", "json_schema": {"schema": SCHEMA}}, "format.json_schema"),
        ({**NESTED, "colour": 1}, "format.colour"),
        ({**NESTED, "json_schema": {**NAMED, "colour": 1}}, "format.json_schema.colour"),
        ({**NESTED, "json_schema": {"schema": SCHEMA, "strict": "yes"}}, "format.json_schema.strict"),
        ({**NESTED, "json_schema": {"schema": SCHEMA, "name": 5}}, "format.json_schema.name"),
        ({**NESTED, "json_schema": {"name": "n"}}, "format.json_schema.schema"),
        ({"type": "json_schema"}, "format.json_schema"),
        ({"type": "xml"}, "format.type"),
    ],
)  # fmt: skip
def test_what_has_no_effect_is_refused_by_name(given: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"^{place}: "):
        schema_of(given)


@pytest.mark.parametrize("name", ["json_schema", "colour"])
def test_a_format_that_holds_the_schema_itself_has_no_other_field(name: str) -> None:
    # In responses, the format stands in `text`.
    with pytest.raises(InvalidParameterError, match=f"^text.format.{name}: "):
        json_schema_of(Fields({"format": {**FLAT, name: {}}}, "text"), "format", None)
