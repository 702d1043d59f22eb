"""Settings come from flags, environment and file in this order, and wrong ones are refused by name."""

from __future__ import annotations

import pathlib

import pytest

from lookonce import errors
from lookonce.server.settings import ServiceSettings
from lookonce.server.settings_parser import parse_settings, settings_with_origins


def parsed(*arguments: str) -> ServiceSettings:
    return parse_settings(ServiceSettings, ["--model", ".", *arguments], "test")


def test_a_flag_goes_before_the_environment_and_that_before_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    config = tmp_path / "settings.toml"
    config.write_text("ttl_s = 1\nkeepalive_time_s = 1.0\nlog_level = 'debug'\n")
    monkeypatch.setenv("LOOKONCE_TTL_S", "2")
    monkeypatch.setenv("LOOKONCE_KEEPALIVE_TIME_S", "2")
    for flag in (["--config", str(config)], [f"--config={config}"]):
        settings = parsed("--ttl-s", "3", *flag)
        assert (settings.ttl_s, settings.keepalive_time_s, settings.log_level) == (3, 2.0, "debug")
        same, origins = settings_with_origins(ServiceSettings, ["--model", ".", "--ttl-s", "3", *flag], "test")
        assert same.model_dump() == settings.model_dump()
        shown = {name: origins[name] for name in ("ttl_s", "keepalive_time_s", "log_level", "dtype")}
        assert list(shown.values()) == ["flag", "environment", "file", "default"]
        assert origins.keys() == ServiceSettings.model_fields.keys()
    assert parsed().log_level == "info", "the file is read where it is named only"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'redis_url = "redis://u:SECRET@h"\n= =\n', "is not TOML, line 2, column 1"),
        (b'redis_url = "redis://u:SECRET@h"\nttl_s = 5\nttl_s = 6\n', "is not TOML, line 3"),
        (b'redis_url = "redis://u:SECRET@h', "is not TOML, end of document"),
        (b'redis_url = "redis://u:SECRET@h"\n# \xff\n', "is not UTF-8 text"),
        (
            b'redis_url = "redis://u:SECRET@h"\nmax_batch_delay_s = 0.1\n',
            "--max-batch-delay-s: there is no such setting",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_without_its_text(
    tmp_path: pathlib.Path, content: bytes, reason: str
) -> None:
    path = tmp_path / "settings.toml"
    path.write_bytes(content)
    with pytest.raises(errors.ConfigurationError) as caught:
        parse_settings(ServiceSettings, ["--model", "somewhere", "--config", str(path)], "service")
    assert reason in caught.value.message
    assert "SECRET" not in caught.value.message
    # A traceback shows the cause beside the message.
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_a_file_that_does_not_exist_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(errors.ConfigurationError, match=r"--config: .* is not a file"):
        parsed("--config", str(tmp_path / "missing.toml"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-image-byte", "5"], "there is no flag --max-image-byte; did you mean --max-image-bytes?; see --help"),
        (["--insecure", "SECRET"], "the command line has a value without a flag; see --help"),
        (["--redis-url"], "--redis-url: needs a value; see --help"),
        (["--insecure=SECRET"], "--insecure: takes no such value; see --help"),
    ],
)
def test_a_wrong_command_line_gets_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(errors.ConfigurationError) as caught:
        parsed(*arguments)
    assert caught.value.message == message
    assert capsys.readouterr() == ("", "")


def test_a_missing_model_names_the_flag_and_the_variable() -> None:
    with pytest.raises(errors.ConfigurationError) as caught:
        parse_settings(ServiceSettings, [], "test")
    assert caught.value.message == "--model: is not set; give --model, or set LOOKONCE_MODEL"


def test_help_is_still_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parsed("--help")
    assert caught.value.code == 0
    assert "--max-image-bytes" in capsys.readouterr().out


def test_all_wrong_settings_are_named_at_once() -> None:
    with pytest.raises(errors.ConfigurationError) as caught:
        parsed("--ttl-s", "0", "--drain-timeout-s", "-1")
    assert "--ttl-s" in caught.value.message
    assert "--drain-timeout-s" in caught.value.message
