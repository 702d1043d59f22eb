"""Whether a stack of our own gives what transformers' modules give: a few tokens through both when a model is loaded.

The modules' own calls also say what each layer's attention is computed with: scale, window, soft cap.
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
    KVCacheSpec,
    LayerOptions,
    SdpaBackend,
    forward_context,
)

_NUM_TOKENS = 21
# The first step's tokens; the others follow one by one.
_NUM_PROMPT_TOKENS = 18
_SEED = 7
# Largest distance of a hidden state, relative to the largest of all. Stacks sum in another order, and round less.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 6e-2}


class RecordingBackend(SdpaBackend):
    """The reference, which notes what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.options: dict[int, LayerOptions] = {}

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, metadata: AttentionMetadata, options: LayerOptions
    ) -> Tensor:
        """See AttentionBackend."""
        self.options[layer] = options
        return super().forward(layer, query, key, value, metadata, options)


@dataclass(frozen=True, slots=True)
class Trial:
    """A prompt and some tokens behind it, the same for all who are compared."""

    # [_NUM_TOKENS, hidden_size]
    embeddings: Tensor
    num_position_axes: int
    spec: KVCacheSpec

    def run(self, model: Any, backend: AttentionBackend) -> Tensor:
        """Last hidden states `[_NUM_TOKENS, hidden_size]` as float32; the backend's pools are replaced."""
        num_blocks = -(-_NUM_TOKENS // self.spec.block_size)
        # One more, as the runner has it.
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
        # Each axis has positions of its own: whoever mixes them up is found out.
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


def trial(hidden_size: int, num_position_axes: int, spec: KVCacheSpec) -> Trial:
    """With random embeddings, always the same."""
    generator = torch.Generator().manual_seed(_SEED)
    embeddings = torch.randn(_NUM_TOKENS, hidden_size, generator=generator)
    return Trial(embeddings.to(spec.dtype), num_position_axes, spec)


def distance(outputs: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest number that was wanted; nan where anything is not a number."""
    return float((outputs - wanted).abs().max() / wanted.abs().max())


def recorded_options(backend: RecordingBackend) -> Sequence[LayerOptions]:
    """Of each layer, in order."""
    return [backend.options[layer] for layer in sorted(backend.options)]
