"""The tensors of a folder's quantized layers: their types and shapes, and their values from the mapped files."""

from __future__ import annotations

import pathlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from safetensors import safe_open
from torch import Tensor

from lookonce.model.quantized_folder.storage import Storage
from lookonce.model.safetensors_header import StoredTensor, read_header

# The last part of a tensor's name, where a layer's weight is quantized.
_MARKS = frozenset({"weight_packed", "weight_scale", "weight_scale_inv", "qweight"})


@dataclass(frozen=True, slots=True)
class QuantizedTensors:
    """The quantized layers of a folder, by their names in its files."""

    storage: Storage
    # Tensors of a layer by the last part of their names.
    layers: Mapping[str, Mapping[str, StoredTensor]]
    # The file of each tensor.
    _files: Mapping[str, pathlib.Path] = field(repr=False)
    # Mapped files that have been opened.
    _opened: dict[pathlib.Path, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, config: Mapping[str, Any], files: Sequence[pathlib.Path]) -> QuantizedTensors | None:
        """Returns None for a folder whose weights are whole. `config` is the content of config.json.

        Raises ModelFolderError for a form that is not served.
        """
        storage = Storage.of(config)
        if storage is None:
            return None
        layers: defaultdict[str, dict[str, StoredTensor]] = defaultdict(dict)
        file_of: dict[str, pathlib.Path] = {}
        for file in files:
            for name, tensor in read_header(file).items():
                layer, _, part = name.rpartition(".")
                layers[layer][part] = tensor
                file_of[name] = file
        return cls(storage, {layer: parts for layer, parts in layers.items() if _MARKS & parts.keys()}, file_of)

    def read(self, layer: str) -> dict[str, Tensor]:
        """Returns a layer's tensors by the last part of their names; they stay in the mapped files."""
        found = {}
        for part in self.layers[layer]:
            name = f"{layer}.{part}"
            file = self._files[name]
            if file not in self._opened:
                self._opened[file] = safe_open(file, framework="pt")
            found[part] = self._opened[file].get_tensor(name)
        return found
