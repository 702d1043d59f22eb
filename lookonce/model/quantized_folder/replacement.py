"""Puts stored layers in the place of plain ones before a folder is loaded, and layers with codes afterwards."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import torch

from lookonce.errors import ModelFolderError
from lookonce.logs import get_logger
from lookonce.model.quantized_folder.names import names_in
from lookonce.model.quantized_folder.quantized_tensors import QuantizedTensors
from lookonce.model.quantized_folder.storage import quantization_entry
from lookonce.model.quantized_folder.stored_experts import StoredExperts
from lookonce.model.quantized_folder.stored_linear import StoredLinear

_log = get_logger(__name__)


def without_quantization(config: Any) -> Any:
    """Removes transformers' own handling of quantized weights from a configuration; returns the same object."""
    for part in (config, config.get_text_config()):
        if quantization_entry(vars(part)) is not None and hasattr(part, "quantization_config"):
            del part.quantization_config
    return config


def replace_by_stored(model: Any, tensors: QuantizedTensors) -> list[str]:
    """Replaces layers of a model that is not loaded yet by layers with the folder's tensors.

    Layers that the model lacks, such as those of its other half, are left out. Returns patterns of the names of tensors
    that the loader must leave out: those of experts. Raises ModelFolderError for a layer that is neither a linear layer
    nor one of an expert, whose weight is tied to another one, or whose tensors do not fit it.
    """
    names = names_in(model, tensors.layers)
    for layer, name in names.linears.items():
        linear = model.get_submodule(name)
        if type(linear) is not torch.nn.Linear:
            raise ModelFolderError(
                f"the quantized layer {layer} is not served: it is a {type(linear).__name__}, not a linear layer"
            )
        if f"{name}.weight" in model.all_tied_weights_keys:
            raise ModelFolderError(
                f"the quantized layer {layer} is not served: config.json ties its weight to the embedding table "
                "(tie_word_embeddings), which is not quantized; use the config.json that belongs to the weights"
            )
        _set_module(model, name, StoredLinear(layer, linear, tensors.layers[layer], tensors.storage))
    for name, layers in names.experts.items():
        _set_module(model, name, StoredExperts(name, model.get_submodule(name), layers, tensors))
        # Some models draw the weights of experts through the module around them before they read any.
        model.get_submodule(name.rpartition(".")[0])._is_hf_initialized = True
    # One pattern, because the loader compares each tensor with each pattern.
    experts = "|".join(re.escape(name) for name in names.experts)
    return [rf"^(?:{experts})\."] if experts else []


def restore_layers(model: torch.nn.Module, *, keep_codes: bool) -> None:
    """Replaces stored layers of a loaded model: by layers with codes, or by plain ones with whole weights.

    A layer whose groups the kernels cannot read gets whole weights in any case. Codes stay in the mapped files, and are
    read at each use of a weight. Raises ModelFolderError for a weight that cannot be read.
    """
    found = [(name, child) for name, child in model.named_modules() if isinstance(child, StoredLinear | StoredExperts)]
    if not found:
        return
    formats: Counter[str] = Counter()
    with torch.inference_mode():
        while found:
            name, stored = found.pop()
            layer, is_kept = stored.restored(keep_codes=keep_codes)
            _set_module(model, name, layer)
            for form, number in stored.descriptions().items():
                formats[form if is_kept else f"{form}, made whole"] += number
    _log.info("linear layers were stored as codes", layers=dict(formats))


def stored_formats(model: torch.nn.Module) -> Counter[str]:
    """Returns how many stored layers a model has of each form, described for people."""
    stored = [child.descriptions() for child in model.modules() if isinstance(child, StoredLinear | StoredExperts)]
    return sum(stored, Counter())


def stored_expert_bytes(model: torch.nn.Module) -> int:
    """Returns the bytes of stored experts, which are no parameters of the model."""
    return sum(child.num_bytes for child in model.modules() if isinstance(child, StoredExperts))


def _set_module(model: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
