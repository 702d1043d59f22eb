"""Loads the tokenizer of a model folder with transformers, for the decoder and for `lookonce doctor`."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from lookonce.errors import ModelFolderError
from lookonce.logs import get_logger
from lookonce.model.libraries.rust_panics import RustPanicError, call_rust

_ORDINARY_TEXT = "What is in the picture? 0123456789"
# Files of which one holds a tokenizer's vocabulary: the fast format, or one that transformers converts to it.
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")

_TEMPLATE_FILE = "chat_template.jinja"
# The reason to refuse a tokenizer without BOS where a family's prompts need one.
NO_BOS = (
    "the tokenizer has no bos_token, which this family's prompts need between images and text; download "
    "tokenizer_config.json again"
)
# Largest id of a token. Tables with a place for each id are made of a vocabulary.
_LARGEST_ID = (1 << 24) - 1

_log = get_logger(__name__)


def load_pretrained(folder: pathlib.Path) -> Any:
    """Loads the folder's fast tokenizer with transformers, without running code from the folder.

    Raises ModelFolderError if there is none. Its message is one line without the library's text.
    """
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in _VOCABULARY_FILES):
        raise ModelFolderError(
            f"{folder.name} has no tokenizer (tokenizer.json is missing); download the tokenizer that belongs to the "
            "weights into the folder"
        )
    try:
        pretrained = call_rust(AutoTokenizer.from_pretrained, folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        # Libraries raise exceptions of many kinds, some of them plain `Exception`, for damaged files.
        _check_config(folder)
        _check_template(folder)
        raise ModelFolderError(
            f"the tokenizer of {folder.name} cannot be loaded ({type(error).__name__}); download tokenizer.json and "
            "tokenizer_config.json again"
        ) from error
    if not pretrained.is_fast:
        raise ModelFolderError(
            f"{folder.name} has no fast tokenizer; save the tokenizer with transformers as tokenizer.json"
        )
    _check_ids(folder, pretrained.get_vocab())
    _check_works(pretrained)
    return pretrained


def _check_config(folder: pathlib.Path) -> None:
    """Raises ModelFolderError if it is the model's configuration, not the tokenizer, that transformers refuses."""
    from transformers import AutoConfig

    from lookonce.model.faults.config_faults import refusal_text

    try:
        AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise ModelFolderError(
            f"transformers refuses config.json of {folder.name}: {refusal_text(_config(folder), error)}"
        ) from error


def _config(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the content of config.json, nothing if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads((folder / "config.json").read_bytes())
        if isinstance(content, dict):
            return content
    return {}


def _check_template(folder: pathlib.Path) -> None:
    """Raises ModelFolderError if the chat template is no text; transformers reads it with the tokenizer."""
    try:
        if (folder / _TEMPLATE_FILE).is_file():
            (folder / _TEMPLATE_FILE).read_text("utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ModelFolderError(
            f"{_TEMPLATE_FILE} of {folder.name} cannot be read: {reason}; download it again"
        ) from error


def _check_ids(folder: pathlib.Path, vocabulary: Mapping[str, int]) -> None:
    """Raises ModelFolderError if two tokens have one id, or one has an id that no model has."""
    tokens: dict[int, str] = {}
    for token, token_id in vocabulary.items():
        if token_id > _LARGEST_ID:
            raise ModelFolderError(
                f"the tokenizer of {folder.name} has the id {token_id} for {token[:50]!r}, over {_LARGEST_ID:,}; "
                "download tokenizer.json again"
            )
        if token_id in tokens:
            raise ModelFolderError(
                f"the tokenizer of {folder.name} has one id, {token_id}, for {tokens[token_id][:50]!r} and "
                f"{token[:50]!r}; download tokenizer.json again"
            )
        tokens[token_id] = token


def _check_works(pretrained: Any) -> None:
    """Raises ModelFolderError if the tokenizer panics on an ordinary text; it would do so on nearly every prompt."""
    try:
        call_rust(pretrained.encode, _ORDINARY_TEXT)
    except RustPanicError as error:
        raise ModelFolderError(
            "the model's tokenizer fails on ordinary texts; download tokenizer.json again"
        ) from error
    except Exception as error:
        # A small tokenizer may lack a token for one of the characters. Then only prompts with this character fail.
        _log.debug("the tokenizer does not know an ordinary text", error=type(error).__name__)
