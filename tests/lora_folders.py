"""Folders with LoRA adapters, made and saved by PEFT, whose random matrices change every answer."""

from __future__ import annotations

import pathlib
from typing import Any

import peft
import torch
from transformers import AutoModelForImageTextToText

ALL_LAYERS = r".*(language_model|text_model).*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


def base_model(model: pathlib.Path) -> Any:
    """Returns the whole model in float32."""
    return AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()


def lora_folder(folder: pathlib.Path, model: pathlib.Path, *, seed: int = 0, **config: Any) -> pathlib.Path:
    """Saves an adapter of a model. `config` are settings of PEFT's LoraConfig."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ALL_LAYERS, **config}
    adapted = peft.get_peft_model(base_model(model), peft.LoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                gain = 0.7 / parameter.shape[1] ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * gain)
    adapted.save_pretrained(folder)
    return folder


def with_adapter(model: pathlib.Path, folder: pathlib.Path | None) -> Any:
    """Returns PEFT's model with an adapter; None: the base model."""
    base = base_model(model)
    return base if folder is None else peft.PeftModel.from_pretrained(base, folder).eval()
