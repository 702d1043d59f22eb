"""Reads the header of a safetensors file: names, element types and shapes of its tensors, without their values.

A file starts with the length of its JSON header (8 bytes, little-endian); the format limits the header to 100 MB.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lookonce.errors import ModelFolderError

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a weight file."""

    # The format's name of the element type: "BF16", "F8_E4M3", "I32" and so on.
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    # The place in the file where its values begin, bytes.
    start: int


def read_header(file: pathlib.Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a file by name.

    The file's length is compared with its header, which catches partial downloads and Git LFS pointers. Raises
    ModelFolderError.
    """
    broken = ModelFolderError(f"{file} is not a complete safetensors file; download it again")
    try:
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if header_bytes > min(_MAX_HEADER_BYTES, file.stat().st_size):
                raise broken
            content = stream.read(header_bytes)
        num_bytes = file.stat().st_size
    except OSError as error:
        raise ModelFolderError(f"{file} cannot be read: {error.strerror}; download it again") from None
    try:
        entries = {name: entry for name, entry in json.loads(content).items() if name != "__metadata__"}
        payload_bytes = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
        tensors = {name: _tensor(entry, _LENGTH_BYTES + header_bytes) for name, entry in entries.items()}
    except (ValueError, AttributeError, LookupError, TypeError, RecursionError):
        raise broken from None
    if num_bytes != _LENGTH_BYTES + header_bytes + payload_bytes:
        raise broken
    return tensors


def _tensor(entry: Mapping[str, Any], payload_start: int) -> StoredTensor:
    first, stop = map(int, entry["data_offsets"])
    return StoredTensor(str(entry["dtype"]), tuple(map(int, entry["shape"])), stop - first, payload_start + first)
