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

import structlog

from lookonce.content_key import EncoderFingerprint
from lookonce.embedding_meta import RowDtype
from lookonce.errors import UnavailableError

# Importing the libraries takes seconds, and hashing one second per gigabyte on most processors.
_PROCESS_TIMEOUT_S = 300.0
# The types of a forward pass whose rows are rounded to int8: an encoder reports only the rows' type.
_FORWARD_DTYPES = (RowDtype.BFLOAT16, RowDtype.FLOAT32, RowDtype.FLOAT16)

_log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class OwnFingerprints:
    """Tells whether an encoder belongs to a model folder. Use it on one event loop."""

    def __init__(self, folder: pathlib.Path, fingerprint: EncoderFingerprint, dtype: RowDtype) -> None:
        """`fingerprint` is the one of an encoder that computes and stores rows of `folder` in `dtype`."""
        self._folder = folder
        # By the element types of the forward pass and of rows; each is computed once.
        self._found: dict[tuple[RowDtype, RowDtype], asyncio.Task[EncoderFingerprint]] = {}
        # The fingerprint of an encoder with this decoder's own element type.
        self.fingerprint = fingerprint
        self._dtype = dtype

    async def include(self, fingerprint: EncoderFingerprint, row_dtype: RowDtype) -> bool:
        """Returns whether an encoder with this fingerprint, which stores rows as `row_dtype`, has the same vision half.

        Takes seconds the first time that an encoder stores rows in a type other than the decoder's own. Raises
        UnavailableError if the fingerprint cannot be computed.
        """
        if fingerprint == self.fingerprint:
            return True
        forward_dtypes = _FORWARD_DTYPES if row_dtype is RowDtype.INT8_SCALED else (row_dtype,)
        for dtype in forward_dtypes:
            if dtype is row_dtype is self._dtype:
                continue
            if await self._computed(dtype, row_dtype) == fingerprint:
                return True
        return False

    async def _computed(self, dtype: RowDtype, row_dtype: RowDtype) -> EncoderFingerprint:
        task = self._found.get((dtype, row_dtype))
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._found[dtype, row_dtype] = asyncio.create_task(self._compute(dtype, row_dtype))
        # Shielded: the result serves later callers, too.
        return await asyncio.shield(task)

    async def _compute(self, dtype: RowDtype, row_dtype: RowDtype) -> EncoderFingerprint:
        command = ["-P", "-m", "lookonce.model.folder_fingerprint", str(self._folder), dtype.value, row_dtype.value]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=pipe, stderr=pipe)
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
            _log.error("the vision half cannot be hashed", dtype=dtype.value, detail=errors.decode()[-500:])
            raise UnavailableError("the decoder cannot compare its model with the encoder's; retry")
        _log.info("vision half hashed", dtype=dtype.value, row_dtype=row_dtype.value)
        return EncoderFingerprint(output.decode().split()[-1])
