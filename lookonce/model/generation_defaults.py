"""Sampling defaults of a model folder (generation_config.json), for values that a request does not set."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lookonce.errors import ModelFolderError
from lookonce.model.generation_config import FILE_NAME, ignored_fields, read_generation_config
from lookonce.model.model_folder import read_json_object
from lookonce.model.sampling_ranges import SAMPLING_RANGES, shown

logger = logging.getLogger(__name__)

# The default of transformers for a file that sets do_sample and no top_k.
_DEFAULT_TOP_K = 50


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling defaults of one model."""

    # 0 (greedy) unless the folder sets do_sample.
    temperature: float = 0.0
    top_p: float = 1.0
    # None: no limit.
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    # Each of these ids ends a generation.
    eos_token_ids: frozenset[int] = frozenset()
    # These ids are never generated.
    suppressed_token_ids: frozenset[int] = frozenset()
    # Generated tokens that come before an end of sequence.
    min_tokens: int = 0


def load_defaults(folder: pathlib.Path, tokenizer_eos_id: int | None) -> GenerationDefaults:
    """Loads the defaults of a folder. `tokenizer_eos_id` is used if no configuration file names an end of sequence.

    Logs a warning that names the fields that are ignored and would change answers. Raises ModelFolderError for an
    unreadable file or a wrong value in it.
    """
    generation = read_generation_config(folder)
    if ignored := ignored_fields(generation):
        logger.warning("%s: ignored, although they change answers in transformers: %s", FILE_NAME, ", ".join(ignored))
    path = folder / "config.json"
    return parse_defaults(generation, read_json_object(path) if path.is_file() else {}, tokenizer_eos_id)


def parse_defaults(
    generation: Mapping[str, Any], config: Mapping[str, Any], tokenizer_eos_id: int | None
) -> GenerationDefaults:
    """Returns the defaults of a folder with these contents of generation_config.json and config.json.

    Raises ModelFolderError that names a field whose value no request could have, the value and the range. Without
    do_sample the temperature is not used, and may be anything, as in transformers.
    """
    is_sampled = bool(generation.get("do_sample"))
    return GenerationDefaults(
        temperature=_number(generation, "temperature", 1.0) if is_sampled else 0.0,
        top_p=_number(generation, "top_p", 1.0),
        top_k=_whole_number(generation, "top_k", _DEFAULT_TOP_K if is_sampled else 0) or None,
        min_p=_number(generation, "min_p", 0.0),
        repetition_penalty=_number(generation, "repetition_penalty", 1.0),
        eos_token_ids=_eos_token_ids(generation, config, tokenizer_eos_id),
        suppressed_token_ids=_token_ids("suppress_tokens", generation.get("suppress_tokens") or []),
        min_tokens=_whole_number(generation, "min_new_tokens", 0),
    )


def _number(generation: Mapping[str, Any], name: str, default: float) -> float:
    value = generation.get(name)
    return default if value is None else float(_in_range(name, value, "a number"))


def _whole_number(generation: Mapping[str, Any], name: str, default: int) -> int:
    value = generation.get(name)
    if value is None:
        return default
    found = _in_range(name, value, "a whole number")
    if found != int(found):
        raise _refused(name, "a whole number", shown(found))
    return int(found)


def _in_range(name: str, value: object, kind: str) -> float:
    """Returns the value of a field. Raises ModelFolderError if it is no number of the range that requests have."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refused(name, kind, repr(value))
    if value not in SAMPLING_RANGES[name]:
        raise _refused(name, f"in {SAMPLING_RANGES[name]}", shown(value))
    return value


def _refused(name: str, allowed: str, value: str) -> ModelFolderError:
    return ModelFolderError(f"{FILE_NAME}: {name} must be {allowed}, got {value}; correct it, or remove the field")


def _eos_token_ids(
    generation: Mapping[str, Any], config: Mapping[str, Any], tokenizer_eos_id: int | None
) -> frozenset[int]:
    """Returns the ids of the first source that names any, in the order that `generate` of transformers uses."""
    text_config = config.get("text_config") or {}
    for stated in (generation.get("eos_token_id"), config.get("eos_token_id"), text_config.get("eos_token_id")):
        if stated is not None:
            return _token_ids("eos_token_id", stated if isinstance(stated, list) else [stated])
    return frozenset() if tokenizer_eos_id is None else frozenset({tokenizer_eos_id})


def _token_ids(name: str, stated: Any) -> frozenset[int]:
    try:
        return frozenset(map(int, stated))
    except (TypeError, ValueError, OverflowError):
        raise ModelFolderError(
            f"{FILE_NAME} or config.json: {name} must be token ids; correct it, or remove the field"
        ) from None
