"""The report of `lookonce doctor` about the machine, Redis and the running stack."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import sys

import pytest
import torch

from lookonce.local import doctor
from lookonce.local.cli_settings import CliSettings
from lookonce.local.doctor import examine
from lookonce.local.finding import Finding
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.local.serve_extra import SERVE_MODULES
from lookonce.local.stack_record import StackRecord
from lookonce.model.kernels.native_level import processor_levels
from tests.device_plugins import plant_plugin


@pytest.fixture
def settings(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> CliSettings:
    """Returns the settings of an environment with nothing but a runtime folder."""
    for name in [name for name in os.environ if name.startswith("LOOKONCE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return CliSettings()


def _examined(settings: CliSettings, model: str | None = None) -> dict[str, Finding]:
    return {finding.subject: finding for finding in examine(settings, model)}


def test_a_machine_that_runs_these_tests_is_fine(settings: CliSettings) -> None:
    findings = _examined(settings)
    assert [finding for finding in findings.values() if not finding.is_fine] == []
    assert findings["running stack"].detail == "none; `lookonce up` starts one"


def test_a_running_stack_is_reported_with_its_address(settings: CliSettings) -> None:
    StackRecord(os.getpid(), ("127.0.0.1:1234",), ("127.0.0.1:2",), "127.0.0.1:3", (), ()).write(settings.record_dir)
    assert _examined(settings)["running stack"].detail == "decoder at 127.0.0.1:1234"


def test_a_record_that_others_may_write_is_a_fault(settings: CliSettings) -> None:
    StackRecord(os.getpid(), ("127.0.0.1:1234",), ("127.0.0.1:2",), "127.0.0.1:3", (), ()).write(settings.record_dir)
    settings.record_dir.chmod(0o777)
    finding = _examined(settings)["running stack"]
    assert not finding.is_fine
    assert "only this user" in finding.detail


def test_the_level_of_the_kernels_is_reported_and_an_unknown_one_is_a_fault(
    settings: CliSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels = [level.name for level in processor_levels()]
    assert _examined(settings)["CPU kernels"] == Finding("CPU kernels", True, f"those of the level {levels[-1]}")
    monkeypatch.setenv("LOOKONCE_NATIVE_LEVEL", "avx3")
    finding = _examined(settings)["CPU kernels"]
    assert not finding.is_fine
    assert finding.detail == f"LOOKONCE_NATIVE_LEVEL is 'avx3'; this processor has {', '.join(levels)}"


def test_a_configured_redis_is_asked(settings: CliSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedRedis() as server:
        monkeypatch.setenv("LOOKONCE_REDIS_URL", server.url)
        assert _examined(CliSettings())["Redis"] == Finding("Redis", True, "LOOKONCE_REDIS_URL answers")
    finding = _examined(CliSettings())["Redis"]
    assert not finding.is_fine
    assert finding.detail.startswith("LOOKONCE_REDIS_URL does not answer")


def test_an_invalid_redis_url_is_a_fault_that_shows_no_password(
    monkeypatch: pytest.MonkeyPatch, settings: CliSettings
) -> None:
    monkeypatch.setenv("LOOKONCE_REDIS_URL", "http://:a-secret@somewhere")
    finding = _examined(CliSettings())["Redis"]
    assert not finding.is_fine
    assert "a-secret" not in finding.detail


def test_heic_is_told_to_be_refused_without_its_package(settings: CliSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def without(name: str) -> str:
        if name == "pillow-heif":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    assert _examined(settings)["HEIC images"].detail == f"pillow-heif {version('pillow-heif')}"
    monkeypatch.setattr(importlib.metadata, "version", without)
    finding = _examined(settings)["HEIC images"]
    assert (finding.is_fine, finding.detail) == (True, "refused by encoders here; pip install 'lookonce[heic]'")


def test_a_missing_package_names_the_command_that_installs_it(
    settings: CliSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_PACKAGES", ("a-package-that-nobody-has",))
    finding = _examined(settings)["a-package-that-nobody-has"]
    assert (finding.is_fine, finding.detail) == (False, "not installed; pip install 'lookonce[serve]'")


def _without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Hides packages of the extra `serve` from this process."""
    version = importlib.metadata.version

    def found(name: str) -> str:
        if name in packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", found)
    for name in packages:
        monkeypatch.setitem(sys.modules, SERVE_MODULES[name], None)


def test_an_installation_for_clients_alone_is_fine_and_told(
    settings: CliSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    _without(monkeypatch, *SERVE_MODULES)
    findings = _examined(settings)
    assert [finding for finding in findings.values() if not finding.is_fine] == []
    assert list(findings) == ["lookonce", "Python", "grpcio", "protobuf", "services", "running stack"]
    assert findings["services"].detail.startswith("not installed")
    assert "pip install 'lookonce[serve]'" in findings["services"].detail
    # With a model the question is whether services can run.
    with_model = _examined(settings, str(tmp_path))
    assert not with_model["torch"].is_fine
    assert "services" not in with_model


@pytest.mark.parametrize("missing", ["torch", "grpcio-health-checking", "structlog"])
def test_half_an_installation_of_services_is_a_fault(
    settings: CliSettings, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    _without(monkeypatch, missing)
    faults = [finding for finding in _examined(settings).values() if not finding.is_fine]
    assert faults
    assert all(missing in finding.subject + finding.detail for finding in faults)


def test_a_torch_that_cannot_be_imported_is_a_fault(settings: CliSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    finding = _examined(settings)["tensor work"]
    assert not finding.is_fine
    assert finding.detail.startswith("torch cannot be imported")


def test_a_folder_that_is_no_model_is_the_models_fault(settings: CliSettings, tmp_path: pathlib.Path) -> None:
    finding = _examined(settings, str(tmp_path))["model"]
    assert not finding.is_fine
    assert "config.json" in finding.detail


def test_devices_are_listed_and_only_a_broken_plug_in_is_a_fault(
    settings: CliSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folder = tmp_path / "path"
    plant_plugin(folder, "broken-card", {"card": "broken_card:PLATFORM"}, broken_card="import a_driver_that_nobody_has")
    plant_plugin(folder, "impostor", {"cpu": "impostor:PLATFORM"})
    before = _examined(settings)
    assert before["device cpu"].is_fine
    assert before["device cuda"] == Finding("device cuda", True, "not here: PyTorch sees no CUDA device here")
    assert "device card" not in before
    monkeypatch.syspath_prepend(folder)
    after = _examined(settings)
    assert [finding.subject for finding in after.values() if not finding.is_fine] == ["device card", "device plug-in"]
    assert "broken-card of the device card cannot be imported (ModuleNotFoundError" in after["device card"].detail
    assert after["device plug-in"].detail == (
        "the device name cpu of the plug-in impostor is taken; uninstall the plug-in"
    )
