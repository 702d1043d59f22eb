"""Finds out by trial which fields of a config.json take part in its refusal by transformers."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import transformers

from lookonce.model.faults.build_faults import in_one_line

# Fields that say what the rest is.
_KINDS = frozenset({"model_type", "architectures", "transformers_version"})
_MOST_TRIALS, _MOST_NAMED, _MOST_CHARACTERS = 400, 6, 60


def refusal_text(config: Mapping[str, Any], error: BaseException) -> str:
    """Returns the text of an exception with which transformers refuses config.json, with the fields that take part."""
    fields = involved_fields(config)
    involved = f"; these fields take part in it: {fields}" if fields else ""
    return f"{in_one_line(error)}{involved}; use the config.json that belongs to the weights"


def involved_fields(config: Mapping[str, Any]) -> str:
    """Returns the fields that take part in the refusal, with their values; empty if none is found.

    A field takes part if transformers accepts the file without it, or refuses it for another reason. Where two values
    contradict each other, this finds both.
    """
    reason = _refusal(config)
    if reason is None:
        return ""
    found: dict[str, str | None] = {}
    for path, value in itertools.islice(_fields(config, ()), _MOST_TRIALS):
        without = _refusal(_without(config, path))
        if without != reason:
            found[f"{'.'.join(path)} = {str(value)[:_MOST_CHARACTERS]}"] = without
    if len(found) > _MOST_NAMED:
        found = {field: None for field, without in found.items() if without is None}
    return ", ".join(itertools.islice(found, _MOST_NAMED))


def _fields(part: Mapping[str, Any], outer: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in part.items():
        if isinstance(value, Mapping):
            yield from _fields(value, (*outer, name))
        elif name not in _KINDS:
            yield (*outer, name), value


def _without(config: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    copied = copy.deepcopy(dict(config))
    part = copied
    for name in path[:-1]:
        part = part[name]
    del part[path[-1]]
    return copied


def _refusal(config: Mapping[str, Any]) -> str | None:
    """Returns why transformers refuses this content of a config.json, None if it accepts it."""
    try:
        transformers.CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(dict(config)))
    except Exception as error:  # of many kinds, as each class of configurations has code of its own
        return f"{type(error).__name__} {error}"
    return None
