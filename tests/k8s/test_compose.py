"""Tests that compose.yaml runs the same system on one machine, with the same rights as in the cluster."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

import lookonce
from lookonce.server.settings_parser import parse_settings
from tests.k8s.manifests import CASES, ENCODER, ServiceCase, container, find, patience_s
from tests.k8s.test_image import STAGES, arguments, target
from tests.k8s.variants import BASE, rendered

ROOT = pathlib.Path(__file__).parents[2]
_FLUSH_S = 1.0
_IMAGE_SETTINGS = re.compile(r"(LOOKONCE_\w+)=(\S+)")
services = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(scope="module")
def composition() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))
    return loaded


def _service(composition: dict[str, Any], case: ServiceCase) -> dict[str, Any]:
    service: dict[str, Any] = composition["services"][target(case)]
    return service


def _settings(composition: dict[str, Any], case: ServiceCase, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the settings that the service would parse from the variables of its image and of compose.yaml."""
    for key in [key for key in os.environ if key.startswith("LOOKONCE_")]:
        monkeypatch.delenv(key)
    told = dict(_IMAGE_SETTINGS.findall(STAGES["service"]["text"])) | _service(composition, case)["environment"]
    assert set(told) <= {f"LOOKONCE_{field.upper()}" for field in case.settings_class.model_fields}
    for key, value in told.items():
        monkeypatch.setenv(key, value)
    return parse_settings(case.settings_class, [], case.module)


def test_compose_itself_accepts_it() -> None:
    command = ["docker", "compose"]
    if (
        shutil.which("docker") is None
        or subprocess.run([*command, "version"], capture_output=True, check=False).returncode
    ):
        pytest.skip("docker compose is not installed")
    finished = subprocess.run(
        [*command, "--file", str(ROOT / "compose.yaml"), "config", "--quiet"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (finished.returncode, finished.stderr) == (0, "")


def test_it_names_nothing_that_compose_does_not_know(composition: dict[str, Any]) -> None:
    """Checks the parts of the Compose specification that we use. The tool itself is rarely installed."""
    assert {key for key in composition if not key.startswith("x-")} == {"name", "services", "networks"}
    known = set(
        "image build command user working_dir read_only cap_drop security_opt tmpfs mem_limit networks restart "
        "healthcheck environment ports volumes stop_grace_period depends_on".split()
    )
    for service in composition["services"].values():
        assert set(service) <= known
        assert set(service["networks"]) <= set(composition["networks"])
        assert set(service.get("depends_on", {})) <= set(composition["services"])
        assert set(service["healthcheck"]) <= {
            "test",
            "interval",
            "timeout",
            "retries",
            "start_period",
        }


@services
def test_settings_are_accepted(composition: dict[str, Any], case: ServiceCase, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = _settings(composition, case, monkeypatch)
    assert settings.redis_url.get_secret_value() == "redis://redis:6379"
    (volume,) = _service(composition, case)["volumes"]
    assert volume.endswith(f":{settings.model}:ro")
    default = re.findall(r":-([^}]+)\}", volume)
    assert (ROOT / default[0] / "config.json").is_file()


def test_the_decoder_finds_the_encoder(composition: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, decoder = (_settings(composition, case, monkeypatch) for case in CASES)
    port = encoder.listen.rpartition(":")[2]
    assert decoder.encoder_target == f"dns:///{target(ENCODER)}:{port}"
    networks = [set(_service(composition, case)["networks"]) for case in CASES]
    assert "services" in networks[0] & networks[1]


@services
def test_published_ports_are_those_of_the_settings_on_loopback(
    composition: dict[str, Any], case: ServiceCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    (published,) = _service(composition, case)["ports"]
    host, _, inner = published.split(":")
    assert host == "127.0.0.1"
    assert inner == _settings(composition, case, monkeypatch).listen.rpartition(":")[2]


@services
def test_stopping_waits_for_the_drain(
    composition: dict[str, Any], case: ServiceCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = _settings(composition, case, monkeypatch)
    grace_s = int(_service(composition, case)["stop_grace_period"].removesuffix("s"))
    assert grace_s > settings.drain_delay_s + settings.drain_timeout_s + _FLUSH_S


@services
def test_images_are_the_dockerfiles_targets(composition: dict[str, Any], case: ServiceCase) -> None:
    service = _service(composition, case)
    assert service["build"]["target"] == target(case)
    assert service["image"] == f"{case.name}:{lookonce.__version__}"
    assert set(service["build"]["args"]) <= set(re.findall(r"^ARG (\w+)", STAGES["build"]["text"], re.MULTILINE))


@services
def test_the_health_check_is_that_of_the_image(composition: dict[str, Any], case: ServiceCase) -> None:
    text = STAGES[target(case)]["text"]
    assert _service(composition, case)["healthcheck"]["test"] == ["CMD", *arguments(r"HEALTHCHECK .*\\\n\s+CMD", text)]


def test_containers_have_the_least_rights(composition: dict[str, Any]) -> None:
    users = {name: service["user"] for name, service in composition["services"].items()}
    for service in composition["services"].values():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert [entry.partition(":")[0] for entry in service["tmpfs"]] == ["/tmp"]
    assert users == {"redis": "10002:10002", "encoder": "10001:10001", "decoder": "10001:10001"}


def test_only_the_services_reach_the_cache(composition: dict[str, Any]) -> None:
    assert composition["networks"]["cache"]["internal"]
    assert composition["services"]["redis"]["networks"] == ["cache"]
    assert "ports" not in composition["services"]["redis"]


def test_the_cache_is_the_one_of_the_base(composition: dict[str, Any]) -> None:
    lines = find(rendered(BASE), "ConfigMap", "lookonce-redis")["data"]["valkey.conf"].splitlines()
    base = dict(line.split(" ", 1) for line in lines if line and not line.startswith("#"))
    program, *options = composition["services"]["redis"]["command"]
    ours = {key.removeprefix("--"): value or '""' for key, value in zip(options[::2], options[1::2], strict=True)}
    assert program == "valkey-server"
    # Sizes depend on the machine; the other values are the server's defaults.
    assert {key: value for key, value in ours.items() if key != "maxmemory"} == {
        key: value for key, value in base.items() if key not in {"maxmemory", "io-threads", "port"}
    }
    assert (
        composition["services"]["redis"]["image"].removeprefix("docker.io/")
        == container(rendered(BASE), "lookonce-redis")["image"]
    )


def test_a_frozen_service_is_found_as_soon_as_in_the_cluster(composition: dict[str, Any]) -> None:
    for case in CASES:
        check = _service(composition, case)["healthcheck"]
        found_s = int(check["interval"].removesuffix("s")) * check["retries"]
        assert found_s == patience_s(container(rendered(BASE), case.name)["livenessProbe"])
