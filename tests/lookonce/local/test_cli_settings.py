"""The `lookonce` command reads its settings from the environment, and shows no secrets."""

from __future__ import annotations

import os
import pathlib

import pytest

from lookonce.errors import ConfigurationError
from lookonce.local.cli_settings import CliSettings


def test_records_lie_in_the_runtime_folder_or_in_one_of_this_user(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert CliSettings().record_dir == tmp_path / "lookonce"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert CliSettings().record_dir.name == f"lookonce-{os.getuid()}"


def test_secrets_of_the_environment_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOKONCE_TOKEN", "a-secret-token")
    monkeypatch.setenv("LOOKONCE_REDIS_URL", "redis://:a-secret-password@somewhere")
    assert "a-secret" not in repr(CliSettings())


def test_empty_variables_count_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOKONCE_TARGET", "LOOKONCE_ADMIN_TARGET", "LOOKONCE_REDIS_URL", "LOOKONCE_TOKEN", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, "")
    settings = CliSettings()
    assert (settings.target, settings.admin_target, settings.redis_url, settings.token) == (None,) * 4
    assert settings.record_dir.name == f"lookonce-{os.getuid()}"


def test_the_line_end_of_a_token_from_a_file_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOKONCE_TOKEN", "abc\n")
    assert CliSettings().connection()["token"] == "abc"


def test_an_empty_name_of_a_certificate_is_refused_since_unset_would_mean_plaintext(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOOKONCE_TLS_CA", "")
    with pytest.raises(ConfigurationError, match="LOOKONCE_TLS_CA is empty"):
        CliSettings()
