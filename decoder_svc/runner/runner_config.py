"""The settings with which a service or a test makes a model runner."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass

import torch

from decoder_svc.runner.parallel.rank_group import RankGroup
from lookonce.model.adapter_folder import AdapterFolder


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Settings of a runner, fixed at start-up."""

    # Folder of the Hugging Face model.
    folder: pathlib.Path
    # None: the checkpoint's element type.
    dtype: torch.dtype | None
    # Tokens per KV block.
    block_size: int
    # Threads for tensor work; None: one per CPU that this process may use.
    num_threads: int | None
    # True: a token's numbers never depend on the rest of the batch. A model whose numbers would depend on it gets one
    # chunk per forward pass.
    deterministic: bool = False
    # Largest number of running requests. Devices with graphs record them up to this batch size.
    max_num_seqs: int = 64
    # Largest number of tokens in a step.
    max_num_batched_tokens: int = 2048
    # False: no graphs are recorded.
    use_graphs: bool = True
    # Bits, 4 or 8, to which weights of linear layers are rounded while loading. None: they stay as they are.
    quantize_bits: int | None = None
    # Whether keys and values are rounded to 8 bits in the KV cache.
    rounds_kv_cache: bool = False
    # LoRA adapters of the language model, which requests choose from. None: none, and none will be loaded.
    adapters: tuple[AdapterFolder, ...] | None = None
    # The processes over which the model is split. None: this one has all of it.
    ranks: RankGroup | None = None
