"""A panic in Rust becomes an ordinary error; everything else passes unchanged."""

from __future__ import annotations

import asyncio

import pytest

from lookonce.model.libraries.rust_panics import RustPanicError, call_rust
from tests.rust_panic import panic


def raising(error: BaseException) -> None:
    raise error


def test_a_panic_becomes_an_error_with_the_panic_as_its_cause() -> None:
    error = panic()
    assert not isinstance(error, Exception)
    with pytest.raises(RustPanicError) as caught:
        call_rust(raising, error)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_other_exceptions_pass(kind: type[BaseException]) -> None:
    with pytest.raises(kind):
        call_rust(raising, kind())


def test_results_pass() -> None:
    assert call_rust(sorted, [2, 1], reverse=False) == [1, 2]
