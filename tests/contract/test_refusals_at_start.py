"""Processes that must not start: exit status 2 and the reason on one line."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys

import pytest

from lookonce.local.serve_extra import SERVE_MODULES
from tests.conftest import DEMO_MODEL
from tests.device_plugins import plant_plugin


def refusal(module: str, *arguments: str) -> str:
    """stderr of a service that refuses to start."""
    process = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert process.returncode == 2, process.stderr
    assert "Traceback" not in process.stderr
    return process.stderr


@pytest.mark.parametrize("module", ["encoder_svc", "decoder_svc"])
def test_plaintext_on_a_reachable_address_is_refused(module: str) -> None:
    assert "insecure" in refusal(module, "--model", str(DEMO_MODEL), "--listen", "0.0.0.0:0")


@pytest.mark.parametrize("module", ["encoder_svc", "decoder_svc"])
@pytest.mark.parametrize("fault", ["pickled weights", "own code", "other architecture", "no folder"])
def test_a_model_folder_that_cannot_be_served_is_refused(module: str, fault: str, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "model"
    if fault != "no folder":
        shutil.copytree(DEMO_MODEL, folder)
    config_file = folder / "config.json"
    if fault == "pickled weights":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    elif fault == "own code":
        config = json.loads(config_file.read_text())
        config_file.write_text(json.dumps(config | {"auto_map": {"AutoModel": "modeling_own.Own"}}))
    elif fault == "other architecture":
        config = json.loads(config_file.read_text())
        config_file.write_text(
            json.dumps(config | {"architectures": ["MllamaForConditionalGeneration"], "model_type": "mllama"})
        )
    expected = {
        "pickled weights": "safetensors",
        "own code": "auto_map",
        "other architecture": "mllama",
        "no folder": "not a folder",
    }[fault]
    assert expected in refusal(module, "--model", str(folder))


# Nothing can be loaded with it, and without a fault in the settings this would be the error.
_WITH_AN_EMPTY_TORCH = """
import importlib.machinery, sys, types
sys.modules["torch"] = types.ModuleType("torch")
sys.modules["torch"].__spec__ = importlib.machinery.ModuleSpec("torch", None)
from {}.__main__ import main
main()
"""
_UNUSABLE = {
    "Redis URL": ("--redis-url", "http://:SECRET@somewhere", "redis_url: cannot be used"),
    "Sentinel URL": ("--redis-url", "redis+sentinel://:SECRET@somewhere", "redis_url: cannot be used"),
    "seal keys": ("--seal-key-file", "short.txt", "seal_key_file"),
    "no seal keys": ("--seal-key-file", "missing.txt", "seal_key_file"),
    "tenant secret": ("--tenant-secret-file", "short.txt", "tenant_secret_file"),
}


@pytest.mark.parametrize("module", ["encoder_svc", "decoder_svc"])
@pytest.mark.parametrize("fault", _UNUSABLE)
def test_an_unusable_setting_of_the_cache_is_refused_before_the_model_is_loaded(
    module: str, fault: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag, value, expected = _UNUSABLE[fault]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("SECRET")
    command = [sys.executable, "-c", _WITH_AN_EMPTY_TORCH.format(module), "--model", str(DEMO_MODEL), flag, value]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 2, process.stderr
    assert expected in process.stderr
    assert "SECRET" not in process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize("module", ["encoder_svc", "decoder_svc"])
@pytest.mark.parametrize("missing", [["structlog"], list(SERVE_MODULES)], ids=["one", "all"])
def test_without_the_extra_the_service_says_what_to_install(module: str, missing: list[str]) -> None:
    hidden = [SERVE_MODULES[name] for name in missing]
    hide = f"import runpy, sys; sys.modules.update(dict.fromkeys({hidden}))"
    program = f"{hide}; runpy.run_module({module!r}, run_name='__main__')"
    command = [sys.executable, "-c", program, "--model", str(DEMO_MODEL)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 2, process.stderr
    (line,) = process.stderr.splitlines()
    assert line.startswith(f"error: `python -m {module}` needs packages that are not installed")
    assert line.endswith("pip install 'lookonce[serve]'")


@pytest.mark.parametrize("module", ["encoder_svc", "decoder_svc"])
def test_a_taken_port_is_refused_before_the_model_is_loaded(module: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        program = _WITH_AN_EMPTY_TORCH.format(module)
        command = [sys.executable, "-c", program, "--model", str(DEMO_MODEL), "--listen", address]
        process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 2, process.stderr
    assert process.stderr.splitlines()[-1] == f"error: --listen: cannot listen on {address}: Address already in use"


_UNUSABLE_DEVICES = {
    "unknown": ("npu", "no device npu is registered; use one of auto, cpu, cuda, broken"),
    "broken": (
        "broken",
        "the plug-in broken-card of the device broken cannot be imported (ModuleNotFoundError: No module named "
        "'a_driver_that_nobody_has'); repair or uninstall it",
    ),
    "disputed": ("card", "the device name card is claimed by one-card and other-card; uninstall all but one"),
}


@pytest.mark.parametrize("module", ["encoder_svc", "decoder_svc"])
@pytest.mark.parametrize("fault", _UNUSABLE_DEVICES)
def test_an_unusable_device_is_refused_before_the_model_is_loaded(
    module: str, fault: str, tmp_path: pathlib.Path
) -> None:
    name, reason = _UNUSABLE_DEVICES[fault]
    source = "import a_driver_that_nobody_has"
    plant_plugin(tmp_path, "broken-card", {"broken": "broken_card:PLATFORM"}, broken_card=source)
    for distribution in ("one-card", "other-card"):
        plant_plugin(tmp_path, distribution, {"card": "no_module:PLATFORM"})
    command = [sys.executable, "-c", _WITH_AN_EMPTY_TORCH.format(module), "--model", str(DEMO_MODEL), "--device", name]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert process.returncode == 2, process.stderr
    assert process.stderr.splitlines() == [f"error: --device: {reason}"]
