"""Tells a lack of memory from other failures of torch, and makes it the one exception that it is everywhere else."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Messages of torch's allocator, oneDNN and C++, which raise a plain RuntimeError.
_NO_MEMORY = ("can't allocate memory", "could not create a primitive", "std::bad_alloc")


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether the process or its device had no memory for the operation that raised `error`."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raises MemoryError for any lack of memory in the block. The server's border asks the caller to come back then."""
    try:
        yield
    except RuntimeError as error:
        if not is_lack_of_memory(error):
            raise
        raise MemoryError from error
