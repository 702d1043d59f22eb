"""A lack of memory is one exception, whatever library notices it, and nothing else is taken for it."""

from __future__ import annotations

import errno
import mmap

import pytest
import torch

from lookonce.model.lack_of_memory import is_lack_of_memory, memory_errors


def test_torch_says_lack_of_memory_as_it_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    assert is_lack_of_memory(caught.value)
    with pytest.raises(MemoryError), memory_errors():
        torch.empty(1 << 50)


def test_a_device_without_memory_is_recognised() -> None:
    with pytest.raises(MemoryError), memory_errors():
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_an_operating_system_without_memory_is_recognised() -> None:
    with pytest.raises(OSError, match="Cannot allocate memory") as caught:
        mmap.mmap(-1, 1 << 60)
    assert is_lack_of_memory(caught.value)
    assert not is_lack_of_memory(OSError(errno.ENOENT, "no such file"))


def test_other_failures_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="sick"), memory_errors():
        raise RuntimeError("sick")
    with pytest.raises(ValueError, match="can't allocate memory"), memory_errors():
        raise ValueError("can't allocate memory")
