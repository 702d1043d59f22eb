"""Puts stored linear layers in the place of plain ones before a folder is loaded, and layers with codes afterwards."""

from __future__ import annotations

import pathlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lookonce.errors import ModelFolderError
from lookonce.logs import get_logger
from lookonce.model.kernels.quantized_layers import plain_linear
from lookonce.model.kernels.quantized_weight import QuantizedLinear
from lookonce.model.quantized_folder.storage import Storage, quantization_entry
from lookonce.model.quantized_folder.stored_linear import MARKS, StoredLinear
from lookonce.model.safetensors_header import StoredTensor, read_header

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class QuantizedTensors:
    """The tensors of a folder's quantized layers, from the headers of its files."""

    storage: Storage
    # The layer's name in the folder -> the last part of a tensor's name -> the tensor.
    layers: Mapping[str, Mapping[str, StoredTensor]]

    @classmethod
    def of(cls, config: Mapping[str, Any], files: Sequence[pathlib.Path]) -> QuantizedTensors | None:
        """Returns None for a folder whose weights are whole. `config` is the content of config.json.

        Raises ModelFolderError for a form that is not served.
        """
        storage = Storage.of(config)
        if storage is None:
            return None
        tensors: defaultdict[str, dict[str, StoredTensor]] = defaultdict(dict)
        for file in files:
            for name, tensor in read_header(file).items():
                layer, _, part = name.rpartition(".")
                tensors[layer][part] = tensor
        return cls(storage, {layer: parts for layer, parts in tensors.items() if any(mark in parts for mark in MARKS)})


def without_quantization(config: Any) -> Any:
    """Removes transformers' own handling of quantized weights from a configuration; returns the same object."""
    for part in (config, config.get_text_config()):
        if quantization_entry(vars(part)) is not None and hasattr(part, "quantization_config"):
            del part.quantization_config
    return config


def replace_by_stored(model: Any, tensors: QuantizedTensors) -> None:
    """Replaces linear layers of a model that is not loaded yet by layers with the folder's tensors.

    Layers that the model lacks, such as those of its other half, are left out. Raises ModelFolderError for a layer that
    is no linear layer, or whose tensors do not fit it.
    """
    for layer, name in _names_in(model, tensors.layers).items():
        parent_name, _, child_name = name.rpartition(".")
        linear = model.get_submodule(name)
        if type(linear) is not torch.nn.Linear:
            raise ModelFolderError(
                f"the quantized layer {layer} is not served: it is a {type(linear).__name__}, not a linear layer"
            )
        stored = StoredLinear(layer, linear, tensors.layers[layer], tensors.storage)
        setattr(model.get_submodule(parent_name), child_name, stored)


def restore_linears(model: torch.nn.Module, *, keep_codes: bool) -> None:
    """Replaces stored layers of a loaded model: by layers with codes, or by plain ones with whole weights.

    A layer whose groups the kernels cannot read gets whole weights in any case. Codes stay in the mapped files, and are
    read at each use of a weight. Raises ModelFolderError for a weight that cannot be read.
    """
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, StoredLinear)
    ]
    if not found:
        return
    formats: Counter[str] = Counter()
    with torch.inference_mode():
        while found:
            parent, name, stored = found.pop()
            weight, form = stored.stored_weight(), stored.layout.description
            is_kept = keep_codes and weight.has_readable_groups()
            bias = stored.stored_bias()
            layer = QuantizedLinear(weight, bias) if is_kept else plain_linear(weight.whole(), bias)
            setattr(parent, name, layer)
            formats[form if is_kept else f"{form}, made whole"] += 1
    _log.info("linear layers were stored as codes", layers=dict(formats))


def stored_formats(model: torch.nn.Module) -> Counter[str]:
    """Returns how many stored layers a model has of each form, described for people."""
    return Counter(module.layout.description for module in model.modules() if isinstance(module, StoredLinear))


def _names_in(model: Any, layers: Mapping[str, object]) -> dict[str, str]:
    """Returns the names in the model of the folder's layers that it has, as transformers' loader maps them."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError as error:
        raise ModelFolderError("quantized folders need another release of transformers (5.23 was tested)") from error

    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    own = model.state_dict()
    names: dict[str, str] = {}
    for layer in layers:
        key, merged = rename_source_key(f"{layer}.weight", renamings, converters, model.base_model_prefix, own)
        if key not in own:
            continue
        if merged is not None:
            raise ModelFolderError(
                f"the quantized layer {layer} is not served: it is merged with others (experts); use the unquantized "
                "model"
            )
        names[layer] = key.removesuffix(".weight")
    return names
