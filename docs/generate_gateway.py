"""Writes the tables of fields of docs/gateway.md from the gateway's own tables: `make docs`."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping

from docs.marked_page import replace_between
from gateway_svc.apis.chat import CHAT_FIELDS
from gateway_svc.apis.completions import COMPLETION_FIELDS
from gateway_svc.apis.embeddings import EMBEDDING_FIELDS
from gateway_svc.apis.messages import MESSAGE_FIELDS
from gateway_svc.apis.parsing.fields import EXTENSIONS, Field
from gateway_svc.apis.responses import RESPONSE_FIELDS

PAGE = pathlib.Path(__file__).parent / "gateway.md"
BEGIN = "<!-- fields: written by `make docs` -->"
END = "<!-- end of fields -->"
_HEAD = "| field | treatment | notes |\n| --- | --- | --- |"


def fields_text() -> str:
    """Returns a table for each endpoint, and one of the extensions that all have."""
    tables = {
        "`/v1/chat/completions`": _without_extensions(CHAT_FIELDS),
        "`/v1/responses`": _without_extensions(RESPONSE_FIELDS),
        "`/v1/completions`": _without_extensions(COMPLETION_FIELDS),
        "Extensions of these three": EXTENSIONS,
        "`/v1/embeddings`": EMBEDDING_FIELDS,
        "`/v1/messages`": MESSAGE_FIELDS,
    }
    return "\n\n".join(f"### {title}\n\n{_table(fields)}" for title, fields in tables.items())


def page_with_fields(page: str) -> str:
    """Returns `page` with current tables between its marks. Raises ValueError when a mark is missing."""
    return replace_between(page, BEGIN, END, fields_text())


def _without_extensions(fields: Mapping[str, Field]) -> dict[str, Field]:
    return {name: field for name, field in fields.items() if name not in EXTENSIONS}


def _table(fields: Mapping[str, Field]) -> str:
    return "\n".join(
        [_HEAD, *(f"| `{name}` | {_treatment(field)} | {_note(field)} |" for name, field in fields.items())]
    )


def _treatment(field: Field) -> str:
    return "no effect" if field.rule == "label" else field.rule


def _note(field: Field) -> str:
    note = field.note.removeprefix("Extension: ")
    note = note[:1].upper() + note[1:]
    if not field.neutral:
        return note
    values = ", ".join(f"`{json.dumps(value)}`" for value in field.neutral)
    return f"{note} Accepted: {values}.".strip()


if __name__ == "__main__":
    PAGE.write_text(page_with_fields(PAGE.read_text("utf-8")), "utf-8")
