"""Finds the folder for `--model`: a path, or a repository on the Hugging Face hub, which it downloads."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Sequence

from lookonce.errors import ModelFolderError

_SERVED_NAME, _SERVED_NAME_VARIABLE = "--served-model-name", "LOOKONCE_SERVED_MODEL_NAME"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Only safetensors weights: pickled weights can run code and are never loaded, so they are not downloaded.
_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")


def resolve_model(name: str) -> pathlib.Path:
    """Returns `name` if it is a path that exists, otherwise the folder of the hub repository, downloaded if needed.

    Raises ModelFolderError if it is neither. Whether the path is a model's folder is seen when it is opened.
    """
    path = pathlib.Path(name)
    if name and path.exists():
        return path
    if not _HUB_NAME.fullmatch(name):
        raise ModelFolderError(
            f"{name or repr(name)} is neither a folder nor a name on the hub like Qwen/Qwen2-VL-2B-Instruct"
        )
    return _download(name)


def with_resolved_model(arguments: Sequence[str]) -> list[str]:
    """Returns a service's flags with the value of `--model` replaced by its folder.

    Adds the hub name of a model from the hub as the served model name, unless the flags or the environment set one.
    """
    resolved, named = list(arguments), []
    for index, argument in enumerate(resolved):
        if argument == "--model" and index + 1 < len(resolved):
            name = resolved[index + 1]
            folder = resolve_model(name)
            resolved[index + 1] = str(folder)
            named = served_name(name, folder)
        elif argument.startswith("--model="):
            name = argument.removeprefix("--model=")
            folder = resolve_model(name)
            resolved[index] = f"--model={folder}"
            named = served_name(name, folder)
    has_name = any(argument.split("=")[0] == _SERVED_NAME for argument in resolved)
    return resolved if has_name else [*resolved, *named]


def served_name(name: str, folder: pathlib.Path) -> list[str]:
    """Returns the flags that serve a hub model under its hub name (its folder is named after a commit)."""
    is_folder = not name or folder == pathlib.Path(name)
    return [] if is_folder or _SERVED_NAME_VARIABLE in os.environ else [_SERVED_NAME, name]


def _download(name: str) -> pathlib.Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            OfflineModeIsEnabled,
        )
    except ImportError:
        raise ModelFolderError(f"{name} is not a folder, and huggingface_hub is not installed to download it") from None
    try:
        return pathlib.Path(snapshot_download(name, allow_patterns=list(_PATTERNS)))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError, TimeoutError):
        raise ModelFolderError(
            f"{name} is not a folder, was not downloaded before, and the hub cannot be reached; "
            "give a local folder, or go online"
        ) from None
    except HFValidationError:
        raise ModelFolderError(f"{name} is neither a folder nor a valid name on the hub") from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "an unknown status"
        raise ModelFolderError(f"{name} is not a folder, and the hub answered status {status} for it") from None
