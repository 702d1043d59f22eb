"""Bounds on a request's message that are checked before protobuf parses it.

protobuf holds Python's lock while it parses, so a hostile message stops every call of the process: 60 MiB of empty
sub-messages took 2 s and 1.5 GB. Walking over the encoded fields, without making objects, is cheap for honest messages,
which consist of few fields and of image bytes that are skipped. In a hostile message the walk takes up to 10 ms, in
which other calls get their turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from lookonce.errors import MessageTooLargeError

# Largest message of a method whose request holds no images; the ids of a long answer to detokenize take some 400 KB.
MAX_IMAGELESS_BYTES = 1 << 20
# Messages up to this size are parsed unseen.
SMALL_BYTES = 64 << 10
# Fields and sub-messages of one message. A conversation of a thousand messages has some six thousand.
MAX_FIELDS = 20_000
# Bytes of text in one message, and of packed numbers, which take longer to parse.
MAX_TEXT_BYTES = 4 << 20
MAX_NUMBER_BYTES = 1 << 20
# The message that carries an image.
_IMAGE_SOURCE = "lookonce.common.v1.ImageSource"
# Fields between two turns of other calls, half a millisecond (2 x AMD EPYC, 2026-11-25).
_FIELDS_OF_A_TURN = 1000
_VARINT, _FIXED64, _LENGTH, _START_GROUP, _END_GROUP, _FIXED32 = range(6)


@dataclass(frozen=True, slots=True)
class MessageBounds:
    """The bounds of one method's request."""

    # None: the request is no protobuf message, or not known to be one.
    descriptor: Descriptor | None
    has_images: bool

    @classmethod
    def of(cls, deserialize: Callable[[bytes], Any] | None) -> MessageBounds:
        """Returns the bounds for the messages that `deserialize`, a message class's `FromString`, parses."""
        descriptor = getattr(getattr(deserialize, "__self__", None), "DESCRIPTOR", None)
        return cls(descriptor, descriptor is not None and _reaches_image(descriptor))

    async def check(self, message: bytes) -> None:
        """Raises MessageTooLargeError for a message that would take long to parse. A malformed message passes."""
        if self.descriptor is None or len(message) <= SMALL_BYTES:
            return
        if not self.has_images and len(message) > MAX_IMAGELESS_BYTES:
            raise MessageTooLargeError(
                f"the request has {len(message)} bytes; a request of this method may have {MAX_IMAGELESS_BYTES}"
            )
        for _ in _Walk(message).over(self.descriptor):
            await asyncio.sleep(0)


class _Walk:
    """One pass over an encoded message (https://protobuf.dev/programming-guides/encoding)."""

    def __init__(self, message: bytes) -> None:
        self._message = message
        self._num_fields = 0
        self._num_text_bytes = 0
        # Bytes of packed numbers and of unknown fields.
        self._num_other_bytes = 0

    def over(self, descriptor: Descriptor) -> Iterator[None]:
        """Walks on at each iteration. Ends at the first malformed field.

        Raises MessageTooLargeError for too many fields or too much text.
        """
        waiting = [(0, len(self._message), descriptor)]
        try:
            while waiting:
                start, stop, nested = waiting.pop()
                waiting += yield from self._fields(start, stop, nested)
        except (IndexError, ValueError):
            # The parser refuses it.
            return

    def _fields(
        self, at: int, stop: int, descriptor: Descriptor
    ) -> Generator[None, None, list[tuple[int, int, Descriptor]]]:
        """Counts the fields in [at, stop) and returns the places and types of the sub-messages."""
        message, kinds = self._message, _kinds(descriptor)
        found: list[tuple[int, int, Descriptor]] = []
        while at < stop:
            self._num_fields += 1
            if self._num_fields > MAX_FIELDS:
                raise MessageTooLargeError(f"the request has more than {MAX_FIELDS} fields and parts")
            if self._num_fields % _FIELDS_OF_A_TURN == 0:
                yield
            tag, at = _varint(message, at)
            wire_type = tag & 7
            if wire_type == _VARINT:
                _, at = _varint(message, at)
            elif wire_type == _LENGTH:
                length, at = _varint(message, at)
                if at + length > stop:
                    raise ValueError("a field is longer than its message")
                kind = kinds.get(tag >> 3)
                if isinstance(kind, Descriptor):
                    found.append((at, at + length, kind))
                elif kind != FieldDescriptor.TYPE_BYTES:
                    self._count_bytes(length, is_text=kind == FieldDescriptor.TYPE_STRING)
                at += length
            elif wire_type in (_FIXED64, _FIXED32):
                at += 8 if wire_type == _FIXED64 else 4
            elif wire_type not in (_START_GROUP, _END_GROUP):
                raise ValueError("no wire type")
        return found

    def _count_bytes(self, num_bytes: int, *, is_text: bool) -> None:
        if is_text:
            self._num_text_bytes += num_bytes
        else:
            self._num_other_bytes += num_bytes
        if self._num_text_bytes > MAX_TEXT_BYTES:
            raise MessageTooLargeError(f"the request has more than {MAX_TEXT_BYTES} bytes of text")
        if self._num_other_bytes > MAX_NUMBER_BYTES:
            raise MessageTooLargeError(f"the request has more than {MAX_NUMBER_BYTES} bytes of numbers")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Returns the number at this place and the place behind it. Raises IndexError or ValueError if there is none."""
    byte = message[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while True:
        at += 1
        byte = message[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than ten bytes")


@cache
def _kinds(descriptor: Descriptor) -> dict[int, Descriptor | int]:
    """Returns the message type, or else the type, of each field by its number."""
    return {field.number: field.message_type or field.type for field in descriptor.fields}


@cache
def _reaches_image(descriptor: Descriptor) -> bool:
    """Whether a message of this type can hold an image."""
    seen: set[str] = set()
    waiting = [descriptor]
    while waiting:
        one = waiting.pop()
        if one.full_name == _IMAGE_SOURCE:
            return True
        if one.full_name not in seen:
            seen.add(one.full_name)
            waiting += [field.message_type for field in one.fields if field.message_type is not None]
    return False
