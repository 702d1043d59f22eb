"""Settings that contradict each other are refused, and the error names them."""

from __future__ import annotations

import json
import pathlib

import pytest

from decoder_svc.settings import DecoderSettings
from lookonce.errors import ConfigurationError
from lookonce.server.settings_parser import parse_settings

TARGET = ("--encoder-target", "dns:///encoder:50051")


def parsed(*arguments: str) -> DecoderSettings:
    """Settings parsed from command-line flags."""
    return parse_settings(DecoderSettings, ["--model", "somewhere", *arguments], "decoder_svc")


def test_the_defaults_fit_together() -> None:
    assert parsed().speculative_ngram_min <= parsed().speculative_ngram_max
    assert parsed("--speculative-ngram-min", "4").speculative_ngram_min == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--speculative-ngram-min", "5"], "speculative_ngram_min=5 is more than speculative_ngram_max=4"),
        (["--speculative-ngram-max", "1"], "speculative_ngram_min=2 is more than speculative_ngram_max=1"),
        (["--deterministic", "--speculative-tokens", "2"], "deterministic and speculative_tokens exclude each other"),
        (["--max-video-frames-per-prompt", "1"], "max_video_frames_per_prompt=1 admits no video"),
        (
            ["--default-timeout-s", "31", "--max-connection-age-grace-s", "30"],
            "default_timeout_s=31 is longer than max_connection_age_grace_s=30",
        ),
        (["--adapters", "a"], "adapters: 'a' must be NAME=FOLDER"),
        (["--adapters", "a=/b,a=/c"], "adapters: a is there twice"),
        (["--adapters", "../a=/b"], "adapters: the adapter name '../a' must be 1 to 64 characters"),
        (["--served-model-name", "m", "--adapters", "m=/b"], "adapters: m is the name of the base model"),
        (["--adapters-folder", "/"], "adapters_folder is for the calls on admin_listen"),
        (["--adapters-folder", "/nowhere"], "/nowhere is no folder"),
        (["--encoder-token-file", "token"], "encoder_token_file is for calls to encoders; set encoder_target"),
        (["--encoder-tls-ca", "ca.pem"], "encoder_tls_ca is for calls to encoders; set encoder_target"),
        ([*TARGET, "--encoder-tls-cert", "c.pem"], "encoder_tls_cert and encoder_tls_key belong together"),
        (
            [*TARGET, "--encoder-tls-cert", "c.pem", "--encoder-tls-key", "k.pem"],
            "encoder_tls_cert needs encoder_tls_ca",
        ),
        (["--rank-listen", "0.0.0.0:50060"], "rank_listen and rank_key_file belong together"),
        (["--rank-key-file", "key"], "rank_listen and rank_key_file belong together"),
        (["--rank-listen", "50060", "--rank-key-file", "key"], "must be host:port"),
        (["--rank-listen", "0.0.0.0:50060", "--rank-key-file", "key"], "set tensor_parallel_size as well"),
    ],
)
def test_a_contradiction_names_its_fields(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parsed(*arguments)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("", "--encoder-target: is empty; name the encoder's address, or leave the setting out: text prompts only"),
        ("localhost", "--encoder-target: the target must be host:port with a port of 1..65535"),
        ("http://x:1", "--encoder-target: the target must be host:port without http://"),
        ("dns:///encoder", "--encoder-target: the target must be host:port with a port of 1..65535"),
    ],
)
def test_an_encoder_target_without_a_server_is_refused(
    target: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parsed("--encoder-target", target)
    assert caught.value.message.startswith(message)
    monkeypatch.setenv("LOOKONCE_ENCODER_TARGET", target)
    with pytest.raises(ConfigurationError, match="encoder-target"):
        parsed()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--default-timeout-s", "30", "--max-connection-age-grace-s", "30"],
        ["--max-connection-age-grace-s", "30"],
        ["--max-video-frames-per-prompt", "0"],
        ["--max-video-frames-per-prompt", "2"],
        [*TARGET, "--encoder-tls-ca", "ca.pem", "--encoder-token-file", "token"],
    ],
)
def test_values_at_the_border_of_a_contradiction_are_accepted(arguments: list[str]) -> None:
    assert parsed(*arguments)


def test_settings_made_of_the_given_values_are_equal_secrets_among_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    config = tmp_path / "decoder.toml"
    config.write_text("max_num_seqs = 7\nlog_format = 'console'\n")
    monkeypatch.setenv("LOOKONCE_MAX_STEP_S", "12.5")
    flags = ("--redis-url", "redis://:secret@localhost", "--max-context-tokens", "99", "--no-overlap-encode")
    settings = parsed("--config", str(config), *flags, *TARGET, "--engine", "process")
    monkeypatch.delenv("LOOKONCE_MAX_STEP_S")
    again = DecoderSettings(**json.loads(json.dumps(settings.given_values())))
    assert dict(again) == dict(settings)
    assert again.model_fields_set == settings.model_fields_set
    assert again.redis_url is not None
    assert again.redis_url.get_secret_value() == "redis://:secret@localhost"
