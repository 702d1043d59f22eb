"""Checks and describes the folder of a Hugging Face vision-language model before anything is loaded from it.

Pure Python; reads JSON and the headers of weight files only. A folder that passes has a supported architecture, needs
no custom code and holds complete safetensors files. Loading checks whether the tensors fit the configuration.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lookonce.errors import LookonceError, ModelFolderError
from lookonce.families.registry import FAMILIES
from lookonce.model.number_ranges import IMAGE_TOKENS, check_config_numbers
from lookonce.model.quantized_folder.storage import Storage
from lookonce.model.safetensors_header import read_header

_CONFIG_FILE = "config.json"
_ADAPTER_FILE = "adapter_config.json"
# Told by whoever computes with the model first.
NOT_A_NUMBER = (
    "the language model computes NaN: a weight, a scale or a value in config.json is damaged; download the model again"
)
_CONFIG_FILES = ("config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_PICKLED_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
# Types that are not served, with the property that stands against it (docs/adr/0048).
_APART = "which attends to images apart from the text (cross-attention) and is not served"
_TOGETHER = "whose encoder reads image and prompt together, and which is not served"
_UNSERVED_TYPES = {"mllama": _APART, "florence2": _TOGETHER, "t5gemma2": _TOGETHER}
_SAFETENSORS_ADVICE = "give the folder of the original Hugging Face model with safetensors weights"


def image_token_id(config: Mapping[str, Any]) -> Any:
    """Returns the id of the token of images in a config.json, None if no field names it."""
    return config.get(image_token_field(config))


def image_token_field(config: Mapping[str, Any]) -> str:
    """Returns the field of a config.json that names the token of images, the first of those known if none does."""
    return next((name for name in IMAGE_TOKENS if config.get(name) is not None), IMAGE_TOKENS[0])


# transformers and torch raise these for a configuration that contradicts itself or the weights.
CONFIGURATION_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def needs_torchvision(path: pathlib.Path) -> bool:
    """Whether the image processor or the vision tower of a folder needs torchvision.

    False for a folder that cannot be opened: `ModelFolder.open` says why.
    """
    try:
        model_type = read_json_object(path / _CONFIG_FILE).get("model_type")
    except (OSError, LookonceError):
        return False
    return isinstance(model_type, str) and model_type in FAMILIES and FAMILIES[model_type].imports_torchvision


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model folder that has passed the checks."""

    path: pathlib.Path
    # Content of config.json.
    config: Mapping[str, Any] = field(repr=False)
    # A key of FAMILIES.
    model_type: str
    # Class name in transformers.
    architecture: str
    # Complete files, sorted by name.
    weight_files: tuple[pathlib.Path, ...]
    # Width of the language model; None if config.json leaves it to the architecture's default.
    text_hidden_size: int | None
    # The form of quantized weights; None: weights are whole.
    storage: Storage | None = None

    @classmethod
    def open(cls, path: pathlib.Path) -> ModelFolder:
        """Checks the folder. Raises ModelFolderError with the problem and its remedy."""
        if not path.is_dir():
            raise ModelFolderError(_not_a_folder(path))
        if not (path / _CONFIG_FILE).exists():
            raise ModelFolderError(_without_config(path))
        config = read_json_object(path / _CONFIG_FILE)
        model_type, architecture = _checked_architecture(path, config)
        check_config_numbers(path, config)
        _refuse_own_code(path)
        storage = _storage(path, config)
        return cls(
            path=path,
            config=config,
            model_type=model_type,
            architecture=architecture,
            weight_files=weight_files(path),
            text_hidden_size=_text_hidden_size(path, config),
            storage=storage,
        )


def read_json_object(path: pathlib.Path) -> dict[str, Any]:
    """Reads a file's JSON object. Raises ModelFolderError if the file is missing or holds something else."""
    if path.exists() and not path.is_file():
        raise ModelFolderError(f"{path} is no regular file; download the model again")
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelFolderError(f"{path} is missing; the folder is not a complete Hugging Face model") from None
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{path} cannot be read as JSON: {error}") from None
    except RecursionError:
        raise ModelFolderError(f"{path} is nested too deeply to be read as JSON; download the model again") from None
    if not isinstance(content, dict):
        raise ModelFolderError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content


def _not_a_folder(path: pathlib.Path) -> str:
    """Returns why something else than a folder is refused, and what to give instead."""
    if not path.exists():
        return f"{path} is not a folder (it does not exist); give the folder of a Hugging Face model"
    if path.suffix == ".gguf":
        return f"{path} is not a folder but a GGUF file, which is not served; {_SAFETENSORS_ADVICE}"
    if path.suffix == ".safetensors":
        return (
            f"{path} is not a folder but a weight file; give the folder that holds it together with config.json and "
            "tokenizer.json"
        )
    return f"{path} is not a folder but a file; give the folder of a Hugging Face model"


