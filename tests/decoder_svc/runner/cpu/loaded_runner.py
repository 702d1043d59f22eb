"""CPU runners of tiny models, loaded for tests of native kernels."""

from __future__ import annotations

import json
import pathlib

import torch
from safetensors.torch import load_file, save_file

from decoder_svc.prompt.family import load_family
from decoder_svc.runner.cpu.runner import CPUModelRunner
from decoder_svc.runner.runner_config import RunnerConfig
from lookonce.model.half_model import text_child
from lookonce.model.model_folder import ModelFolder
from lookonce.model.pretrained_tokenizer import load_pretrained

BLOCK_SIZE = 8


def load(folder: pathlib.Path, dtype: torch.dtype, quantize_bits: int | None = None) -> CPUModelRunner:
    """Returns a runner of the folder's model on two threads."""
    family = load_family(ModelFolder.open(folder), load_pretrained(folder))
    config = RunnerConfig(folder, dtype, BLOCK_SIZE, num_threads=2, quantize_bits=quantize_bits)
    return CPUModelRunner(config, family)


def tie_head(folder: pathlib.Path) -> None:
    """Makes the table of embeddings the head of a folder's model, which has a text half of its own."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for part in (config, config["text_config"]):
        part["tie_word_embeddings"] = True
    path.write_text(json.dumps(config))
    (weights,) = folder.glob("*.safetensors")
    tensors = {key: tensor for key, tensor in load_file(weights).items() if "lm_head" not in key}
    save_file(tensors, weights, metadata={"format": "pt"})


def text_model(runner: CPUModelRunner) -> object:
    """Returns the runner's language model: a native stack, or transformers' modules."""
    return getattr(runner.model.model, text_child(runner.model))
