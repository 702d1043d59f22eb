"""Nothing but the modules of a device decides by the kind of a device."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("lookonce", "encoder_svc", "decoder_svc", "gateway_svc")
# Modules of one device, which may name it.
DEVICE_MODULES = (
    "lookonce/devices/cpu.py",
    "lookonce/devices/cuda.py",
    "decoder_svc/runner/cpu/",
    "decoder_svc/runner/cuda/",
    # PinnedTransfer is the CUDA runner's.
    "decoder_svc/runner/host_transfer.py",
    # Copies from CUDA, and a kernel whose tiles depend on the shared memory of a CUDA device.
    "encoder_svc/vision/cuda_rows.py",
    "encoder_svc/vision/varlen_kernel.py",
    # Layers and attention of CPUs, which check that they get tensors in main memory.
    "encoder_svc/vision/cpu_tower.py",
    "encoder_svc/vision/dense_attention.py",
    "lookonce/model/kernels/packed_linear.py",
)
# PyTorch's modules for one kind of device.
_TORCH_MODULES = {"accelerator", "cuda", "hpu", "mps", "mtia", "npu", "xpu"}
_QUESTIONS = {"is_cpu", "is_cuda", "is_mps", "is_xpu"}
# `rows.to("cpu")` moves a result to main memory, whatever the device is, so only comparisons with it count.
_NAMES = {"cuda", "mps", "xpu", "hpu", "npu"}


def decisions(source: str) -> Iterator[str]:
    """Yields each use of a device's kind as `line: what`."""
    for node in ast.walk(ast.parse(source)):
        if _is_decision(node):
            yield f"{getattr(node, 'lineno', 0)}: {ast.unparse(node)}"


def _is_decision(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=owner, attr=name):
            is_device_type = name == "type" and ast.unparse(owner).endswith("device")
            is_torch_module = name in _TORCH_MODULES and ast.unparse(owner) in ("torch", "torch.backends")
            return is_device_type or is_torch_module or name in _QUESTIONS
        case ast.ImportFrom(module=str(module)):
            return module.removeprefix("torch.") in _TORCH_MODULES
        case ast.Constant(value=str(text)):
            return text.split(":")[0] in _NAMES
        case ast.Compare() | ast.MatchValue() | ast.Dict():
            return _names_the_cpu(node)
    return False


def _names_the_cpu(node: ast.Compare | ast.MatchValue | ast.Dict) -> bool:
    parts = node.keys if isinstance(node, ast.Dict) else list(ast.walk(node))
    return any(isinstance(part, ast.Constant) and part.value == "cpu" for part in parts)


def test_only_a_devices_own_modules_decide_by_its_kind() -> None:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if "_pb2" not in path.name]
    assert len(paths) > 200
    found = [
        f"{name}:{decision}"
        for path in paths
        if not (name := str(path.relative_to(ROOT))).startswith(DEVICE_MODULES)
        for decision in decisions(path.read_text("utf-8"))
    ]
    assert found == []


def test_the_modules_of_devices_exist() -> None:
    assert [name for name in DEVICE_MODULES if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(
    "source",
    [
        'if device.type == "cuda": pass',
        "kind = self.device.type",
        "torch.cuda.synchronize()",
        "from torch.cuda import Stream",
        "if tensor.is_cuda: pass",
        "if torch.backends.mps.is_available(): pass",
        'if name in ("auto", "cpu"): pass',
        'match name:\n    case "cpu": pass',
        'SIZES = {"cpu": 2}',
        'torch.device("cuda:0")',
    ],
)
def test_a_decision_is_found(source: str) -> None:
    assert list(decisions(source))


@pytest.mark.parametrize(
    "source",
    ['rows.to("cpu", copy=True)', "self.device = device", "type(device)", '"""On cuda devices."""', "row.type"],
)
def test_other_uses_of_devices_are_none(source: str) -> None:
    assert not list(decisions(source))
