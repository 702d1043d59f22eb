"""Writes docs/operations/settings.md from the settings classes: `make docs`."""

from __future__ import annotations

import pathlib
import typing
from typing import Any, Literal

from pydantic.fields import FieldInfo

from decoder_svc.settings import DecoderSettings, RankSettings
from encoder_svc.settings import EncoderSettings
from gateway_svc.settings import GatewaySettings
from lookonce.server.settings import EnvironmentSettings, ServiceSettings

PAGE = pathlib.Path(__file__).parent / "operations/settings.md"
_INTRODUCTION = """\
<!-- Written by `make docs` from the settings classes. Edit docs/generate_settings.py instead of this page. -->

# Settings

A service looks for each setting in four places and uses the first one that has it:

| place | example |
| --- | --- |
| command-line flag | `--redis-url redis://cache:6379` |
| environment variable | `LOOKONCE_REDIS_URL=redis://cache:6379` |
| TOML file named by `--config FILE.toml` | `redis_url = "redis://cache:6379"` |
| default | see the tables below |

Settings are read once, when the process starts. If a setting is invalid, the process exits with status 2 and prints one
line to stderr that names the setting and the allowed values.
A misspelt flag ends it, too. A variable that begins with `LOOKONCE_` and that no program of Lookonce reads is ignored,
with a warning in the log. Both messages name the nearest right name.

`lookonce config show decoder` prints each setting of a service with its value and the place that it comes from.

Put a Redis URL that contains a password into the environment, not into a flag: everybody on the machine can read the
flags of a process.

[Tuning](tuning.md) explains the settings for memory, compiled kernels, int8 rows and prompt lookup.
[Security](security.md) explains TLS, tokens and quotas, [Gateway](../gateway.md) the gateway.
"""
_HEAD = "| setting | default | allowed | meaning |\n| --- | --- | --- | --- |"
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
# Attributes of pydantic's constraint objects, and the sign that the table shows for each.
_BOUNDS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))


def settings_page() -> str:
    """Returns the whole page: an introduction, then a table of what encoders and decoders share, and one each."""
    shared = set(ServiceSettings.model_fields)
    sections = [("Encoder and decoder", _table(ServiceSettings, set()))]
    sections += [("Encoder", _table(EncoderSettings, shared)), ("Decoder", _table(DecoderSettings, shared))]
    sections.append(("Rank of a split model", _table(RankSettings, set())))
    sections.append(("Gateway", _table(GatewaySettings, set())))
    tables = "\n\n".join(f"## {title}\n\n{table}" for title, table in sections)
    return f"{_INTRODUCTION}\n{tables}\n"


def _table(settings_class: type[EnvironmentSettings], without: set[str]) -> str:
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
    PAGE.write_text(settings_page(), "utf-8")
