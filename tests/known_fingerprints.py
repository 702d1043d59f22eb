"""Decoders that know beforehand which encoders with int8 rows belong to their folder.

A decoder computes this in a process of its own, which takes 2.7 s of processor time, see
`decoder_svc/rows/own_fingerprints.py`. `tests/decoder_svc/test_model_revisions.py` and a test in
`tests/e2e/test_int8_rows.py` run that process; tests about something else can do without it.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from decoder_svc.rows.own_fingerprints import OwnFingerprints
from lookonce.content_key import EncoderFingerprint
from lookonce.embedding_meta import RowDtype
from lookonce.model.family_model import FamilyModel
from lookonce.model.folder_fingerprint import folder_fingerprint
from lookonce.model.model_folder import ModelFolder


@contextmanager
def known_fingerprints(path: pathlib.Path, dtype: RowDtype) -> Iterator[None]:
    """In the block, decoders of the folder know the fingerprint of encoders that compute in `dtype` and store int8."""
    folder = ModelFolder.open(path)
    fingerprint, _ = folder_fingerprint(folder, FamilyModel.load(folder), dtype, RowDtype.INT8_SCALED)

    async def computed(self: OwnFingerprints, row_dtype: RowDtype) -> frozenset[EncoderFingerprint]:
        assert (self._folder, row_dtype) == (path, RowDtype.INT8_SCALED)
        return frozenset({fingerprint})

    with mock.patch.object(OwnFingerprints, OwnFingerprints._compute.__name__, computed):
        yield
