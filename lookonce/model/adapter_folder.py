"""Checks and describes a folder with a LoRA adapter as PEFT saves it (arXiv:2106.09685), before it is loaded.

Everything in the configuration that changes results is honoured or refused by name.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pathlib
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lookonce.errors import ConfigurationError, ModelFolderError

ValueT = TypeVar("ValueT")

_CONFIG_FILE = "adapter_config.json"
_WEIGHTS_FILE = "adapter_model.safetensors"
_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,64}")
_WRONG_NAME = "the adapter name {!r} must be 1 to 64 characters of [A-Za-z0-9._-]"
_MAX_RANK = 512
_MAX_ALPHA = 1e6
_MAX_CONFIG_BYTES = 1 << 20
_MAX_WEIGHTS_BYTES = 16 << 30
_MAX_PATTERNS = 1024
# Regular expressions that end soon on any name: few repetitions, and none of a group.
_PATTERN = re.compile(r"[A-Za-z0-9_.\\^$|()\[\]*+?-]{1,200}")
_REPETITION = re.compile(r"[*+?]")
_REPEATED_GROUP = re.compile(r"\)[*+?]")
_MAX_REPETITIONS = 2
_READ_BYTES = 1 << 20
# Settings that change results and are not served, with their neutral values beside null.
_UNSERVED: Mapping[str, tuple[object, ...]] = {
    "use_dora": (False,),
    "lora_bias": (False,),
    "bias": ("none",),
    "modules_to_save": ([],),
    "fan_in_fan_out": (False,),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
    "use_qalora": (False,),
    "use_bdlora": (False,),
    "alora_invocation_tokens": ([],),
    "layer_replication": ([],),
    "megatron_config": (),
    "velora_config": (),
    "arrow_config": (),
    "kasa_config": (),
    "monteclora_config": (),
    # Other ways to begin change the base model's weights as well.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
# Settings that say how the adapter was trained, or that its weights show.
_WITHOUT_EFFECT = frozenset(
    {
        *("peft_type", "task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"),
        *("base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version", "lora_dropout"),
        *("layers_to_transform", "layers_pattern", "exclude_modules", "loftq_config"),
        *("eva_config", "corda_config", "lora_ga_config", "megatron_core", "runtime_config", "ensure_weight_tying"),
        "qalora_group_size",
    }
)


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """A folder with an adapter that has passed the checks."""

    name: str
    path: pathlib.Path
    rank: int
    alpha: float
    # Divides by the root of the rank (arXiv:2312.03732).
    is_rank_stabilized: bool
    # Exceptions for modules whose names end like this, or match it as a regular expression.
    rank_pattern: Mapping[str, int] = field(repr=False)
    alpha_pattern: Mapping[str, float] = field(repr=False)
    # Content of the configuration.
    config: bytes = field(repr=False)
    # Identifies the weights and their scale: hexadecimal SHA-256 of both files.
    fingerprint: str

    @classmethod
    def open(cls, name: str, path: pathlib.Path) -> AdapterFolder:
        """Checks the folder. Raises ModelFolderError with the problem."""
        if not _NAME.fullmatch(name):
            raise ModelFolderError(_WRONG_NAME.format(name[:100]))
        content = b"".join(_pieces(name, path / _CONFIG_FILE, _MAX_CONFIG_BYTES))
        config = _parsed(name, content)
        _check(name, config)
        return cls(
            name=name,
            path=path,
            rank=_rank(name, config.get("r")),
            alpha=_number(name, "lora_alpha", config.get("lora_alpha")),
            is_rank_stabilized=config.get("use_rslora") is True,
            rank_pattern={
                pattern: _rank(name, rank) for pattern, rank in _object(name, config, "rank_pattern").items()
            },
            alpha_pattern={
                pattern: _number(name, "alpha_pattern", alpha)
                for pattern, alpha in _object(name, config, "alpha_pattern").items()
            },
            config=content,
            fingerprint=_fingerprint(content, _pieces(name, path / _WEIGHTS_FILE, _MAX_WEIGHTS_BYTES)),
        )

    def read_weights(self) -> bytes:
        """Reads the file with the matrices.

        Raises ModelFolderError if it cannot be read, or has changed since the folder was opened.
        """
        weights = b"".join(_pieces(self.name, self.path / _WEIGHTS_FILE, _MAX_WEIGHTS_BYTES))
        if _fingerprint(self.config, [weights]) != self.fingerprint:
            raise ModelFolderError(f"adapter {self.name}: {_WEIGHTS_FILE} has changed while it was loaded; try again")
        return weights

    def rank_of(self, module: str) -> int:
        """Returns the rank of a module's matrices by the configuration."""
        return _exception(module, self.rank_pattern, self.rank)

    def scale_of(self, module: str) -> float:
        """Returns the factor of a module's product."""
        rank, alpha = self.rank_of(module), _exception(module, self.alpha_pattern, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def named_folders(text: str) -> dict[str, pathlib.Path]:
    """Returns the folders of a setting, `NAME=FOLDER` separated by commas, by the names of their adapters.

    Raises ConfigurationError for another form, for a name that no adapter can have, and for one that is there twice.
    """
    found: dict[str, pathlib.Path] = {}
    for each in filter(None, (one.strip() for one in text.split(","))):
        name, separator, folder = each.partition("=")
        if not separator or not folder:
            raise ConfigurationError(f"{each[:200]!r} must be NAME=FOLDER")
        if not _NAME.fullmatch(name):
            raise ConfigurationError(_WRONG_NAME.format(name[:100]))
        if name in found:
            raise ConfigurationError(f"{name} is there twice")
        found[name] = pathlib.Path(folder).expanduser()
    return found


def open_adapters(text: str) -> tuple[AdapterFolder, ...]:
    """Opens the adapters of a setting that `named_folders` accepts. Raises ModelFolderError for one that fails."""
    return tuple(AdapterFolder.open(name, folder) for name, folder in named_folders(text).items())


def _parsed(name: str, content: bytes) -> dict[str, Any]:
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"adapter {name}: {_CONFIG_FILE} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelFolderError(f"adapter {name}: {_CONFIG_FILE} must hold a JSON object")
    return config


def _check(name: str, config: Mapping[str, Any]) -> None:
    """Raises ModelFolderError for settings that change results and are not known here."""
    if config.get("peft_type") != "LORA":
        raise ModelFolderError(f"adapter {name}: peft_type is {config.get('peft_type')!r}; LORA is served")
    for key, value in config.items():
        if value is None or key in _WITHOUT_EFFECT:
            continue
        if key not in _UNSERVED:
            raise ModelFolderError(f"adapter {name}: the setting {key[:100]!r} of {_CONFIG_FILE} is not known here")
        if value not in _UNSERVED[key]:
            raise ModelFolderError(
                f"adapter {name}: {key} is {str(value)[:100]!r} in {_CONFIG_FILE}, and such adapters are not served; "
                "train it without, or merge it into a model of its own"
            )
    if not isinstance(config.get("use_rslora"), bool | None):
        raise ModelFolderError(f"adapter {name}: use_rslora must be true or false")


def _rank(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_RANK:
        raise ModelFolderError(
            f"adapter {name}: the rank must be a whole number from 1 to {_MAX_RANK}, not {repr(value)[:100]}"
        )
    return value


def _number(name: str, key: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= _MAX_ALPHA:
        raise ModelFolderError(f"adapter {name}: {key} must be a number up to {_MAX_ALPHA:g}, not {str(value)[:100]!r}")
    return float(value)


def _object(name: str, config: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise ModelFolderError(f"adapter {name}: {key} must be an object")
    if len(value) > _MAX_PATTERNS:
        raise ModelFolderError(f"adapter {name}: {key} has {len(value)} patterns, the limit is {_MAX_PATTERNS}")
    for pattern in value:
        _check_pattern(name, pattern)
    return value


def _check_pattern(name: str, pattern: str) -> None:
    """Raises ModelFolderError for a pattern that is no regular expression, or that could take for ever."""
    is_bounded = _PATTERN.fullmatch(pattern) and not _REPEATED_GROUP.search(pattern)
    if not is_bounded or len(_REPETITION.findall(pattern)) > _MAX_REPETITIONS:
        raise ModelFolderError(
            f"adapter {name}: the pattern {pattern[:100]!r} of {_CONFIG_FILE} is not served; a pattern has names, dots "
            f"and at most {_MAX_REPETITIONS} repetitions, such as .*"
        )
    try:
        re.compile(pattern)
    except re.error:
        raise ModelFolderError(
            f"adapter {name}: the pattern {pattern[:100]!r} of {_CONFIG_FILE} is no regular expression"
        ) from None


def _exception(module: str, patterns: Mapping[str, ValueT], default: ValueT) -> ValueT:
    """Returns the value of the first pattern for a module, as PEFT looks it up."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _pieces(name: str, file: pathlib.Path, max_bytes: int) -> Iterator[bytes]:
    """Yields a file's content. Raises ModelFolderError without the path, which a remote caller must not see.

    Something else than a regular file could block for ever, or have no end.
    """
    try:
        # Opening a pipe does not wait for its writer.
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:
            about = os.fstat(stream.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise ModelFolderError(f"adapter {name}: {file.name} is no regular file")
            if about.st_size > max_bytes:
                raise ModelFolderError(f"adapter {name}: {file.name} has more than {max_bytes} bytes")
            num_left = max_bytes
            while num_left and (piece := stream.read(min(num_left, _READ_BYTES))):
                num_left -= len(piece)
                yield piece
    except FileNotFoundError:
        raise ModelFolderError(
            f"adapter {name}: {file.name} is missing; give a folder that save_pretrained of PEFT has written"
        ) from None
    except OSError as error:
        raise ModelFolderError(f"adapter {name}: {file.name} cannot be read: {error.strerror}") from None


def _fingerprint(config: bytes, weights: Iterable[bytes]) -> str:
    digest = hashlib.sha256(len(config).to_bytes(8, "little") + config)
    for piece in weights:
        digest.update(piece)
    return digest.hexdigest()
