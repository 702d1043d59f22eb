"""Weights in mapped files are read before anybody touches them."""

from __future__ import annotations

import ctypes
import mmap
import os
import pathlib
import time

import torch

from lookonce.model.kernels.read_ahead import read_ahead

_NUM_BYTES = 24 << 20


def resident_pages(tensor: torch.Tensor) -> int:
    """Returns how many pages of a mapped file, which starts with the tensor, are in memory. Touches none of them."""
    pages = (ctypes.c_ubyte * (tensor.nbytes // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), pages) == 0
    return sum(page & 1 for page in pages)


def test_a_mapped_file_is_read_without_being_touched(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(os.urandom(_NUM_BYTES))
    with file.open("rb") as opened:
        # Otherwise its pages would still be in memory.
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    tensor = torch.from_file(str(file), size=_NUM_BYTES, dtype=torch.uint8)
    read_ahead([tensor[:0], tensor])
    deadline_s = time.monotonic() + 60
    while resident_pages(tensor) < _NUM_BYTES // mmap.PAGESIZE:
        assert time.monotonic() < deadline_s, "the file is not read"
        time.sleep(0.01)


def test_tensors_in_memory_keep_their_values() -> None:
    tensors = [torch.arange(100_000), torch.empty(0), torch.arange(10)[3:5]]
    read_ahead(tensors)
    assert [tensor.sum().item() for tensor in tensors] == [4_999_950_000, 0, 7]
