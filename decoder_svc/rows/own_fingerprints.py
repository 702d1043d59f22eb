"""The fingerprints of the encoders that belong to this decoder's model folder: those with the same vision half.

An encoder's word is not enough: another revision of the model has the same shapes and other weights, and its rows would
lead to confident, wrong answers. The decoder therefore computes the fingerprint itself, from the weights in its folder.
A fingerprint also depends on the element types with which the encoder was started. That of this decoder's own type is
computed before it serves; others are computed in another process when an encoder reports its types.
"""

from __future__ import annotations

import asyncio
import pathlib
import sys

from lookonce.content_key import EncoderFingerprint
from lookonce.embedding_meta import RowDtype
from lookonce.errors import UnavailableError
from lookonce.logs import get_logger

# Importing the libraries takes seconds, and hashing at most some seconds per gigabyte.
_PROCESS_TIMEOUT_S = 300.0
# The types of a forward pass whose rows are rounded to int8: an encoder reports only the rows' type.
_FORWARD_DTYPES = (RowDtype.BFLOAT16, RowDtype.FLOAT32, RowDtype.FLOAT16)

_log = get_logger(__name__)


class OwnFingerprints:
    """Tells whether an encoder belongs to a model folder. Use it on one event loop."""

    def __init__(self, folder: pathlib.Path, fingerprint: EncoderFingerprint, dtype: RowDtype) -> None:
        """`fingerprint` is the one of an encoder that computes and stores rows of `folder` in `dtype`."""
        self._folder = folder
        # The fingerprint of an encoder with this decoder's own element type.
        self.fingerprint = fingerprint
        self._dtype = dtype
        # The fingerprints of encoders that store rows in another type, computed once per type.
        self._others: dict[RowDtype, asyncio.Task[frozenset[EncoderFingerprint]]] = {}

    async def include(self, fingerprint: EncoderFingerprint, row_dtype: RowDtype) -> bool:
        """Returns whether an encoder with this fingerprint, which stores rows as `row_dtype`, has the same vision half.

        Takes seconds the first time that an encoder stores rows in a type other than the decoder's own. Raises
        UnavailableError if the fingerprint cannot be computed.
        """
        if fingerprint == self.fingerprint:
            return True
        if row_dtype is self._dtype:
            return False
        computing = self._others.get(row_dtype)
        if computing is None or (computing.done() and computing.exception() is not None):
            computing = self._others[row_dtype] = asyncio.create_task(self._compute(row_dtype))
        # Shielded: the result serves later callers, too.
        return fingerprint in await asyncio.shield(computing)

    async def _compute(self, row_dtype: RowDtype) -> frozenset[EncoderFingerprint]:
        """Runs a process, since loading weights beside a working engine would change torch's default type under it."""
        dtypes = _FORWARD_DTYPES if row_dtype is RowDtype.INT8_SCALED else (row_dtype,)
        command = ["-P", "-m", "lookonce.model.fingerprint_process", str(self._folder), row_dtype.value]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, *(dtype.value for dtype in dtypes), stdout=pipe, stderr=pipe
        )
        try:
            async with asyncio.timeout(_PROCESS_TIMEOUT_S):
                output, errors = await process.communicate()
        except TimeoutError:
            output, errors = b"", b"it took too long"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            _log.error("the vision half cannot be hashed", row_dtype=row_dtype.value, detail=errors.decode()[-500:])
            raise UnavailableError("the decoder cannot compare its model with the encoder's; retry")
        _log.info("vision half hashed", row_dtype=row_dtype.value)
        return frozenset(map(EncoderFingerprint, output.decode().split()))
