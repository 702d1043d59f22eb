"""Misspelt flags and variables are named together with the nearest right one."""

from __future__ import annotations

import pytest

from decoder_svc.settings import DecoderSettings, RankSettings
from encoder_svc.settings import EncoderSettings
from gateway_svc.settings import GatewaySettings
from lookonce.local.cli_settings import CliSettings
from lookonce.server import setting_names
from lookonce.server.setting_names import unknown_flags, unknown_variables
from lookonce.server.settings import ServiceSettings

SHARED = ServiceSettings.model_fields


def test_every_setting_of_services_and_command_is_known() -> None:
    fields = EncoderSettings.model_fields.keys() | DecoderSettings.model_fields.keys()
    fields |= GatewaySettings.model_fields.keys() | RankSettings.model_fields.keys()
    # Has the name of the standard variable.
    fields |= CliSettings.model_fields.keys() - {"runtime_dir"}
    assert fields - SHARED.keys() == setting_names.OTHER_NAMES - setting_names._TOOLS
    assert unknown_variables([f"LOOKONCE_{name.upper()}" for name in fields], SHARED) == []


@pytest.mark.parametrize(
    "name",
    [
        "PATH",
        "lookonce_model",
        "LOOKONCE_PEER_PYTHON",
        "LOOKONCE_ENCODER_SERVICE_HOST",
        "LOOKONCE_ENCODER_SERVICE_PORT_GRPC",
        "LOOKONCE_ENCODER_PORT",
        "LOOKONCE_ENCODER_PORT_50051_TCP_ADDR",
    ],
)
def test_no_warning_about_what_others_set(name: str) -> None:
    assert unknown_variables([name], SHARED) == []


def test_a_misspelt_variable_is_named_with_the_nearest_one() -> None:
    first, second = unknown_variables(["LOOKONCE_ZZZZ", "LOOKONCE_REDISURL", "LOOKONCE_MODEL"], SHARED)
    assert first.startswith("LOOKONCE_REDISURL ")
    assert first.endswith("; did you mean LOOKONCE_REDIS_URL?")
    assert second == "LOOKONCE_ZZZZ in the environment is ignored, no setting has this name"


def test_misspelt_flags_are_named_without_their_values() -> None:
    said = unknown_flags(["--redis-ulr=redis://:SECRET@h", "--ttl-s", "-1", "-q"], ["--redis-url", "--ttl-s"])
    assert said == "there is no flag --redis-ulr; did you mean --redis-url?; there is no flag -q"
    assert unknown_flags(["--ttl-s", "-1"], ["--ttl-s"]) is None
