"""Processes that must not start: exit status 2 and the reason on one line."""

from __future__ import annotations

import json
import pathlib
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from lookonce.local.serve_extra import SERVE_MODULES
from tests.conftest import DEMO_MODEL
from tests.device_plugins import plant_plugin

# Importing what a service needs before it loads its model takes half a second. Thus one process of each service imports
# it, and each start is a copy of that process. torch is empty: nothing can be loaded with it, so a refusal has come
# before that.
_STARTER = """
import importlib, importlib.machinery, json, os, sys, traceback, types
sys.modules["torch"] = types.ModuleType("torch")
sys.modules["torch"].__spec__ = importlib.machinery.ModuleSpec("torch", None)
service = sys.argv[1]
main = importlib.import_module(service + ".__main__").main
for name in (service + ".settings", "lookonce.devices.registry", "lookonce.server.serving",
             "lookonce.server.telemetry", "lookonce.store.early_checks", "lookonce.store.health"):
    importlib.import_module(name)
for line in sys.stdin:
    folder, log, arguments = json.loads(line)
    child = os.fork()
    if child == 0:
        file = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1), os.dup2(file, 2)
        os.chdir(folder)
        sys.path.insert(0, folder)
        sys.argv[1:] = arguments
        status = 0
        try:
            main()
        except SystemExit as ended:
            status = ended.code
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
Refusal = Callable[..., str]


@pytest.fixture(scope="module")
def starters() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """A process of each service that starts it, by the service's module."""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with ExitStack() as exits:
        yield {
            module: exits.enter_context(subprocess.Popen([sys.executable, "-c", _STARTER, module], **pipes))
            for module in ("encoder_svc", "decoder_svc")
        }


@pytest.fixture
def refusal(starters: dict[str, subprocess.Popen[str]], tmp_path: pathlib.Path) -> Refusal:
    """`refusal(module, *arguments)` returns what a service writes that refuses to start in the test's folder."""

    def refused(module: str, *arguments: str) -> str:
        process, log = starters[module], tmp_path / "log"
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps([str(tmp_path), str(log), arguments]), file=process.stdin, flush=True)
        status, said = process.stdout.readline().strip(), log.read_text()
        assert status == "2", said
        assert "Traceback" not in said
        return said

    return refused


@pytest.mark.parametrize("module", ["encoder_svc", "decoder_svc"])
def test_plaintext_on_a_reachable_address_is_refused(module: str) -> None:
    command = [sys.executable, "-m", module, "--model", str(DEMO_MODEL), "--listen", "0.0.0.0:0"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 2, process.stderr
    assert "Traceback" not in process.stderr
    assert "insecure" in process.stderr


@pytest.mark.parametrize("module", ["encoder_svc", "decoder_svc"])
@pytest.mark.parametrize("fault", ["pickled weights", "own code", "other architecture", "no folder"])
def test_a_model_folder_that_cannot_be_served_is_refused(
    module: str, fault: str, tmp_path: pathlib.Path, refusal: Refusal
) -> None:
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
    module: str, fault: str, tmp_path: pathlib.Path, refusal: Refusal
) -> None:
    flag, value, expected = _UNUSABLE[fault]
    (tmp_path / "short.txt").write_text("SECRET")
    said = refusal(module, "--model", str(DEMO_MODEL), flag, value)
    assert expected in said
    assert "SECRET" not in said


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
def test_a_taken_port_is_refused_before_the_model_is_loaded(module: str, refusal: Refusal) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = refusal(module, "--model", str(DEMO_MODEL), "--listen", address)
    assert said.splitlines()[-1] == f"error: --listen: cannot listen on {address}: Address already in use"


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
    module: str, fault: str, tmp_path: pathlib.Path, refusal: Refusal
) -> None:
    name, reason = _UNUSABLE_DEVICES[fault]
    source = "import a_driver_that_nobody_has"
    plant_plugin(tmp_path, "broken-card", {"broken": "broken_card:PLATFORM"}, broken_card=source)
    for distribution in ("one-card", "other-card"):
        plant_plugin(tmp_path, distribution, {"card": "no_module:PLATFORM"})
    said = refusal(module, "--model", str(DEMO_MODEL), "--device", name)
    assert said.splitlines() == [f"error: --device: {reason}"]
