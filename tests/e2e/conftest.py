"""Stacks of these tests are started quickly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.warm_processes import WarmProcesses


@pytest.fixture(scope="module", autouse=True)
def _warm_stacks(warm_processes: WarmProcesses) -> Iterator[None]:
    with warm_processes.for_stacks():
        yield
