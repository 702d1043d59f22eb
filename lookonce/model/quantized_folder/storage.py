"""Reads from config.json how a folder's weights are quantized. Pure Python.

Sources: compressed-tensors 0.20 (formats pack-quantized, int-quantized, float-quantized and naive-quantized), GPTQ
(arXiv:2210.17323, the layout of AutoGPTQ), AWQ (arXiv:2306.00978, version gemm) and FP8 as DeepSeek-V3
(arXiv:2412.19437) and FBGEMM store it.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lookonce.errors import ModelFolderError

# The entry is at the top of config.json, or in the language model's part.
_ENTRY = "quantization_config"
_COMPRESSED_FORMATS = frozenset(
    {"pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense"}
)
_GROUP_KEYS = ("group_size", "q_group_size")
_BLOCK_KEYS = ("weight_block_size", "block_structure")
_BLOCK = re.compile(r"\d+x\d+")
_GPTQ_FORMATS = ("gptq", "gptq_v2")
_REMEDY = "use the unquantized model, whose weights a decoder on CPUs rounds while loading with --quantize"


class Method(enum.StrEnum):
    """A tool that writes quantized folders, as `quant_method` names it."""

    COMPRESSED_TENSORS = "compressed-tensors"
    GPTQ = "gptq"
    AWQ = "awq"
    FP8 = "fp8"
    FBGEMM_FP8 = "fbgemm_fp8"


@dataclass(frozen=True, slots=True)
class Storage:
    """The settings that are needed to read a folder's tensors. Whatever differs by layer follows from their shapes."""

    method: Method
    # This is added to stored zero points; GPTQ's first version stores them less one.
    zero_shift: int = 0
    # Numbers of neighbouring inputs that share a scale in some layers.
    group_sizes: tuple[int, ...] = ()
    # Numbers of neighbouring outputs and inputs that share a scale in some layers.
    block_shapes: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Storage | None:
        """Returns how weights are stored by `config`, the content of config.json; None if they are not quantized.

        Raises ModelFolderError for a form that is not served, with its name and a remedy.
        """
        entry = quantization_entry(config)
        if entry is None:
            return None
        if not isinstance(entry, Mapping):
            raise ModelFolderError(f"config.json: {_ENTRY} must be an object, not {entry!r}")
        name = entry.get("quant_method")
        if name not in list(Method):
            served = ", ".join(Method)
            raise ModelFolderError(
                f"config.json: weights quantized by {name!r} are not served (these are: {served}); {_REMEDY}"
            )
        method, zero_shift = Method(name), 0
        if method is Method.COMPRESSED_TENSORS:
            _check_compressed(entry)
        elif method is Method.GPTQ:
            zero_shift = _gptq_zero_shift(entry)
        elif method is Method.AWQ:
            for name in ("version", "format", "checkpoint_format"):
                _check_one_of(entry, name, ("gemm",), "gemm")
        elif method is Method.FP8:
            _check_one_of(entry, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        entries = [entry, *_compressed_weights(entry)] if method is Method.COMPRESSED_TENSORS else [entry]
        shapes = [_block(part[key]) for part in entries for key in _BLOCK_KEYS if part.get(key) is not None]
        sizes = [part[key] for part in entries for key in _GROUP_KEYS if part.get(key) is not None]
        if not all(_is_size(size) or size == -1 for size in sizes):
            raise ModelFolderError(f"config.json: {_ENTRY} has a group size of {sizes}, which are not positive numbers")
        return cls(method, zero_shift, tuple(size for size in sizes if size != -1), tuple(shapes))


def quantization_entry(config: Mapping[str, Any]) -> object:
    """Returns the entry about quantized weights in the content of config.json, or None."""
    text = config.get("text_config")
    nested = text.get(_ENTRY) if isinstance(text, Mapping) else None
    entry = config.get(_ENTRY)
    return nested if entry is None else entry


def _compressed_weights(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the descriptions of weights of all groups of layers."""
    groups = entry.get("config_groups") or {}
    return [group["weights"] for group in groups.values() if isinstance(group.get("weights"), Mapping)]


def _block(shape: object) -> tuple[int, int]:
    """Returns a block's shape, which older releases of compressed-tensors write as text such as `128x128`."""
    sizes = [int(size) for size in shape.split("x")] if isinstance(shape, str) and _BLOCK.fullmatch(shape) else shape
    if not (isinstance(sizes, list) and len(sizes) == 2 and all(map(_is_size, sizes))):
        raise ModelFolderError(f"config.json: {_ENTRY} has blocks of {shape!r}, which are not two positive numbers")
    return sizes[0], sizes[1]


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check_compressed(entry: Mapping[str, Any]) -> None:
    _check_one_of(entry, "format", _COMPRESSED_FORMATS, "dense")
    groups = entry.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise ModelFolderError(f"config.json: {_ENTRY}.config_groups must be an object of objects")
    for group in groups.values():
        if group.get("format") is not None:
            _check_one_of(group, "format", _COMPRESSED_FORMATS, "dense")
    for name in ("sparsity_config", "transform_config"):
        if changes := entry.get(name):
            if isinstance(changes, Mapping) and changes.get("format") == "dense":
                continue
            raise ModelFolderError(f"config.json: {_ENTRY} has a {name}, which is not served; {_REMEDY}")


def _gptq_zero_shift(entry: Mapping[str, Any]) -> int:
    name = "checkpoint_format" if "checkpoint_format" in entry else "format"
    _check_one_of(entry, name, _GPTQ_FORMATS, "gptq")
    return 0 if entry.get(name) == "gptq_v2" else 1


def _check_one_of(entry: Mapping[str, Any], name: str, served: Any, default: str) -> None:
    value = entry.get(name, default)
    if (value.lower() if isinstance(value, str) else value) not in served:
        method = entry.get("quant_method", Method.COMPRESSED_TENSORS)
        raise ModelFolderError(
            f"config.json: weights quantized by {method} with {name} {value!r} are not served (these are: "
            f"{', '.join(sorted(served))}); {_REMEDY}"
        )
