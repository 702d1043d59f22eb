"""New bearer tokens and the entries by which services accept them."""

from __future__ import annotations

import hashlib

import pytest

from lookonce.errors import ConfigurationError
from lookonce.identity import CallerRole, Identity
from lookonce.local.token_entry import new_token
from lookonce.server.admission.authentication import parse_tokens


@pytest.mark.parametrize(("tenant", "role"), [("acme", CallerRole.CLIENT), ("", CallerRole.OPERATOR)])
def test_a_service_that_reads_the_entry_accepts_the_token(tenant: str, role: CallerRole) -> None:
    token, entry = new_token("shop", tenant, role.value)
    (known,) = parse_tokens(entry.encode())
    assert known.identity == Identity("shop", tenant, role)
    assert known.digest == hashlib.sha256(token.encode()).digest()


def test_the_entry_does_not_contain_the_token() -> None:
    token, entry = new_token("shop", "acme", "client")
    assert token not in entry
    assert token.removeprefix("lookonce-") not in entry


def test_every_token_is_another_one() -> None:
    assert len({new_token("shop", "acme", "client")[0] for _ in range(100)}) == 100


@pytest.mark.parametrize(
    ("name", "tenant", "role"), [("a b", "", "client"), ("a", "../x", "client"), ("a", "", "king"), ("", "", "client")]
)
def test_a_name_tenant_or_role_that_services_refuse_is_refused(name: str, tenant: str, role: str) -> None:
    with pytest.raises(ConfigurationError):
        new_token(name, tenant, role)
