"""Checks this machine for all that Lookonce needs; each fault names its remedy. Starts nothing, changes nothing."""

from __future__ import annotations

import importlib.metadata
import pathlib
import platform
import sys
from collections.abc import Sequence

from lookonce import __version__
from lookonce.errors import LookonceError
from lookonce.local.cli_settings import CliSettings
from lookonce.local.finding import Finding
from lookonce.local.model_source import resolve_model
from lookonce.local.serve_extra import INSTALL_HINT, missing_packages
from lookonce.local.stack_record import running_stacks
from lookonce.model.model_folder import ModelFolder, needs_torchvision

_PACKAGES = ("grpcio", "protobuf")
_SERVE_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "pillow", "redis")
# Packages of the extra `serve` that an installation for clients has not, neither by itself nor by chance.
_SIGNS_OF_SERVICES = frozenset({"torch", "grpcio-health-checking"})
# Instruction sets that affect speed, as /proc/cpuinfo names them: matrix operations, bfloat16, SHA-256.
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "sha_ni", "asimd", "bf16", "sha2")
_PING_BUDGET_S = 1.0


def examine(settings: CliSettings, model: str | None) -> list[Finding]:
    """Returns all findings. `model` is a folder or a hub name to check as well, or None.

    An installation for clients alone, without the extra `serve`, is fine unless a model is to be checked.
    """
    findings = [
        Finding("lookonce", True, __version__),
        Finding("Python", sys.version_info >= (3, 11), f"{platform.python_version()} on {platform.platform()}"),
        *(_package(name) for name in _PACKAGES),
    ]
    missing = missing_packages()
    if model is None and set(missing) >= _SIGNS_OF_SERVICES:
        findings.append(Finding("services", True, f"not installed: clients work here, services do not; {INSTALL_HINT}"))
    else:
        findings += _of_services(settings, missing)
    findings.append(_stack(settings))
    if model is not None:
        findings += _model(model)
    return findings


def _of_services(settings: CliSettings, missing: Sequence[str]) -> list[Finding]:
    """Returns the findings about what services need. `missing` are packages of the extra `serve`."""
    findings = [*(_package(name) for name in _SERVE_PACKAGES)]
    others = [name for name in missing if name not in _SERVE_PACKAGES]
    if others:
        findings.append(Finding("other packages", False, f"not installed: {', '.join(others)}; {INSTALL_HINT}"))
    tensor_work = _torch()
    devices = [*_kernels(), *_devices()] if tensor_work.is_fine else []
    features = ", ".join(_cpu_features()) or "none of those that affect speed"
    return [*findings, _heic(), tensor_work, *devices, Finding("CPU features", True, features), _redis(settings)]


def _package(name: str) -> Finding:
    try:
        return Finding(name, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, False, f"not installed; {INSTALL_HINT}")


def _heic() -> Finding:
    try:
        return Finding("HEIC images", True, f"pillow-heif {importlib.metadata.version('pillow-heif')}")
    except importlib.metadata.PackageNotFoundError:
        # All other formats work without it.
        return Finding("HEIC images", True, "refused by encoders here; pip install 'lookonce[heic]'")


def _torch() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("tensor work", False, f"torch cannot be imported: {error}; {INSTALL_HINT}")
    return Finding("tensor work", True, f"{torch.get_num_threads()} CPU threads")


def _devices() -> list[Finding]:
    """Returns one finding per registered device, and one per plug-in that could not be registered.

    A device that is not here is no fault; a plug-in that cannot be used is one.
    """
    try:
        from lookonce.devices.registry import installed_devices

        devices = installed_devices()
        states = devices.states()
    except (ImportError, OSError) as error:
        return [Finding("devices", False, f"devices cannot be examined: {error}; {INSTALL_HINT}")]
    found = [
        Finding(
            f"device {state.name}",
            not state.is_broken,
            state.availability.detail
            if state.availability.is_available or state.is_broken
            else f"not here: {state.availability.detail}",
        )
        for state in states
    ]
    return [*found, *(Finding("device plug-in", False, refusal) for refusal in devices.refusals)]


def _kernels() -> list[Finding]:
    """Returns the level of the kernels, and what services use for linear layers. Times them if no service has."""
    import torch

    from lookonce.model.kernels.linear_trial import choose_image_linear, choose_step_linear
    from lookonce.model.kernels.native_level import native_level

    try:
        level = Finding("CPU kernels", True, f"those of the level {native_level().name}")
    except LookonceError as error:
        return [Finding("CPU kernels", False, str(error))]
    choosers = (choose_step_linear, choose_image_linear)
    choices = [choose(dtype) for choose in choosers for dtype in (torch.float32, torch.bfloat16)]
    return [
        level,
        *(
            Finding(choice.operation, True, f"{choice.implementation}, {choice.speed_ratio:.2f} × PyTorch's speed")
            for choice in choices
        ),
    ]


def _cpu_features() -> list[str]:
    """Returns the flags of `_CPU_FLAGS` that this CPU has; none on systems without /proc/cpuinfo."""
    path = pathlib.Path("/proc/cpuinfo")
    if not path.exists():
        return []
    flags: set[str] = set()
    for line in path.read_text().splitlines():
        if line.startswith(("flags", "Features")):
            flags.update(line.partition(":")[2].split())
    return [flag for flag in _CPU_FLAGS if flag in flags]


def _redis(settings: CliSettings) -> Finding:
    if settings.redis_url is not None:
        return _configured_redis(settings.redis_url.get_secret_value())
    try:
        from lookonce.local.redis_server import find_server

        path, version = find_server()
    except ImportError as error:
        return Finding("Redis", False, f"{error}; {INSTALL_HINT}")
    except LookonceError as error:
        return Finding("Redis", False, str(error))
    return Finding("Redis", True, f"{path} {version[0]}.{version[1]}, started by `lookonce up`")


def _configured_redis(url: str) -> Finding:
    try:
        from lookonce.store.embedding_store import EmbeddingStore

        store = EmbeddingStore(url, _PING_BUDGET_S, ttl_s=1, max_entry_bytes=1)
    except ImportError as error:
        return Finding("Redis", False, f"{error}; {INSTALL_HINT}")
    except LookonceError as error:
        return Finding("Redis", False, str(error))
    try:
        is_up = store.ping()
    finally:
        store.close()
    answer = "answers" if is_up else "does not answer; without a cache every image is encoded again"
    return Finding("Redis", is_up, f"LOOKONCE_REDIS_URL {answer}")


def _stack(settings: CliSettings) -> Finding:
    try:
        records = running_stacks(settings.record_dir)
    except LookonceError as error:
        return Finding("running stack", False, str(error))
    detail = ", ".join(f"decoder at {record.decoders[0]}" for record in records)
    return Finding("running stack", True, detail or "none; `lookonce up` starts one")


def _model(name: str) -> list[Finding]:
    try:
        folder = ModelFolder.open(resolve_model(name))
    except LookonceError as error:
        return [Finding("model", False, str(error))]
    size_mb = sum(path.stat().st_size for path in folder.weight_files) / 1e6
    found = Finding("model", True, f"{folder.architecture}, {size_mb:.0f} MB of weights in {folder.path}")
    try:
        from lookonce.model.libraries.lean_transformers import import_lean_transformers

        import_lean_transformers(needs_torchvision=needs_torchvision(folder.path))
        from lookonce.local.doctor_model import examine_folder
    except (ImportError, OSError) as error:
        return [found, Finding("loading", False, f"the model cannot be checked: {error}; {INSTALL_HINT}")]
    return [found, *examine_folder(folder)]
