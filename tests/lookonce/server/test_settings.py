"""Rules of the settings of every service: ranges, and settings that belong together or exclude each other."""

from __future__ import annotations

import pathlib

import pytest

from lookonce import errors
from lookonce.server.settings import ServiceSettings, TracingVariables, is_loopback
from lookonce.server.settings_parser import parse_settings


def parsed(*arguments: str) -> ServiceSettings:
    return parse_settings(ServiceSettings, ["--model", ".", *arguments], "test")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--ttl-s", "0"], ["--ttl-s", "greater than or equal to 1"]),
        (["--ttl-s", "315360001"], ["--ttl-s", "less than or equal to 315360000"]),
        (["--drain-timeout-s", "inf"], ["--drain-timeout-s", "finite number"]),
        (["--drain-delay-s", "1e300"], ["--drain-delay-s", "less than or equal to 2000000"]),
        (["--keepalive-time-s", "1e7"], ["--keepalive-time-s", "less than or equal to 2000000"]),
        (["--max-connection-age-s", "inf"], ["--max-connection-age-s", "finite number"]),
        (["--served-model-name", ""], ["--served-model-name", "is empty"]),
        (["--served-model-name", " "], ["--served-model-name", "is empty"]),
        (["--log-level", "loud"], ["--log-level", "'debug'"]),
        (["--listen", "50051"], ["--listen", "must be host:port"]),
        (["--listen", "127.0.0.1:65536"], ["--listen", "0..65535"]),
        (["--tls-cert", "c.pem"], ["tls_cert and tls_key belong together"]),
        (["--tls-client-ca", "ca.pem"], ["tls_client_ca needs tls_cert and tls_key"]),
        (["--auth-jwt-issuer", "i"], ["auth_jwt_keys_file, auth_jwt_issuer and auth_jwt_audience belong together"]),
        (
            ["--max-message-bytes", str(10 << 20), "--max-image-bytes", str(20 << 20)],
            ["max_image_bytes=20971520 can never arrive", "max_message_bytes=10485760"],
        ),
        (
            ["--listen", "127.0.0.1:50051", "--metrics-listen", "127.0.0.1:50051"],
            ["listen and metrics_listen are both 127.0.0.1:50051"],
        ),
        (["--max-message-bytes", str(1 << 31)], ["--max-message-bytes", "less than or equal to 2146435072"]),
        (["--max-queued-bytes", str(10**20)], ["max_queued_bytes must be at most"]),
        (["--quotas-file", "q.toml"], ["quotas_file needs auth_tokens_file or auth_jwt_keys_file"]),
    ],
)
def test_a_wrong_setting_is_named_with_its_range_or_its_fellow(arguments: list[str], parts: list[str]) -> None:
    with pytest.raises(errors.ConfigurationError) as caught:
        parsed(*arguments)
    assert all(part in caught.value.message for part in parts), caught.value.message


def test_addresses_of_free_ports_are_never_the_same() -> None:
    free = "127.0.0.1:0"
    assert parsed("--listen", free, "--admin-listen", free, "--health-listen", free).admin_listen == free


def test_the_url_of_the_cache_is_not_shown() -> None:
    settings = parsed("--redis-url", "redis://user:password@host:1")
    assert "password" not in f"{settings!r} {settings}"


def test_the_model_name_is_the_folder_s_unless_another_is_set(tmp_path: pathlib.Path) -> None:
    folder = ["--model", str(tmp_path / "llava")]
    assert parse_settings(ServiceSettings, folder, "test").model_name == "llava"
    assert parse_settings(ServiceSettings, [*folder, "--served-model-name", "vlm"], "test").model_name == "vlm"


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("example.com:1", False),
    ],
)
def test_only_loopback_addresses_are_loopback(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.1.2.3:50051", "example.com:80"])
def test_plaintext_on_an_address_that_others_reach_is_refused(address: str) -> None:
    with pytest.raises(errors.ConfigurationError, match="plaintext"):
        parse_settings(ServiceSettings, ["--model", ".", "--listen", address], "test")
    assert parse_settings(ServiceSettings, ["--model", ".", "--listen", address, "--insecure"], "test").insecure


def test_tokens_in_plaintext_are_refused_on_an_address_that_others_reach() -> None:
    arguments = ["--listen", "0.0.0.0:0", "--auth-tokens-file", "t.toml"]
    with pytest.raises(errors.ConfigurationError, match="plaintext"):
        parsed(*arguments)
    assert parsed(*arguments, "--insecure").auth_tokens_file == pathlib.Path("t.toml")


@pytest.mark.parametrize(
    ("variables", "exporters"),
    [
        ({}, ()),
        ({"TRACES_EXPORTER": "none"}, ()),
        ({"TRACES_EXPORTER": "console, otlp"}, ("console", "otlp_proto_grpc")),
        ({"EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, ("otlp_proto_grpc",)),
        ({"EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4317", "EXPORTER_OTLP_PROTOCOL": "grpc"}, ("otlp_proto_grpc",)),
        (
            {
                "EXPORTER_OTLP_ENDPOINT": "http://c:4317",
                "EXPORTER_OTLP_PROTOCOL": "grpc",
                "EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            },
            ("otlp_proto_http",),
        ),
        ({"EXPORTER_OTLP_ENDPOINT": "http://c:4317", "SDK_DISABLED": "TRUE"}, ()),
    ],
)
def test_traces_are_exported_as_the_standard_variables_say(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], exporters: tuple[str, ...]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"OTEL_{name}", value)
    assert TracingVariables().exporters == exporters
