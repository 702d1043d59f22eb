"""Sampling defaults of a model folder (generation_config.json), for values that a request does not set."""

from __future__ import annotations

import logging
import pathlib
from dataclasses import dataclass
from typing import Any

from lookonce.errors import ModelFolderError
from lookonce.model.generation_config import FILE_NAME, ignored_fields, read_generation_config
from lookonce.model.model_folder import read_json_object

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
    config = read_json_object(path) if path.is_file() else {}
    is_sampled = bool(generation.get("do_sample"))
    try:
        return GenerationDefaults(
            temperature=float(_stated(generation, "temperature", 1.0)) if is_sampled else 0.0,
            top_p=float(_stated(generation, "top_p", 1.0)),
            top_k=int(_stated(generation, "top_k", _DEFAULT_TOP_K if is_sampled else 0)) or None,
            min_p=float(_stated(generation, "min_p", 0.0)),
            repetition_penalty=float(_stated(generation, "repetition_penalty", 1.0)),
            eos_token_ids=_eos_token_ids(generation, config, tokenizer_eos_id),
            suppressed_token_ids=frozenset(map(int, generation.get("suppress_tokens") or ())),
            min_tokens=int(_stated(generation, "min_new_tokens", 0)),
        )
    except (TypeError, ValueError) as error:
        raise ModelFolderError(f"generation_config.json has a value that is not a number: {error}") from error


def _stated(generation: dict[str, Any], name: str, default: float) -> Any:
    value = generation.get(name)
    return default if value is None else value


def _eos_token_ids(generation: dict[str, Any], config: dict[str, Any], tokenizer_eos_id: int | None) -> frozenset[int]:
    """Returns the ids of the first source that names any, in the order that `generate` of transformers uses."""
    text_config = config.get("text_config") or {}
    for stated in (generation.get("eos_token_id"), config.get("eos_token_id"), text_config.get("eos_token_id")):
        if stated is not None:
            return frozenset(map(int, stated)) if isinstance(stated, list) else frozenset({int(stated)})
    return frozenset() if tokenizer_eos_id is None else frozenset({tokenizer_eos_id})
