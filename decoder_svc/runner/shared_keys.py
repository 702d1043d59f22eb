"""Computes only some tokens in late layers that read the keys and values of earlier ones.

Such layers (Gemma 3n and 4) write nothing that a later token reads, so of a prompt they need only the tokens whose
logits are wanted: usually its last one. transformers' models have a place for this, which `generate` uses.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from decoder_svc.runner.attention import AttentionMetadata, BlockMetadata, continue_with, current_step

# The method that transformers' models call once before the first of these layers.
_METHOD = "_maybe_slice_kv_shared_inputs"


@dataclass(slots=True)
class Narrowing:
    """Says which tokens a pass has computed in its late layers."""

    # Whether it computed the wanted tokens alone, or one token if none was wanted.
    has_happened: bool = False

    def wanted(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Returns the rows of the wanted tokens from those that the pass returned."""
        return hidden[: len(tokens)] if self.has_happened else hidden[tokens]


@contextmanager
def computing_only(text_model: Any, tokens: Tensor | None) -> Iterator[Narrowing]:
    """Makes late layers compute the tokens `[num_wanted]`, ascending, for the pass in the block.

    Nothing changes if `tokens` is None, or if the model has no such layers. The step must not be recorded: how many
    tokens are wanted differs between steps.
    """
    narrowing = Narrowing()
    if tokens is None or not hasattr(text_model, _METHOD):
        yield narrowing
        return

    def narrow(
        hidden: Tensor, layer_inputs: Tensor | None, rotary: dict[str, tuple[Tensor, Tensor]], masks: Any, *_: Any,
        **__: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        metadata, num_tokens = current_step()[1], hidden.shape[1]
        if len(tokens) == num_tokens:
            return hidden, layer_inputs, rotary, masks
        # No layer can compute nothing.
        kept = tokens if len(tokens) else tokens.new_tensor([num_tokens - 1])
        continue_with(narrowed(metadata, kept.tolist()))
        narrowing.has_happened = True
        layer_inputs = None if layer_inputs is None else layer_inputs[:, kept]
        angles = {kind: (cosines[:, kept], sines[:, kept]) for kind, (cosines, sines) in rotary.items()}
        return hidden[:, kept], layer_inputs, angles, masks

    setattr(text_model, _METHOD, narrow)
    try:
        yield narrowing
    finally:
        delattr(text_model, _METHOD)


def narrowed(metadata: AttentionMetadata, tokens: Sequence[int]) -> AttentionMetadata:
    """Returns the metadata of a step with these of its tokens alone, ascending.

    Those of each sequence must be its last ones. Sequences without any are left out.
    """
    stops = [0]
    for length in metadata.query_lens:
        stops.append(stops[-1] + length)
    counts = [0] * len(metadata.query_lens)
    for token in tokens:
        counts[bisect.bisect_right(stops, token) - 1] += 1
    kept = [index for index, count in enumerate(counts) if count]

    def of_kept(group: BlockMetadata) -> BlockMetadata:
        # A backend that gathers keys has tables of blocks.
        return BlockMetadata(
            group.slot_mapping[list(tokens)],
            tuple(group.block_tables[index] for index in kept),
            tuple(group.first_keys[index] for index in kept),
        )

    return replace(
        metadata,
        full=of_kept(metadata.full),
        sliding=None if metadata.sliding is None else of_kept(metadata.sliding),
        query_lens=tuple(counts[index] for index in kept),
        kv_lens=tuple(metadata.kv_lens[index] for index in kept),
        mutual_spans=tuple(
            tuple(span for span in metadata.mutual_spans[index] if span.stop > metadata.kv_lens[index] - counts[index])
            for index in kept
        ),
    )
