"""The messages from rank 0 to the other ranks. All are processes of one decoder, so a message is a Python object.

Allocate        -> each rank makes its pools
Step, Forward   -> each rank looks the step's tokens up, and computes its layers
Head            -> each rank computes its part of the logits of hidden states
"""

from __future__ import annotations

from dataclasses import dataclass

from decoder_svc.runner.input_batch import FlatInputs


@dataclass(frozen=True, slots=True)
class Allocate:
    """The sizes of the pools of a KV cache."""

    num_blocks: int
    num_sliding_blocks: int
    num_snapshots: int


@dataclass(frozen=True, slots=True)
class Step:
    """The tokens of a step. Each rank's part of their embeddings is summed."""

    flat: FlatInputs


@dataclass(frozen=True, slots=True)
class Forward:
    """The layers are computed for the tokens of the step."""

    # Whether rank 0 has put rows of images in the place of embeddings, and sends the outcome.
    sends_embeddings: bool
    # Feature levels beyond the embeddings, which rank 0 sends: 0, or those of the model.
    num_levels: int
    # Number of tokens with such levels.
    num_level_rows: int


@dataclass(frozen=True, slots=True)
class Head:
    """Rank 0 sends last hidden states, `[num_rows, hidden_size]`."""

    num_rows: int


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: who the rank is."""

    # The settings that the decoder was given, by their names.
    settings: dict[str, object]
    rank: int
    size: int
    meeting_file: str
