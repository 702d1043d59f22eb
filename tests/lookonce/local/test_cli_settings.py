"""The record of a running stack: who finds it, who may write it, and where it lies."""

from __future__ import annotations

import os
import pathlib
import stat
import subprocess
import sys

import pytest

from lookonce.errors import ConfigurationError
from lookonce.local.cli_settings import CliSettings, StackRecord, find_stack, only_stack


def test_the_record_of_a_running_stack_is_found_and_removed_by_its_owner(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "lookonce"
    first = StackRecord("127.0.0.1:1", "127.0.0.1:2", os.getpid())
    second = StackRecord("127.0.0.1:3", "127.0.0.1:4", os.getpid())
    assert find_stack(directory) is None
    first.write(directory)
    assert find_stack(directory) == first
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    second.write(directory)
    first.remove(directory)
    assert find_stack(directory) == second
    second.remove(directory)
    assert list(directory.iterdir()) == []


def test_a_second_stack_is_refused_with_the_place_of_the_first(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "lookonce"
    record = StackRecord("127.0.0.1:1", "127.0.0.1:2", os.getpid())
    with only_stack(directory):
        with pytest.raises(ConfigurationError, match="another `lookonce up` is starting"), only_stack(directory):
            pass
        record.write(directory)
        with pytest.raises(ConfigurationError) as caught, only_stack(directory):
            pass
        assert "decoder at 127.0.0.1:1" in caught.value.message
        assert f"kill {os.getpid()}" in caught.value.message
        assert find_stack(directory) == record
    # The record of a stack that was killed, whose process id another process has now.
    with only_stack(directory):
        pass


def test_the_record_of_a_stack_that_died_is_not_used(tmp_path: pathlib.Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    StackRecord("127.0.0.1:1", "127.0.0.1:2", process.pid).write(tmp_path / "lookonce")
    assert find_stack(tmp_path / "lookonce") is None


def test_a_record_that_others_could_have_written_is_refused(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "lookonce"
    StackRecord("127.0.0.1:1", "127.0.0.1:2", os.getpid()).write(directory)
    directory.chmod(0o777)
    with pytest.raises(ConfigurationError, match="only this user"):
        find_stack(directory)


def test_the_record_lies_in_the_runtime_folder_or_in_one_of_this_user(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert CliSettings().record_dir == tmp_path / "lookonce"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert CliSettings().record_dir.name == f"lookonce-{os.getuid()}"


def test_a_record_behind_a_link_of_another_folder_is_refused(tmp_path: pathlib.Path) -> None:
    StackRecord("127.0.0.1:1", "127.0.0.1:2", os.getpid()).write(tmp_path / "elsewhere")
    (tmp_path / "lookonce").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match="only this user"):
        find_stack(tmp_path / "lookonce")


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


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"decoder_target": "a:1", "encoder_target": "b:2", "pid": null}']
)
def test_a_damaged_record_is_refused(tmp_path: pathlib.Path, content: str) -> None:
    StackRecord("127.0.0.1:1", "127.0.0.1:2", os.getpid()).write(tmp_path / "lookonce")
    (tmp_path / "lookonce" / "up.json").write_text(content)
    with pytest.raises(ConfigurationError, match="is damaged; remove it"):
        find_stack(tmp_path / "lookonce")