def _without_config(path: pathlib.Path) -> str:
    """Returns what a folder without config.json seems to hold, and what to do about it."""
    names = sorted(file.name for file in path.iterdir())
    if not names:
        return f"{path} is empty; download a model into it: config.json, safetensors weights and tokenizer"
    if _ADAPTER_FILE in names:
        return _adapter(path)
    if any(name.endswith(".gguf") for name in names):
        return f"{path} has no config.json but a GGUF file, which is not served; {_SAFETENSORS_ADVICE}"
    return f"{path} is no folder of a Hugging Face model (config.json is missing); download the whole model into it"


def _adapter(path: pathlib.Path) -> str:
    base = read_json_object(path / _ADAPTER_FILE).get("base_model_name_or_path")
    named = f" {base}" if isinstance(base, str) and base else ""
    return (
        f"{path} holds a PEFT adapter ({_ADAPTER_FILE}); start a decoder with the folder of its base model{named}, and "
        f"give this folder with --adapters NAME={path}"
    )


def _checked_architecture(path: pathlib.Path, config: Mapping[str, Any]) -> tuple[str, str]:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        supported = ", ".join(sorted(FAMILIES))
        reason = f", {_UNSERVED_TYPES[model_type]}" if model_type in _UNSERVED_TYPES else ""
        raise ModelFolderError(f"{path} holds a model of type {model_type!r}{reason}; supported types are {supported}")
    wanted = FAMILIES[model_type].architecture
    if config.get("architectures") != [wanted]:
        raise ModelFolderError(
            f"{path}/config.json names the architectures {config.get('architectures')!r}; {model_type} needs {[wanted]}"
        )
    return model_type, wanted


def _storage(path: pathlib.Path, config: Mapping[str, Any]) -> Storage | None:
    try:
        return Storage.of(config)
    except ModelFolderError as error:
        raise ModelFolderError(f"{path}/{error}") from None


def _refuse_own_code(path: pathlib.Path) -> None:
    for name in _CONFIG_FILES:
        if (path / name).exists() and "auto_map" in read_json_object(path / name):
            raise ModelFolderError(
                f"{path / name} refers to custom Python code (auto_map), which is never run; "
                "remove the entry if the model's authors say that transformers works without it"
            )


def weight_files(path: pathlib.Path) -> tuple[pathlib.Path, ...]:
    """Returns the folder's safetensors files, sorted by name. Raises ModelFolderError if one is missing or broken."""
    if (path / _INDEX_FILE).exists():
        files = _shards(path)
    elif (path / _SINGLE_FILE).exists():
        files = (path / _SINGLE_FILE,)
    else:
        pickled = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLED_SUFFIXES)
        if pickled:
            raise ModelFolderError(
                f"{path} holds pickled weights only ({pickled[0]}), which can run code and are never loaded; "
                "convert them to safetensors"
            )
        if (path / _ADAPTER_FILE).exists():
            raise ModelFolderError(_adapter(path))
        raise ModelFolderError(
            f"{path} holds no weights ({_SINGLE_FILE} or {_INDEX_FILE} is missing); download the whole model into it"
        )
    for file in files:
        if not file.is_file():
            raise ModelFolderError(f"{file} is no regular file; download the model again")
        read_header(file)
    return files


def _shards(path: pathlib.Path) -> tuple[pathlib.Path, ...]:
    index = read_json_object(path / _INDEX_FILE)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFolderError(f"{path / _INDEX_FILE} has no weight_map")
    if not isinstance(index.get("metadata"), dict):
        # transformers reads it, and fails without it.
        raise ModelFolderError(f'{path / _INDEX_FILE} has no metadata; add "metadata": {{}} to it')
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if pathlib.PurePath(name).name != name or not name.endswith(".safetensors"):
            raise ModelFolderError(
                f"{path / _INDEX_FILE} names {name!r}, which is not a safetensors file of this folder"
            )
        if not (path / name).is_file():
            raise ModelFolderError(f"{path / name} is missing, although the index names it; the download is incomplete")
    return tuple(path / name for name in names)


def _text_hidden_size(path: pathlib.Path, config: Mapping[str, Any]) -> int | None:
    """Returns the width from `text_config`, or from the top level, where older configurations keep these fields."""
    nested = config.get("text_config")
    size = nested.get("hidden_size") if isinstance(nested, dict) else config.get("hidden_size")
    if size is None:
        return None
    if not isinstance(size, int) or size < 1:
        raise ModelFolderError(
            f"{path}/config.json: the text model's hidden_size must be a positive number, not {size!r}"
        )
    return size


def chat_template_source(folder: pathlib.Path, of_tokenizer: Any) -> str | None:
    """Returns the folder's chat template as Jinja text, or None. A separate file takes precedence over a configuration.

    `of_tokenizer` is the template that transformers found: text, a mapping from name to text, or None. Raises
    ModelFolderError if chat_template.json cannot be read.
    """
    legacy = folder / "chat_template.json"
    source = of_tokenizer
    if legacy.is_file() and not (folder / "chat_template.jinja").is_file():
        try:
            source = json.loads(legacy.read_text("utf-8"))["chat_template"]
        except (ValueError, KeyError, TypeError) as error:
            raise ModelFolderError("chat_template.json is not JSON with a chat_template") from error
    return source.get("default") if isinstance(source, dict) else source
