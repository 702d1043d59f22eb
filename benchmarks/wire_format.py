"""Encoded protobuf messages that no honest client would send, made without objects for their fields."""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor

_LENGTH_DELIMITED = 2


def varint(number: int) -> bytes:
    """Returns a number as protobuf encodes it."""
    groups = []
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    return bytes([*groups, number])


def field(number: int, content: bytes) -> bytes:
    """Returns one field that holds bytes, text, packed numbers or an encoded message."""
    return varint(number << 3 | _LENGTH_DELIMITED) + varint(len(content)) + content


def nested(descriptor: Descriptor, name: str, content: bytes) -> bytes:
    """Returns a message of this type whose only field holds an encoded message."""
    return field(descriptor.fields_by_name[name].number, content)
