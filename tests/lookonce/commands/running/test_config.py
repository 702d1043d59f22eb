"""`lookonce config show` tells each setting with its origin, hides secrets, and writes a config map that k8s/ takes."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import yaml

from encoder_svc.settings import EncoderSettings
from lookonce.server.settings_parser import parse_settings
from tests.k8s.manifests import ENCODER, environment
from tests.k8s.variants import Variant, rendered
from tests.lookonce.command import clean_environment, run_here

GIVEN = {"LOOKONCE_REDIS_URL": "redis://:SECRET@cache", "LOOKONCE_TTL_S": "77", "LOOKONCE_LISTEN": "127.0.0.1:9"}
FLAGS = ("--", "--model", ".", "--max-batch-items", "8", "--deterministic", "--num-threads=3")


@pytest.fixture
def variables(tmp_path: pathlib.Path) -> dict[str, str]:
    return clean_environment(tmp_path) | GIVEN


def test_each_setting_has_its_value_and_its_origin(variables: dict[str, str], tmp_path: pathlib.Path) -> None:
    config = tmp_path / "settings.toml"
    config.write_text("ttl_s = 1\nmax_forward_images = 2\n")
    finished = run_here(variables, "config", "show", "encoder", "--json", *FLAGS, "--config", str(config))
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout)
    assert found.keys() == EncoderSettings.model_fields.keys()
    assert found["max_batch_items"] == {"value": 8, "origin": "flag"}
    assert found["ttl_s"] == {"value": 77, "origin": "environment"}
    assert found["max_forward_images"] == {"value": 2, "origin": "file"}
    assert found["dtype"] == {"value": "auto", "origin": "default"}
    assert found["model"] == {"value": ".", "origin": "flag"}
    assert found["redis_url"] == {"value": "**********", "origin": "environment"}
    lines = run_here(variables, "config", "show", "encoder", *FLAGS).stdout
    assert "max_batch_items\t8\tflag\n" in lines
    assert "deterministic\ttrue\tflag\n" in lines
    assert "SECRET" not in finished.stdout + lines


@pytest.mark.parametrize("service", ["decoder", "gateway"])
def test_the_other_services_are_shown_too(variables: dict[str, str], service: str) -> None:
    needed = {"decoder": ["--model", "."], "gateway": ["--decoder-target", "127.0.0.1:1"]}[service]
    finished = run_here(variables, "config", "show", service, "--", *needed)
    assert finished.returncode == 0, finished.stderr
    assert "listen\t127.0.0.1:9\tenvironment\n" in finished.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sidecar"], "encoder"),
        (["encoder"], "--model: is not set"),
        (["encoder", "--", "--modle", "x"], "did you mean --model?"),
        (["encoder", "--", "--model", ".", "--ttl-s", "0"], "--ttl-s"),
    ],
)
def test_what_the_service_would_refuse_is_refused(variables: dict[str, str], arguments: list[str], words: str) -> None:
    finished = run_here(variables, "config", "show", *arguments)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert words in finished.stderr


def test_the_config_map_gives_pods_the_same_settings(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = run_here(variables, "config", "show", "encoder", "--k8s", *FLAGS)
    assert finished.returncode == 0, finished.stderr
    assert "SECRET" not in finished.stdout
    for name in ("redis_url", "model", "listen"):
        assert f"\n# {name}: " in finished.stdout
    manifests = rendered(Variant("base"))
    patch: dict[str, Any] = yaml.safe_load(finished.stdout)
    (patched,) = (
        one for one in manifests if (one["kind"], one["metadata"]["name"]) == (patch["kind"], patch["metadata"]["name"])
    )
    in_pods = environment(manifests, ENCODER) | patch["data"]
    assert patched["data"].keys() - in_pods.keys() == set()
    for name in variables:
        monkeypatch.delenv(name, raising=False)
    for name, value in in_pods.items():
        monkeypatch.setenv(name, value)
    settings = parse_settings(EncoderSettings, [], "encoder_svc")
    assert (settings.ttl_s, settings.max_batch_items, settings.num_threads) == (77, 8, 3)
    assert settings.deterministic
    assert str(settings.model) == "/model", "the manifests still say where the model is"


def test_without_any_given_setting_the_config_map_is_empty(tmp_path: pathlib.Path) -> None:
    finished = run_here(clean_environment(tmp_path), "config", "show", "encoder", "--k8s", "--", "--model", ".")
    assert yaml.safe_load(finished.stdout)["data"] == {}
