"""Takes the place of a module with experts while a quantized folder is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from lookonce.errors import ModelFolderError
from lookonce.model.kernels.quantized_experts import Expert, QuantizedExperts, experts_of
from lookonce.model.quantized_folder.layout import Layout, read_layout
from lookonce.model.quantized_folder.names import ExpertLayer
from lookonce.model.quantized_folder.quantized_tensors import QuantizedTensors
from lookonce.model.quantized_folder.stored_weight import StoredWeight

_PARTS = ("gate_proj", "up_proj", "down_proj")


class StoredExperts(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Knows where the layers of experts are in a folder. It has no parameters, so the loader reads none of them."""

    def __init__(self, name: str, module: Any, layers: Mapping[ExpertLayer, str], tensors: QuantizedTensors) -> None:
        """`module` gives up its weights. Raises ModelFolderError if the folder's layers do not fit it."""
        super().__init__()
        sizes = experts_of(module)
        if sizes is None:
            raise ModelFolderError(
                f"the quantized experts {name} are not served: {type(module).__name__} is not a plain gated MLP; "
                "use the unquantized model"
            )
        self._sizes = sizes
        self._layers = layers
        self._tensors = tensors
        # In a tuple, so that it is no child.
        self._plain = (module,)
        self._layouts = {
            (number, part): self._layout(name, number, part) for number in range(sizes.num_experts) for part in _PARTS
        }
        if others := layers.keys() - self._layouts.keys():
            raise ModelFolderError(
                f"the quantized experts {name} do not fit the configuration: {layers[min(others)]} is one too many"
            )
        for weights in ("gate_up_proj", "down_proj"):
            setattr(module, weights, None)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(
            tensor.num_bytes for layer in self._layers.values() for tensor in self._tensors.layers[layer].values()
        )

    def descriptions(self) -> Counter[str]:
        """Returns the number of layers of each form, described for people."""
        return Counter(layout.description for layout in self._layouts.values())

    def restored(self, *, keep_codes: bool) -> tuple[torch.nn.Module, bool]:
        """Returns the module that takes this one's place, and whether its weights stay codes, in the mapped files."""
        experts = QuantizedExperts(replace(self._sizes, read=self._read), *self._plain)
        is_kept = keep_codes and self._are_readable()
        return (experts, True) if is_kept else (experts.plain(), False)

    def _layout(self, name: str, number: int, part: str) -> Layout:
        layer = self._layers.get((number, part))
        if layer is None:
            raise ModelFolderError(
                f"the quantized experts {name} do not fit the configuration: {part} of expert {number} is missing"
            )
        parts = self._tensors.layers[layer]
        if "bias" in parts:
            raise ModelFolderError(f"the quantized layer {layer} is not served: it has a bias, as no expert here")
        hidden, mlp = self._sizes.hidden_size, self._sizes.mlp_size
        num_outputs, num_inputs = (hidden, mlp) if part == "down_proj" else (mlp, hidden)
        return read_layout(layer, num_outputs, num_inputs, parts, self._tensors.storage)

    def _are_readable(self) -> bool:
        """Whether the kernel can read all experts: they have one form, and groups that it knows."""
        forms = {(part == "down_proj", layout.form, layout.group_inputs) for (_, part), layout in self._layouts.items()}
        return len(forms) == 2 and all(self._weight(*key).has_readable_groups() for key in self._layouts)

    def _weight(self, number: int, part: str) -> StoredWeight:
        layout = self._layouts[number, part]
        return StoredWeight(layout, self._tensors.read(layout.name), self._sizes.dtype)

    def _read(self, number: int) -> Expert:
        weights = [self._weight(number, part) for part in _PARTS]
        are_readable = all(weight.has_readable_groups() for weight in weights)
        gate, up, down = (weight.quantized() if are_readable else weight.whole() for weight in weights)
        return (gate, up), down
