"""Writes the weights that `--quantize` computes with into a folder, for models that must give the same answers."""

from __future__ import annotations

import pathlib
import re

import torch
from safetensors.torch import load_file, save_file

from lookonce.model.kernels.quantized_weight import quantized
from tests.quantized_folders import are_transposed

_TEXT = re.compile(r"\.layers\.|per_layer_model_projection|\baltup_")
# Vision towers, layers that choose experts, those that mix hidden states, and the keys and values of latents.
_KEPT = re.compile(r"vision|visual|\bgate\.weight|router|\baltup\.|\bkv_b_proj\.")


def round_weights(folder: pathlib.Path, bits: int) -> None:
    """Rounds the text model's linear layers and experts to `bits`, and the head to 8."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("lm_head.weight"):
            tensors[name] = quantized(tensor, 8).dequantized()
        elif _TEXT.search(name) and not _KEPT.search(name) and tensor.ndim == 2:
            tensors[name] = quantized(tensor, bits).dequantized()
        elif ".experts." in name and tensor.ndim == 3:
            # Aria and Llama 4 store inputs first.
            is_turned = ".fc" in name or are_transposed(tensors, name.rpartition(".experts.")[0])
            experts = [quantized(one.T if is_turned else one, bits).dequantized() for one in tensor]
            tensors[name] = torch.stack([one.T if is_turned else one for one in experts])
    save_file(tensors, file, metadata={"format": "pt"})
