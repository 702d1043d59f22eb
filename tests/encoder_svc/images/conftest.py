"""A decoding process for the tests of formats."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from encoder_svc.images.decode_worker import DecodeWorker
from lookonce.process.process_clock import TimeLimits
from tests.encoder_svc.images.decoding import LIMITS


@pytest.fixture(scope="module")
def worker() -> Iterator[DecodeWorker]:
    """A decoding process with time for everything."""
    worker = DecodeWorker(LIMITS, TimeLimits(60.0, 120.0))
    yield worker
    worker.close()
