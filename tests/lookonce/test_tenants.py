"""One secret file serves all services, and another secret gives other keys and tags."""

from __future__ import annotations

import pathlib

import pytest

from lookonce.content_key import DEFAULT_TENANT
from lookonce.errors import ConfigurationError
from lookonce.tenants import Tenants, load_tenants

SECRET = bytes(range(32))


def test_without_a_file_the_default_tenant_is_the_public_one() -> None:
    tenants = load_tenants(None)
    assert tenants.default == tenants.named("") == tenants.named("default") == DEFAULT_TENANT
    assert tenants.named("acme").tag != DEFAULT_TENANT.tag


def test_a_secret_changes_every_tenant(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET.hex() + "\n")
    tenants = load_tenants(path)
    assert tenants.default == Tenants(SECRET).default
    tags = {
        source.named(name).tag
        for source in (tenants, Tenants(None), Tenants(bytes(32)))
        for name in ("", "acme", "other")
    }
    assert len(tags) == 9
    assert tenants.named("acme").secret != tenants.named("other").secret


@pytest.mark.parametrize("content", ["", "xyz", "00" * 31, "00" * 33, "0g" * 32])
def test_an_unusable_file_is_refused_without_showing_its_content(tmp_path: pathlib.Path, content: str) -> None:
    path = tmp_path / "secret"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match="tenant_secret_file") as caught:
        load_tenants(path)
    assert not content or content not in str(caught.value)
    with pytest.raises(ConfigurationError, match="tenant_secret_file"):
        load_tenants(tmp_path / "absent")
