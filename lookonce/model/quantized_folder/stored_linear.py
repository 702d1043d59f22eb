"""Takes the place of a linear layer while a quantized folder is loaded, so that the loader fills in its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from lookonce.model.kernels.quantized_layers import plain_linear
from lookonce.model.kernels.quantized_weight import QuantizedLinear
from lookonce.model.quantized_folder.layout import read_layout
from lookonce.model.quantized_folder.storage import Storage
from lookonce.model.quantized_folder.stored_weight import StoredWeight
from lookonce.model.safetensors_header import StoredTensor

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}


class StoredLinear(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Holds a layer's tensors as parameters, in the types and shapes of the files. It computes nothing.

    Loaders keep a parameter's own type; only a bias gets the model's.
    """

    def __init__(
        self, name: str, linear: torch.nn.Linear, tensors: Mapping[str, StoredTensor], storage: Storage
    ) -> None:
        """`tensors` has the layer's tensors by the last part of their names. Raises ModelFolderError.

        `name` is the layer's name in the folder, for errors.
        """
        super().__init__()
        self.layout = read_layout(name, linear.out_features, linear.in_features, tensors, storage)
        self._dtype: torch.dtype = linear.weight.dtype
        for part, tensor in tensors.items():
            if tensor.dtype not in _DTYPES:
                raise self.layout.error(f"{part} has the element type {tensor.dtype}, which is not served")
            dtype = self._dtype if part == "bias" else _DTYPES[tensor.dtype]
            self.register_parameter(part, torch.nn.Parameter(torch.empty(tensor.shape, dtype=dtype), False))

    def descriptions(self) -> Counter[str]:
        """Returns the layer's form, described for people, with the number 1."""
        return Counter([self.layout.description])

    def stored_weight(self) -> StoredWeight:
        """Returns the weight. The tensors must have been loaded."""
        tensors = {part: parameter.detach() for part, parameter in self._parameters.items() if part != "bias"}
        return StoredWeight(self.layout, tensors, self._dtype)

    def restored(self, *, keep_codes: bool) -> tuple[torch.nn.Module, bool]:
        """Returns the layer that takes this one's place, and whether its weight stays codes, in the mapped files."""
        bias = self._parameters.get("bias")
        own_bias = None if bias is None else bias.detach().clone()
        weight = self.stored_weight()
        if keep_codes and weight.has_readable_groups():
            return QuantizedLinear(weight, own_bias), True
        return plain_linear(weight.whole(), own_bias), False
