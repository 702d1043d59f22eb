"""Reads the matrices of LoRA adapters (arXiv:2106.09685) and finds the linear layers that they belong to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from lookonce.errors import ModelFolderError
from lookonce.model.adapter_folder import AdapterFolder
from lookonce.model.half_model import text_child
from lookonce.model.kernels.quantized_weight import QuantizedLinear
from lookonce.model.structure.latent_attention import LatentProjection

# An adapter of all layers of a large model has a thousand matrices, whose names take some 200 KB.
_MAX_HEADER_BYTES = 4 << 20
# The largest float16. Larger numbers overflow in the products of a layer.
_LARGEST = 65504.0
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter adds `inputs @ down.T @ up.T` to one linear layer."""

    # float32 [rank, inputs].
    down: Tensor
    # float32 [outputs, rank], with the adapter's scale.
    up: Tensor


class TextLinears:
    """The linear layers of a text model, found by the names that adapters of several versions of transformers have."""

    def __init__(self, model: Any) -> None:
        """`model` is the language half as transformers loads it: later, kernels may take the places of its layers."""
        child = text_child(model)
        # Inputs and outputs by the layer's name in the text model. Subclasses of linear layers may return other things.
        self._sizes = {
            name: (module.in_features, module.out_features)
            for name, module in getattr(model.model, child).named_modules()
            if type(module) in (torch.nn.Linear, QuantizedLinear)
        }
        self._prefixes = (f"model.{child}.", "language_model.model.", "text_model.model.", "model.")
        self._latent = {
            name for name, module in getattr(model.model, child).named_modules() if isinstance(module, LatentProjection)
        }
        self._others = [name for name, _ in model.model.named_children() if name != child]

    def found(self, folder: AdapterFolder, module: str) -> tuple[str, tuple[int, int]]:
        """Returns the name of a linear layer in the text model, with its inputs and outputs.

        Raises ModelFolderError if there is none.
        """
        for name in self._forms(module):
            if name in self._sizes:
                return name, self._sizes[name]
        if not self._latent.isdisjoint(self._forms(module)):
            raise ModelFolderError(
                f"adapter {folder.name} changes {module}, whose halves are applied to queries and to results of latent "
                "attention, where adapters are not added; train it without kv_b_proj"
            )
        path = module.removeprefix("model.")
        if any(path.startswith(f"{other}.") for other in self._others):
            raise ModelFolderError(
                f"adapter {folder.name} changes {module}, which is in the vision half; embeddings in the shared cache "
                "are those of the base model, so only adapters of the language model are served; train it with "
                f"exclude_modules=r'.*({'|'.join(self._others)}).*' of PEFT"
            )
        raise ModelFolderError(
            f"adapter {folder.name} changes {module}, which is no linear layer in the layers of this model's language "
            "model"
        )

    def _forms(self, module: str) -> Iterator[str]:
        """Yields the names that it may have in the text model, whose place was another one before transformers 4.52."""
        for prefix in self._prefixes:
            if module.startswith(prefix):
                yield module.removeprefix(prefix)


def read_low_ranks(folder: AdapterFolder, linears: TextLinears) -> dict[str, LowRank]:
    """Returns what an adapter adds to the linear layers of a text model, by their names in it.

    Raises ModelFolderError for anything that does not fit, and for an adapter of the vision half.
    """
    content = folder.read_weights()
    # The first eight bytes are the length of the list of tensors, which takes time and memory by their number.
    if _MAX_HEADER_BYTES < int.from_bytes(content[:8], "little") <= len(content):
        raise ModelFolderError(
            f"adapter {folder.name}: the list of its matrices has more than {_MAX_HEADER_BYTES} bytes"
        )
    try:
        tensors = safetensors.torch.load(content)
    except safetensors.SafetensorError as error:
        raise ModelFolderError(f"adapter {folder.name}: its matrices cannot be read as safetensors: {error}") from None
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise ModelFolderError(
                f"adapter {folder.name}: {key[:200]} is no LoRA matrix of a linear layer, and only these are served"
            )
        pairs.setdefault(match[1], {})[match[2]] = tensor
    if not pairs:
        raise ModelFolderError(f"adapter {folder.name} has no matrices")
    found: dict[str, LowRank] = {}
    for module, pair in pairs.items():
        name, sizes = linears.found(folder, module)
        if name in found:
            raise ModelFolderError(f"adapter {folder.name} changes {name} twice, under two names")
        found[name] = _low_rank(folder, module, pair, sizes)
    return found


def _low_rank(folder: AdapterFolder, module: str, pair: Mapping[str, Tensor], sizes: tuple[int, int]) -> LowRank:
    if set(pair) != {"A", "B"}:
        raise ModelFolderError(f"adapter {folder.name}: {module} has one matrix of two")
    down, up, rank = pair["A"], pair["B"], folder.rank_of(module)
    num_inputs, num_outputs = sizes
    if down.shape != (rank, num_inputs) or up.shape != (num_outputs, rank):
        raise ModelFolderError(
            f"adapter {folder.name}: the matrices of {module} are {tuple(down.shape)} and {tuple(up.shape)}; they must "
            f"be {(rank, num_inputs)} and {(num_outputs, rank)}"
        )
    if not (down.is_floating_point() and up.is_floating_point()):
        raise ModelFolderError(f"adapter {folder.name}: the matrices of {module} are not of floating-point numbers")
    # Always copies, so that the content of the file is freed.
    down, up = down.to(torch.float32, copy=True), up.to(torch.float32, copy=True) * folder.scale_of(module)
    if not all(bool(matrix.isfinite().all()) for matrix in (down, up)):
        raise ModelFolderError(
            f"adapter {folder.name}: the matrices of {module} hold NaN or infinity; copy the adapter again, or train "
            "it again"
        )
    if max(down.abs().max(), up.abs().max()) > _LARGEST:
        raise ModelFolderError(
            f"adapter {folder.name}: the matrices of {module}, with their scale, have numbers that are not within "
            f"±{_LARGEST:g}"
        )
    return LowRank(down.contiguous(), up.contiguous())
