"""The messages between the ranks of a split model: MessagePack with the type of each message.

rank 0 -> each other   Start            who it is, and what it loads; it answers Loaded when it has its part
                       Allocate         it makes its pools
                       AdapterMatrices  it keeps what an adapter adds to one linear layer
                       PlaceAdapter     it adds the matrices that it keeps to its layers, as one adapter
                       Step             it looks the tokens of a step up
                       Forward          it computes the layers for these tokens
                       Head             it computes its part of the logits of hidden states

Between Start and Loaded, the ranks meet (meeting_store.py): a rank sends Tell and Ask, which rank 0 answers by Told,
and Met at the end.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from decoder_svc.runner.adapters.adapter_table import AdaptedTokens
from decoder_svc.runner.input_batch import FlatInputs


class RankConfig(msgspec.Struct, frozen=True):
    """The settings with which all ranks load the model. Folder and number of threads are those of each machine."""

    # Name of the device's platform.
    device: str
    # Name of the element type; None: that of the folder.
    dtype: str | None
    block_size: int
    deterministic: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    use_graphs: bool
    rounds_kv_cache: bool
    # Bits to which weights are rounded while they are loaded; None: they are not.
    quantize_bits: int | None
    # Whether rank 0 will tell of adapters.
    has_adapters: bool


class Start(msgspec.Struct, tag=True):
    """The first message to a rank."""

    config: RankConfig
    rank: int
    size: int


class Tell(msgspec.Struct, tag=True):
    """The rank tells the others something."""

    key: str
    value: bytes


class Ask(msgspec.Struct, tag=True):
    """The rank asks what has been told, and waits until it has."""

    key: str


class Told(msgspec.Struct, tag=True):
    """The value that the rank asked for."""

    value: bytes


class Met(msgspec.Struct, tag=True):
    """The rank has met all others."""


class Loaded(msgspec.Struct, tag=True):
    """The rank has its part of the model."""


class Allocate(msgspec.Struct, tag=True):
    """The sizes of the pools of a KV cache."""

    num_blocks: int
    num_sliding_blocks: int
    num_snapshots: int


class Matrix(msgspec.Struct, frozen=True):
    """A matrix in row order."""

    num_rows: int
    # float32
    numbers: bytes

    @classmethod
    def of(cls, matrix: Tensor) -> Matrix:
        """Returns a float32 matrix of the CPU as part of a message."""
        return cls(len(matrix), matrix.contiguous().numpy().tobytes())

    def tensor(self) -> Tensor:
        """Returns it as float32 `[rows, columns]`."""
        return torch.frombuffer(bytearray(self.numbers), dtype=torch.float32).view(self.num_rows, -1)


class AdapterMatrices(msgspec.Struct, tag=True):
    """The matrices that an adapter adds to a linear layer (LowRank), whole."""

    # The layer's name in the text model.
    name: str
    down: Matrix
    up: Matrix


class PlaceAdapter(msgspec.Struct, tag=True):
    """An adapter has a slot from now on, or none has."""

    slot: int
    is_there: bool


class Step(msgspec.Struct, tag=True):
    """The tokens of a step. Each rank's part of their embeddings is summed."""

    flat: FlatInputs
    # The tokens that have adapters.
    adapted: tuple[AdaptedTokens, ...]


class Forward(msgspec.Struct, tag=True):
    """The layers are computed for the tokens of the step."""

    # Whether rank 0 has put rows of images in the place of embeddings, and sends the outcome.
    sends_embeddings: bool
    # Feature levels beyond the embeddings, which rank 0 sends: 0, or those of the model.
    num_levels: int
    # Number of tokens with such levels.
    num_level_rows: int


class Head(msgspec.Struct, tag=True):
    """Rank 0 sends last hidden states, `[num_rows, hidden_size]`."""

    num_rows: int


Message = Start | Tell | Ask | Told | Met | Loaded | Allocate | AdapterMatrices | PlaceAdapter | Step | Forward | Head


def encoded(message: Message) -> bytes:
    """Returns a message as bytes."""
    return _encoder.encode(message)


def received(connection: Connection) -> Message:
    """Waits for a message. Raises EOFError or OSError when the other side has ended."""
    message: Message = _decoder.decode(connection.recv_bytes())
    return message


def _from_array(array: Any) -> list[object]:
    if not isinstance(array, np.ndarray):
        raise NotImplementedError(f"{type(array).__name__} is in no message")
    return [array.shape, np.ascontiguousarray(array, dtype=np.int64).data]


def _to_array(_: type, fields: list[Any]) -> Any:
    shape, data = fields
    # The array is written to when ids become known.
    return np.frombuffer(data, dtype=np.int64).reshape(shape).copy()


_encoder = msgspec.msgpack.Encoder(enc_hook=_from_array)
_decoder = msgspec.msgpack.Decoder(Message, dec_hook=_to_array)
