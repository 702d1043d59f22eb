"""Compares a native stack with transformers' modules on a few tokens when a model is loaded.

The reference run also records the attention options of each layer: scale, window, soft cap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decoder_svc.runner.attention import (
    AttentionBackend,
    AttentionMetadata,
    BlockMetadata,
    LayerOptions,
    SdpaBackend,
    forward_context,
)
from decoder_svc.runner.kv_cache_spec import KVCacheSpec

_NUM_TOKENS = 21
# Tokens of the first step; the others follow in steps of one token.
_NUM_PROMPT_TOKENS = 18
_SEED = 7
# Largest accepted difference of a hidden state, relative to the largest hidden state. A stack sums in another order and
# rounds less often.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 6e-2}


class RecordingBackend(SdpaBackend):
    """The reference backend; records the options of each layer's calls."""

    def __init__(self) -> None:
        super().__init__()
        self.options: dict[int, LayerOptions] = {}

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, metadata: AttentionMetadata, options: LayerOptions
    ) -> Tensor:
        """Implements AttentionBackend.forward, and notes the options of the call."""
        self.options[layer] = options
        return super().forward(layer, query, key, value, metadata, options)


@dataclass(frozen=True, slots=True)
class Trial:
    """A fixed prompt and a few following tokens, run through each model that is compared."""

    # [_NUM_TOKENS, hidden_size]
    embeddings: Tensor
    num_position_axes: int
    spec: KVCacheSpec

    def run(self, model: Any, backend: AttentionBackend) -> Tensor:
        """Returns the last hidden states `[_NUM_TOKENS, hidden_size]` as float32. Reallocates the backend's pools."""
        num_blocks = -(-_NUM_TOKENS // self.spec.block_size)
        # One extra block, as in the runner.
        backend.allocate(self.spec, num_blocks + 1, num_blocks + 1, torch.device("cpu"))
        stops = (_NUM_PROMPT_TOKENS, *range(_NUM_PROMPT_TOKENS + 1, _NUM_TOKENS + 1))
        starts = (0, *stops[:-1])
        return torch.cat([self._step(model, backend, *part) for part in zip(starts, stops, strict=True)])

    def _step(self, model: Any, backend: AttentionBackend, start: int, stop: int) -> Tensor:
        tokens = torch.arange(start, stop)
        blocks = BlockMetadata(tokens, (torch.arange(-(-stop // self.spec.block_size)),), (0,))
        has_sliding_group = self.spec.window is not None
        metadata = AttentionMetadata(
            blocks, blocks if has_sliding_group else None, (stop - start,), (stop,), ((),), False
        )
        # Different positions on each axis, so that mixed-up axes show.
        positions = tokens * torch.arange(1, self.num_position_axes + 1)[:, None]
        with torch.inference_mode(), forward_context(backend, metadata):
            output = model(
                inputs_embeds=self.embeddings[None, start:stop],
                position_ids=positions if self.num_position_axes == 1 else positions[:, None],
                attention_mask=None,
                use_cache=False,
            )
        states: Tensor = output.last_hidden_state[0].float()
        return states


def random_trial(hidden_size: int, num_position_axes: int, spec: KVCacheSpec) -> Trial:
    """Returns a trial with random embeddings from a fixed seed."""
    generator = torch.Generator().manual_seed(_SEED)
    embeddings = torch.randn(_NUM_TOKENS, hidden_size, generator=generator)
    return Trial(embeddings.to(spec.dtype), num_position_axes, spec)


def relative_difference(outputs: Tensor, wanted: Tensor) -> float:
    """Returns the largest difference divided by the largest wanted value; NaN if any number is NaN."""
    return float((outputs - wanted).abs().max() / wanted.abs().max())


def recorded_options(backend: RecordingBackend) -> Sequence[LayerOptions]:
    """Returns the recorded options of each layer, in order."""
    return [backend.options[layer] for layer in sorted(backend.options)]
