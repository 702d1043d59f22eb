"""Checks that a checkpoint has the weights of one half of its model, from file headers, without reading weights.

The half is built on the meta device and loads tensors without values, with the functions of transformers that
`from_pretrained` calls. So the renaming of legacy keys, merging of experts and tying of weights apply as in loading.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from lookonce.errors import ModelFolderError
from lookonce.local.shape_pass import SHAPE_ATTENTION, SHAPE_EXPERTS, check_step, register_shape_attention
from lookonce.model.faults.build_faults import built_fault
from lookonce.model.faults.weight_faults import is_merge_fault, merge_fault, report_fault
from lookonce.model.half_model import Half, half_class, load_text_half, load_vision_half
from lookonce.model.libraries.rust_panics import RustPanicError, call_rust
from lookonce.model.model_folder import CONFIGURATION_FAULTS, ModelFolder
from lookonce.model.quantized_folder.quantized_tensors import QuantizedTensors
from lookonce.model.quantized_folder.replacement import stored_expert_bytes, stored_formats, without_quantization

_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class HalfWeights:
    """Element type and size of one half, loaded with the element type of its checkpoint."""

    dtype: torch.dtype
    # Number of tensors; tied weights count once.
    num_tensors: int
    num_bytes: int
    # Form -> number of linear layers that are stored as codes.
    quantized: Mapping[str, int]


def check_half(folder: ModelFolder, config: Any, half: Half) -> HalfWeights:
    """Compares names and shapes of the weights. `config` is the folder's configuration, read by transformers.

    Raises ModelFolderError if loading this half would fail, or a step of the language model. With a release of
    transformers whose internal functions differ from those used here, the half is loaded instead.
    """
    tensors = _headers(folder)
    report: dict[str, Any] | None = None
    if tensors is not None:
        quantized = QuantizedTensors.of(folder.config, folder.weight_files)
        model = _empty_half(folder, copy.deepcopy(config), half, tensors, quantized)
        report = _loading_report(model, tensors, half, folder)
    is_empty = report is not None
    if report is None:
        model, report = _loaded(folder, half), {}
    if (wrong := report_fault(half.value, model, report, folder.weight_files)) is not None:
        raise ModelFolderError(wrong)
    parameters = list(model.parameters())
    num_bytes = sum(parameter.nbytes for parameter in parameters) + stored_expert_bytes(model)
    weights = HalfWeights(model.dtype, len(parameters), num_bytes, stored_formats(model))
    if half is Half.TEXT and tensors is not None and is_empty:
        # Layers that are codes in the folder compute nothing.
        check_step(_empty_half(folder, copy.deepcopy(config), half, tensors, None) if weights.quantized else model)
    return weights


def _loaded(folder: ModelFolder, half: Half) -> Any:
    return load_vision_half(folder.path, None) if half is Half.VISION else load_text_half(folder.path, None, "sdpa")


def _headers(folder: ModelFolder) -> dict[str, torch.Tensor] | None:
    """Returns all tensors of the folder, without values; None if transformers has no such function."""
    try:
        from transformers.modeling_utils import load_state_dict
    except ImportError:
        return None

    tensors: dict[str, torch.Tensor] = {}
    for file in folder.weight_files:
        try:
            tensors.update(call_rust(load_state_dict, file, map_location="meta"))
        except (SafetensorError, ValueError, RustPanicError) as error:
            raise ModelFolderError(f"{file} cannot be read: {error}; download it again") from error
    return tensors


def _empty_half(
    folder: ModelFolder,
    config: Any,
    half: Half,
    tensors: Mapping[str, torch.Tensor],
    quantized: QuantizedTensors | None,
) -> Any:
    base = getattr(transformers, folder.architecture, None)
    if base is None:
        raise ModelFolderError(f"architecture {folder.architecture} is not known to transformers; upgrade transformers")
    dtype = config.dtype or next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), None)
    forms: dict[str, Any] = {}
    if half is Half.TEXT:
        register_shape_attention()
        attention = {"text_config": SHAPE_ATTENTION, "vision_config": "eager"}
        forms = {"attn_implementation": attention, "experts_implementation": SHAPE_EXPERTS}
    try:
        with _META:
            return half_class(base, half, quantized)._from_config(without_quantization(config), dtype=dtype, **forms)
    except CONFIGURATION_FAULTS as error:
        raise built_fault(half.value, error) from error


def _loading_report(
    model: Any, tensors: dict[str, torch.Tensor], half: Half, folder: ModelFolder
) -> dict[str, Any] | None:
    """Returns the report that `from_pretrained` would log; None if transformers lacks the functions used here."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.modeling_utils import LoadStateDictConfig

        how = LoadStateDictConfig(
            ignore_mismatched_sizes=True,
            device_map={"": _META},
            dtype=model.dtype,
            dtype_plan=model._get_dtype_plan(model.dtype),
            weight_mapping=get_model_conversion_mapping(model),
        )
        info, _ = type(model)._load_pretrained_model(model, tensors, None, how)
        report: dict[str, Any] = type(model)._finalize_model_loading(model, how, info).to_dict()
    except (ImportError, AttributeError, TypeError):
        return None
    except (RuntimeError, ValueError) as error:
        if is_merge_fault(error):
            raise merge_fault(half.value, folder.weight_files) from error
        raise ModelFolderError(f"the {half.value} weights do not fit the configuration: {error}") from error
    return report
