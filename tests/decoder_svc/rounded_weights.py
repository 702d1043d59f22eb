"""Writes the weights that `--quantize` computes with into a folder, for models that must give the same answers."""

from __future__ import annotations

import pathlib

from safetensors.torch import load_file, save_file

from lookonce.model.kernels.quantized_weight import quantized


def round_weights(folder: pathlib.Path, bits: int) -> None:
    """Rounds the text model's linear layers to `bits`, and the head to 8."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("lm_head.weight"):
            tensors[name] = quantized(tensor, 8).dequantized()
        elif ".layers." in name and "vision" not in name and "visual" not in name and tensor.ndim == 2:
            tensors[name] = quantized(tensor, bits).dequantized()
    save_file(tensors, file, metadata={"format": "pt"})
