"""Memory that recorded graphs read: numbers of a step in one buffer, and block tables that stay from step to step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from decoder_svc.runner.host_transfer import HostTransfer

_ALIGNMENT = 16

# Element type and shape of one part of a buffer.
Spec = tuple[torch.dtype, tuple[int, ...]]
# Arrays on the host by the names of the buffer's parts.
Staged = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Limits of one group's pool that graphs are recorded with."""

    # Blocks of the longest possible sequence: the width of a block table.
    max_blocks: int
    # The block that nobody reads; padding is written there.
    unread_block: int


@dataclass(frozen=True, slots=True)
class TableChanges:
    """New entries of a group's block table; entries past the last change are written to a place that nobody reads."""

    # The whole table with that place behind it, int32 [number of rows · max_blocks + 1].
    entries: Tensor
    # Indexes into `entries`, int64, and their blocks, int32; [number of changes].
    places: Tensor
    blocks: Tensor

    def apply(self) -> None:
        """Writes the entries. A graph does this before its pass."""
        self.entries.index_copy_(0, self.places, self.blocks)


class InputBuffer:
    """Named tensors in one piece of device memory, so that a step's numbers reach them in one copy."""

    def __init__(self, specs: Mapping[str, Spec], transfer: HostTransfer) -> None:
        self._transfer = transfer
        num_bytes = sum(map(_num_bytes, specs.values()))
        self._buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=transfer.device)
        # The tensors on the device.
        self.parts: dict[str, Tensor] = dict(zip(specs, _carved(self._buffer, specs), strict=True))
        # Place in the buffer, element type and shape of each part on the host.
        self._layout = [
            (name, slice(first, first + part.nbytes), part.cpu().numpy().dtype, tuple(part.shape))
            for (name, part), first in zip(self.parts.items(), _starts(specs), strict=True)
        ]

    @contextmanager
    def staged(self) -> Iterator[Staged]:
        """Yields uninitialised arrays of the same shapes; copies them to the device at the end of the block."""
        staged = self._transfer.staging(len(self._buffer))
        host = staged.numpy()
        yield {name: host[place].view(dtype).reshape(shape) for name, place, dtype, shape in self._layout}
        self._transfer.copy(staged, self._buffer)


class BlockTable:
    """The block table of one group, on the device and, with the same contents, on the host."""

    def __init__(self, num_rows: int, pool: PoolShape, transfer: HostTransfer) -> None:
        self.unread_block = pool.unread_block
        self.width = pool.max_blocks
        self._transfer = transfer
        # The entry after the table takes the changes that a step does not have.
        self._unread_place = num_rows * pool.max_blocks
        self._entries = torch.full(
            (self._unread_place + 1,), pool.unread_block, dtype=torch.int32, device=transfer.device
        )
        self._host = np.full((num_rows, pool.max_blocks), pool.unread_block, dtype=np.int32)
        # Whether the device may lack changes that the host has: a launch failed between the two.
        self.is_behind = False

    @property
    def entries(self) -> Tensor:
        """The table on the device, `[number of rows, max_blocks]`."""
        return self._entries[:-1].view(-1, self.width)

    def recorded_changes(self, places: Tensor, blocks: Tensor) -> TableChanges:
        """Returns the changes that a graph reads from two tensors."""
        return TableChanges(self._entries, places, blocks)

    def stage(
        self,
        tables: tuple[npt.NDArray[np.int64], ...],
        size: int,
        places: npt.NDArray[np.int64],
        blocks: npt.NDArray[np.int32],
    ) -> None:
        """Fills `places` and `blocks` with the entries of the first `size` rows that differ from the last step's.

        The whole table is copied to the device if more of them changed. Entries that are never read may stay. Raises
        ValueError if a sequence has more blocks than a row.
        """
        changed, new = self._changes(tables, size)
        if self.is_behind or len(changed) > len(places):
            self._replace()
            self.is_behind = False
            changed = changed[:0]
        places[: len(changed)], places[len(changed) :] = changed, self._unread_place
        blocks[: len(changed)], blocks[len(changed) :] = new[: len(changed)], self.unread_block

    def _changes(
        self, tables: tuple[npt.NDArray[np.int64], ...], size: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        width = max(map(len, tables), default=1)
        if width > self.width:
            raise ValueError(f"a sequence has {width} blocks, the tables of graphs have room for {self.width}")
        before = self._host[:size, :width].copy()
        for row, blocks in zip(self._host, tables, strict=False):
            row[: len(blocks)] = blocks
        # Padding sees one key, in the first block.
        self._host[len(tables) : size, 0] = self.unread_block
        rows, columns = np.nonzero(self._host[:size, :width] != before)
        return rows * self.width + columns, self._host[rows, columns]

    def _replace(self) -> None:
        """Copies the whole table to the device."""
        staged = self._transfer.staging(self._host.nbytes)
        staged.numpy()[:] = self._host.view(np.uint8).reshape(-1)
        self._transfer.copy(staged, self._entries[:-1].view(torch.uint8))


def _num_bytes(spec: Spec) -> int:
    """Returns the bytes of one part, aligned."""
    dtype, shape = spec
    return -(-math.prod(shape) * int(dtype.itemsize) // _ALIGNMENT) * _ALIGNMENT


def _carved(buffer: Tensor, specs: Mapping[str, Spec]) -> Iterator[Tensor]:
    """Yields the parts of a buffer."""
    for (dtype, shape), first in zip(specs.values(), _starts(specs), strict=True):
        stop = first + math.prod(shape) * int(dtype.itemsize)
        yield buffer[first:stop].view(dtype).view(shape)


def _starts(specs: Mapping[str, Spec]) -> list[int]:
    """Returns the first byte of each part."""
    return [0, *itertools.accumulate(map(_num_bytes, specs.values()))][:-1]
