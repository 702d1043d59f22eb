"""Tests that the gateway's page lists exactly the fields of the code."""

from __future__ import annotations

import pytest

from docs.generate_gateway import PAGE, page_with_fields
from gateway_svc.apis.chat import CHAT_FIELDS
from gateway_svc.apis.completions import COMPLETION_FIELDS
from gateway_svc.apis.embeddings import EMBEDDING_FIELDS
from gateway_svc.apis.messages import MESSAGE_FIELDS
from gateway_svc.apis.responses import RESPONSE_FIELDS


def test_the_committed_page_is_current() -> None:
    page = PAGE.read_text("utf-8")
    assert page == page_with_fields(page), "run `make docs`"


@pytest.mark.parametrize("fields", [CHAT_FIELDS, COMPLETION_FIELDS, EMBEDDING_FIELDS, MESSAGE_FIELDS, RESPONSE_FIELDS])
def test_every_field_is_listed(fields: dict[str, object]) -> None:
    page = PAGE.read_text("utf-8")
    assert all(f"| `{name}` |" in page for name in fields)
