"""CPU runners of tiny models, loaded for tests of native kernels."""

from __future__ import annotations

import pathlib

import torch

from decoder_svc.prompt.family import load_family
from decoder_svc.runner.cpu.runner import CPUModelRunner
from decoder_svc.runner.runner_config import RunnerConfig
from lookonce.model.half_model import text_child
from lookonce.model.model_folder import ModelFolder
from lookonce.model.pretrained_tokenizer import load_pretrained

BLOCK_SIZE = 8


def load(folder: pathlib.Path, dtype: torch.dtype) -> CPUModelRunner:
    """Returns a runner of the folder's model on two threads."""
    family = load_family(ModelFolder.open(folder), load_pretrained(folder))
    return CPUModelRunner(RunnerConfig(folder, dtype, BLOCK_SIZE, num_threads=2), family)


def text_model(runner: CPUModelRunner) -> object:
    """Returns the runner's language model: a native stack, or transformers' modules."""
    return getattr(runner.model.model, text_child(runner.model))
