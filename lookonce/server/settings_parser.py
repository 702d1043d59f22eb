"""Parses the settings of a service from its command line, environment and TOML file.

A message about a wrong value never has text of the TOML file or of the command line, which may be secret.
"""

from __future__ import annotations

import pathlib
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from lookonce.errors import ConfigurationError
from lookonce.server.setting_names import unknown_flags
from lookonce.server.settings import EnvironmentSettings

SettingsT = TypeVar("SettingsT", bound=EnvironmentSettings)
Origin: TypeAlias = Literal["flag", "environment", "file", "default"]
"""The place that a value comes from."""

# Names of pydantic's sources, first those that go before others.
_ORIGINS: Mapping[str, Origin] = {
    "CliSettingsSource": "flag",
    "EnvSettingsSource": "environment",
    "TomlConfigSettingsSource": "file",
}


def parse_settings(settings_class: type[SettingsT], arguments: Sequence[str], program: str) -> SettingsT:
    """Reads settings from flags, environment and `--config FILE.toml`.

    Raises ConfigurationError that names each wrong field and its allowed values. `--help` prints and exits as argparse
    does.
    """
    return settings_with_origins(settings_class, arguments, program)[0]


def settings_with_origins(
    settings_class: type[SettingsT], arguments: Sequence[str], program: str
) -> tuple[SettingsT, dict[str, Origin]]:
    """Reads settings as `parse_settings` does. Returns them, and the origin of each by its name."""
    arguments, config = _split_config(list(arguments))
    if config is not None:
        _check_toml(config)
    overrides = SettingsConfigDict(toml_file=config, cli_prog_name=program, cli_exit_on_error=False)
    seen: dict[str, dict[str, Any]] = {}

    def sources(cls: type[BaseSettings], **given: Any) -> tuple[PydanticBaseSettingsSource, ...]:
        return (*settings_class.settings_customise_sources(cls, **given), _SourceReader(cls, seen))

    attributes: dict[str, Any] = {
        "model_config": overrides,
        "__doc__": settings_class.__doc__,
        "__module__": settings_class.__module__,
        "settings_customise_sources": staticmethod(sources),
    }
    configured: Any = type(settings_class.__name__, (settings_class,), attributes)
    try:
        settings: SettingsT = configured(_cli_parse_args=arguments)
    except ValidationError as error:
        lines = [f"{_flag(item['loc'])}: {_reason(item['type'], item['msg'], item['loc'])}" for item in error.errors()]
        raise ConfigurationError("; ".join(lines)) from None
    except SettingsError as error:
        raise ConfigurationError(f"{_command_line_fault(arguments, settings_class, error)}; see --help") from None
    return settings, {name: _origin(name, seen) for name in settings_class.model_fields}


class _SourceReader(PydanticBaseSettingsSource):
    """The last source of settings: it has no value, and notes those that the sources before it have."""

    def __init__(self, settings_class: type[BaseSettings], seen: dict[str, dict[str, Any]]) -> None:
        super().__init__(settings_class)
        self._seen = seen

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        self._seen.update(self.settings_sources_data)
        return {}


def _origin(name: str, seen: Mapping[str, Mapping[str, Any]]) -> Origin:
    found = (origin for source, origin in _ORIGINS.items() if name in seen.get(source, {}))
    return next(found, "default")


def exit_with(error: Exception) -> None:
    """Ends a process that must not start: prints the reason to stderr and exits with status 2."""
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(2)


def _split_config(arguments: list[str]) -> tuple[list[str], pathlib.Path | None]:
    for index, argument in enumerate(arguments):
        if argument == "--config" and index + 1 < len(arguments):
            return arguments[:index] + arguments[index + 2 :], _existing(arguments[index + 1])
        if argument.startswith("--config="):
            return arguments[:index] + arguments[index + 1 :], _existing(argument.removeprefix("--config="))
    return arguments, None


def _check_toml(path: pathlib.Path) -> None:
    """Raises ConfigurationError for a file that is no TOML. The message has no text of the file: it may be secret."""
    try:
        tomllib.loads(path.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at (line \d+, column \d+|end of document)\)", str(error))
        raise ConfigurationError(f"--config: {path} is not TOML, {place[1] if place else 'see its syntax'}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"--config: {path} is not UTF-8 text") from None
    except OSError as error:
        raise ConfigurationError(f"--config: {path} cannot be read: {error.strerror}") from None


def _existing(name: str) -> pathlib.Path:
    path = pathlib.Path(name)
    if not path.is_file():
        raise ConfigurationError(f"--config: {name} is not a file")
    return path


def _command_line_fault(
    arguments: Sequence[str], settings_class: type[EnvironmentSettings], error: SettingsError
) -> str:
    """Returns the fault of a command line that argparse refuses. Its text has no value, which may be secret."""
    flags = [_flag((name,)) for name in settings_class.model_fields]
    negated = [f"--no-{flag[2:]}" for flag in flags]
    return unknown_flags(arguments, [*flags, *negated, "--config", "--help", "-h"]) or _argparse_fault(str(error))


def _argparse_fault(text: str) -> str:
    if "unrecognized arguments" in text:
        return "the command line has a value without a flag"
    found = re.search(r"argument (--[a-z0-9-]+)[^:]*: (expected one argument)?", text)
    return text if found is None else f"{found[1]}: {'needs a value' if found[2] else 'takes no such value'}"


def _reason(kind: str, message: str, location: tuple[int | str, ...]) -> str:
    if kind == "missing":
        name = str(location[0])
        return f"is not set; give {_flag(location)}, or set LOOKONCE_{name.upper()}"
    return "there is no such setting" if kind == "extra_forbidden" else message.removeprefix("Value error, ")


def _flag(location: tuple[int | str, ...]) -> str:
    return "--" + ".".join(str(part) for part in location).replace("_", "-") if location else "settings"
