"""Every exception becomes a status, and none brings the text of a library along."""

from __future__ import annotations

import re

import grpc
import pytest
from google.rpc import error_details_pb2

from lookonce import errors
from lookonce.server.error_statuses import code_of, status_of


class UnlistedError(errors.LookonceError):
    """An error of the project that the table of statuses does not have."""


@pytest.mark.parametrize("error", [ValueError("SECRET"), UnlistedError("SECRET"), KeyError("SECRET")])
def test_a_fault_has_an_opaque_id_and_no_text(error: Exception) -> None:
    status = status_of(error)
    assert code_of(status) is grpc.StatusCode.INTERNAL
    assert re.fullmatch("internal error [0-9a-f]{32}", status.message)
    assert b"SECRET" not in status.SerializeToString()


def test_two_faults_have_different_ids() -> None:
    assert status_of(ValueError()).message != status_of(ValueError()).message


def test_a_lack_of_memory_asks_the_caller_to_come_back() -> None:
    assert code_of(status_of(MemoryError("SECRET"))) is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_long_text_is_cut_and_the_reason_stays() -> None:
    status = status_of(errors.InvalidInputError("ü" * 10_000))
    assert len(status.message) == 400
    assert status.message.endswith("…")
    assert status.ByteSize() <= 3072
    assert status.details[0].Is(error_details_pb2.ErrorInfo.DESCRIPTOR)
