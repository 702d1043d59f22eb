"""Writes the settings tables of docs/operations.md from the settings classes: `make docs`."""

from __future__ import annotations

import pathlib
import typing
from typing import Any, Literal

from pydantic.fields import FieldInfo

from decoder_svc.settings import DecoderSettings
from encoder_svc.settings import EncoderSettings
from lookonce.server.settings import ServiceSettings

PAGE = pathlib.Path(__file__).with_name("operations.md")
BEGIN = "<!-- settings: written by `make docs` -->"
END = "<!-- end of settings -->"
_HEAD = "| setting | default | allowed | meaning |\n| --- | --- | --- | --- |"
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
# Attributes of pydantic's constraint objects and how they read.
_BOUNDS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))


def settings_text() -> str:
    """The three tables: both services, encoder only, decoder only."""
    shared = set(ServiceSettings.model_fields)
    sections = [("Both services", _table(ServiceSettings, set()))]
    sections += [("Encoder", _table(EncoderSettings, shared)), ("Decoder", _table(DecoderSettings, shared))]
    return "\n\n".join(f"### {title}\n\n{table}" for title, table in sections)


def page_with_settings(page: str) -> str:
    """`page` with the text between the two marks replaced. Raises ValueError when a mark is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks the marks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{settings_text()}\n\n{END}{after}"


def _table(settings_class: type[ServiceSettings], without: set[str]) -> str:
    rows = [_row(name, field) for name, field in settings_class.model_fields.items() if name not in without]
    return "\n".join([_HEAD, *rows])


def _row(name: str, field: FieldInfo) -> str:
    cells = [f"`{name}`", _default(name, field), _allowed(name, field), field.description or ""]
    return f"| {' | '.join(cells)} |"


def _default(name: str, field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default is None:
        return "–"
    if isinstance(field.default, bool):
        return str(field.default).lower()
    return _value(name, field.default)


def _allowed(name: str, field: FieldInfo) -> str:
    if typing.get_origin(field.annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(field.annotation))
    bounds = (
        f"{sign} {_value(name, getattr(constraint, attribute))}"
        for attribute, sign in _BOUNDS
        for constraint in field.metadata
        if hasattr(constraint, attribute)
    )
    return ", ".join(bounds)


def _value(name: str, value: Any) -> str:
    if isinstance(value, str):
        return f"`{value}`"
    if name.endswith("_bytes"):
        for unit, size in _UNITS:
            if value >= size and value % size == 0:
                return f"{value // size} {unit}"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


if __name__ == "__main__":
    PAGE.write_text(page_with_settings(PAGE.read_text("utf-8")), "utf-8")
