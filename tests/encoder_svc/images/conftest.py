"""A decoding process for the tests of formats."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from encoder_svc.images.decode_clock import DecodeTimeLimits
from encoder_svc.images.decode_worker import DecodeWorker
from tests.encoder_svc.images.decoding import LIMITS


@pytest.fixture(scope="module")
def worker() -> Iterator[DecodeWorker]:
    """A decoding process with time for everything."""
    worker = DecodeWorker(LIMITS, DecodeTimeLimits(60.0, 120.0))
    yield worker
    worker.close()
