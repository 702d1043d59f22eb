"""Folders with LoRA adapters, made and saved by PEFT, whose random matrices change every answer."""

from __future__ import annotations

import contextlib
import pathlib
import warnings
from collections.abc import Iterator
from typing import Any

import peft
import torch
from transformers import AutoModelForImageTextToText

_ATTENTION, _MLP = "q_proj|k_proj|v_proj|o_proj", "gate_proj|up_proj|down_proj|w1|w2|w3"
_RECURRENT = r"in_proj|in_proj_\w+|out_proj"
ALL_LAYERS = rf".*(language_model|text_model).*\.({_ATTENTION}|{_MLP}|{_RECURRENT})"


def base_model(model: pathlib.Path) -> Any:
    """Returns the whole model in float32."""
    return AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()


def lora_folder(folder: pathlib.Path, model: pathlib.Path, *, seed: int = 0, **config: Any) -> pathlib.Path:
    """Saves an adapter of a model. `config` are settings of PEFT's LoraConfig."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ALL_LAYERS, **config}
    with _old_names():
        adapted = peft.get_peft_model(base_model(model), peft.LoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                gain = 0.7 / parameter.shape[1] ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * gain)
    adapted.save_pretrained(str(folder))
    return folder


def with_adapter(model: pathlib.Path, folder: pathlib.Path | None) -> Any:
    """Returns PEFT's model with an adapter; None: the base model."""
    base = base_model(model)
    if folder is None:
        return base
    with _old_names():
        return peft.PeftModel.from_pretrained(base, str(folder)).eval()


def generated(model: Any, ids: list[int], num_tokens: int) -> list[int]:
    """Returns so many tokens of the greedy answer to a prompt, even behind its end."""
    with torch.inference_mode():
        full = model.generate(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
        )
    answer: list[int] = full[0, len(ids) :].tolist()
    return answer


@contextlib.contextmanager
def _old_names() -> Iterator[None]:
    """PEFT asks transformers for an attribute by a name that will be removed there."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield
