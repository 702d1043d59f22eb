"""The messages between a process with llguidance and its owner: MessagePack with a length before it.

The process has three sockets: for its start, to check constraints, and to follow answers. When the first one is closed,
it ends, whatever it is doing.

    Vocabulary -> Checked, with the reason if the vocabulary cannot be used
    Check -> Checked
    Follow -> one Forced per answer if forced tokens are asked for, then one Followed per answer without an error; after
        forced tokens were asked for, only answers that have some, or that want a mask in any case, have one

Many answers are in the same state of their grammars, and return to it. So the process numbers the masks that it sends,
and a mask that was sent before is its number.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import msgspec

from lookonce.process.exact_receive import receive

_LENGTH = struct.Struct("<I")
# Most bytes that one call receives.
_BUFFER_BYTES = 1 << 18
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
    """An answer with its new tokens, behind which masks are asked for."""

    answer_id: int
    # Set in the first step of an answer.
    opening: Opening | None
    # Tokens since the last step.
    token_ids: list[int]
    draft_ids: list[int]
    # The first of these that may come next is read, and no mask is wanted then. Empty: masks are wanted.
    guess_ids: list[int] = []
    # Whether a mask is wanted where no token is forced.
    wants_mask: bool = True


class Follow(msgspec.Struct, array_like=True):
    """The answers of one step of the engine, and ids of those that have ended."""

    steps: list[Step]
    ended_ids: list[int]
    # Most forced tokens of all answers together, which are their drafts; 0: the drafts are those of the steps.
    num_forced: int
    # Whether each outcome is sent as soon as it is computed, so that the other side knows what the process was doing
    # when it ended. Else they are sent together.
    is_careful: bool


class Forced(msgspec.Struct, array_like=True):
    """The forced tokens of one answer."""

    # The reason why no further token can be found, or None.
    error: str | None
    token_ids: list[int]


class Followed(msgspec.Struct, array_like=True):
    """The masks of one answer."""

    # The reason why no further token can be found, or None.
    error: str | None
    # The numbers of the masks: one behind the tokens, and one behind each draft. None of them: a guess was read.
    masks: list[int]
    # Masks that have these numbers from now on.
    new_masks: dict[int, bytes]
    # The index of the guess that was read, and whether tokens are forced behind it.
    guess: int = 0
    is_forced: bool = True
    # Processor time of the last mask, seconds.
    mask_s: float = 0.0


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


class FrameReader:
    """Receives frames, as many at once as have come."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray(_BUFFER_BYTES)
        # The part of the buffer that has been received and not read.
        self._start = self._stop = 0

    def next(self, frame_type: type[FrameT], wait_s: Callable[[], float]) -> FrameT:
        """Receives a frame. Raises what `received` raises, and msgspec.DecodeError."""
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size, wait_s))
        return msgspec.msgpack.decode(self._take(length, wait_s), type=frame_type)

    def _take(self, num_bytes: int, wait_s: Callable[[], float]) -> memoryview:
        while self._stop - self._start < num_bytes:
            self._make_room(num_bytes)
            self._connection.settimeout(wait_s())
            with suppress(TimeoutError):
                num_received = self._connection.recv_into(memoryview(self._buffer)[self._stop :])
                if not num_received:
                    raise EOFError
                self._stop += num_received
        self._start += num_bytes
        return memoryview(self._buffer)[self._start - num_bytes : self._start]

    def _make_room(self, num_bytes: int) -> None:
        """Moves what is not read to the front, of a larger buffer if `num_bytes` need one."""
        unread = bytes(memoryview(self._buffer)[self._start : self._stop])
        if len(self._buffer) < num_bytes:
            self._buffer = bytearray(num_bytes)
        self._buffer[: len(unread)] = unread
        self._start, self._stop = 0, len(unread)
