"""Sampling defaults of a model folder (generation_config.json), for values that a request does not set."""

from __future__ import annotations

import json
import pathlib
from dataclasses import dataclass
from typing import Any

from lookonce.errors import ModelFolderError


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


def load_defaults(folder: pathlib.Path, tokenizer_eos_id: int | None) -> GenerationDefaults:
    """Loads the defaults of a folder. `tokenizer_eos_id` is used if no configuration file names an end of sequence.

    Raises ModelFolderError for an unreadable file or a wrong value in it.
    """
    generation = _read_json(folder / "generation_config.json")
    config = _read_json(folder / "config.json")
    try:
        return GenerationDefaults(
            temperature=float(_stated(generation, "temperature", 1.0)) if generation.get("do_sample") else 0.0,
            top_p=float(_stated(generation, "top_p", 1.0)),
            top_k=int(_stated(generation, "top_k", 0)) or None,
            min_p=float(_stated(generation, "min_p", 0.0)),
            repetition_penalty=float(_stated(generation, "repetition_penalty", 1.0)),
            eos_token_ids=_eos_token_ids(generation, config, tokenizer_eos_id),
        )
    except (TypeError, ValueError) as error:
        raise ModelFolderError(f"generation_config.json has a value that is not a number: {error}") from error


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ModelFolderError(f"{path.name} is not valid JSON") from error
    if not isinstance(content, dict):
        raise ModelFolderError(f"{path.name} is not a JSON object")
    return content


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
