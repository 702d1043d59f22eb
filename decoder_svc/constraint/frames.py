"""The messages between a process with llguidance and its owner: MessagePack with a length before it.

The process has three sockets: for its start, to check constraints, and to follow answers. When the first one is closed,
it ends, whatever it is doing.

    Vocabulary -> Checked, with the reason if the vocabulary cannot be used
    Check -> Checked
    Follow -> one Followed per answer, in order, each as soon as it is computed
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import TypeVar

import msgspec

from lookonce.process.exact_receive import receive

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()

FrameT = TypeVar("FrameT")


class Vocabulary(msgspec.Struct, array_like=True):
    """A model's tokenizer, for llguidance."""

    # The JSON of the library `tokenizers`.
    tokenizer_json: str
    # The tokenizer's end of a sequence; None: it has none.
    end_token_id: int | None


class Check(msgspec.Struct, array_like=True):
    """Asks whether a constraint can be compiled, and keeps it for the answers to come."""

    # Name of the constraint's kind.
    kind: str
    text: str


class Checked(msgspec.Struct, array_like=True):
    """The reason why a constraint is refused; None: it can be followed."""

    refusal: str | None


class Opening(msgspec.Struct, array_like=True):
    """An answer that the process does not know yet."""

    kind: str
    text: str
    stop_token_ids: list[int]
    # Bits of a mask.
    num_logits: int


class Step(msgspec.Struct, array_like=True):
    """An answer with its new tokens, behind which masks or forced tokens are asked for."""

    answer_id: int
    # Set in the first step of an answer.
    opening: Opening | None
    # Tokens since the last step.
    token_ids: list[int]
    draft_ids: list[int]
    # Most forced tokens to return; 0: return masks.
    num_forced: int


class Follow(msgspec.Struct, array_like=True):
    """The answers of one step of the engine, and ids of those that have ended."""

    steps: list[Step]
    ended_ids: list[int]


class Followed(msgspec.Struct, array_like=True):
    """The masks or forced tokens of one answer."""

    # The reason why no further token can be found, or None.
    error: str | None
    forced_ids: list[int]
    # One behind the tokens, and one behind each draft.
    masks: list[bytes]


def encoded(frame: msgspec.Struct) -> bytes:
    """Returns a frame with its length."""
    data = _encoder.encode(frame)
    return _LENGTH.pack(len(data)) + data


def received(
    connection: socket.socket, frame_type: type[FrameT], wait_s: Callable[[], float | None] = lambda: None
) -> FrameT:
    """Receives a frame. Raises EOFError when the other side has ended, OSError, and the TimeoutError of `wait_s`."""
    (length,) = _LENGTH.unpack(receive(connection, _LENGTH.size, wait_s))
    return msgspec.msgpack.decode(receive(connection, length, wait_s), type=frame_type)
