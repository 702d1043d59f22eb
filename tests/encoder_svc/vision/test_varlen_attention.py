"""The choice of the towers' attention on CUDA, on the CPU and on a simulated device: one call and no wait per layer."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from encoder_svc.images.image_inputs import VisionAdapter
from encoder_svc.vision import cuda_tower, varlen_attention
from encoder_svc.vision.varlen_attention import NAME, agrees_with_sdpa, use_varlen_attention
from lookonce.content_key import ProcessorOptions
from lookonce.model.half_model import load_vision_half
from lookonce.model.model_folder import ModelFolder
from tests import image_files
from tests.decoder_svc.runner.cuda import interpreted_triton
from tests.decoder_svc.runner.cuda.fake_cuda import FakeCuda, installed
from tests.decoder_svc.runner.cuda.simulated_device import PAGEABLE, PINNED
from tests.tiny_families import FAMILIES

from encoder_svc.vision import rotary_kernel, varlen_kernel  # isort: skip  # interpreted_triton finds Triton
from lookonce.model.kernels import triton_rowwise  # isort: skip

assert interpreted_triton.TRITON_FOLDER
# A tower with windows in some layers, one whose windows are images, one with feature levels, one with grouped heads.
WITH_BOUNDS = ["qwen2_5_vl", "qwen2_vl", "qwen3_vl", "exaone4_5"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], pathlib.Path]:
    base, built = tmp_path_factory.mktemp("models"), {}

    def folder(name: str) -> pathlib.Path:
        if name not in built:
            built[name] = FAMILIES[name].build(base / name)
        return pathlib.Path(built[name])

    return folder


def model_and_rows(folder: pathlib.Path) -> tuple[Any, Callable[[], list[torch.Tensor]]]:
    """Returns a vision half and a function that computes the rows of two images."""
    model = load_vision_half(folder, torch.float32)
    adapter = VisionAdapter.load(ModelFolder.open(folder))
    images = [image_files.noise(0, 150, 90), image_files.noise(1, 60, 130)]
    inputs = [adapter.pixel_inputs(image, ProcessorOptions()) for image in images]

    def rows() -> list[torch.Tensor]:
        with torch.inference_mode():
            return [row for each in inputs for row in adapter.image_rows(model, [each])]

    return model, rows


@pytest.mark.parametrize("name", WITH_BOUNDS)
def test_rows_are_sdpas_with_one_call_per_layer(
    name: str, folders: Callable[[str], pathlib.Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = model_and_rows(folders(name))
    wanted = rows()
    calls: list[int] = []
    right = varlen_kernel.attend_in_windows

    def noted(query: torch.Tensor, *others: Any) -> torch.Tensor:
        calls.append(len(query))
        return right(query, *others)

    monkeypatch.setattr(varlen_kernel, "attend_in_windows", noted)
    with capture_logs() as logs:
        assert use_varlen_attention(model)
    assert logs[-1]["backend"] == "triton"
    calls.clear()
    found = rows()
    assert len(calls) == 2 * len(model.model.visual.blocks)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_towers_without_bounds_keep_sdpa(folders: Callable[[str], pathlib.Path]) -> None:
    model, _ = model_and_rows(folders("llava_clip"))
    with capture_logs() as logs:
        assert not use_varlen_attention(model)
    assert logs[-1]["reason"] == "no layer takes bounds of windows"


@pytest.mark.parametrize(
    ("attend", "reason"),
    [
        (lambda query, *_: query * 0, "the kernel gives other values than PyTorch"),
        (lambda query, *_: query * torch.nan, "the kernel gives other values than PyTorch"),
        (lambda *_: torch.zeros(1) @ torch.zeros(2), "the kernel fails on this device (RuntimeError)"),
        (None, "Triton cannot be imported"),
    ],
    ids=["zeros", "nan", "failing", "missing"],
)
def test_a_kernel_that_does_not_work_here_is_not_used(
    attend: Any, reason: str, folders: Callable[[str], pathlib.Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = model_and_rows(folders("qwen2_5_vl"))
    if attend is None:
        # None makes the import fail, as without Triton.
        monkeypatch.setitem(sys.modules, varlen_attention._KERNEL, None)
    else:
        monkeypatch.setattr(varlen_kernel, "attend_in_windows", attend)
    with capture_logs() as logs:
        assert not use_varlen_attention(model)
    assert logs[-1]["reason"].startswith(reason)
    assert NAME not in {getattr(module, "config", model.config)._attn_implementation for module in model.modules()}
    assert all(row.isfinite().all() for row in rows())


def test_the_kernel_agrees_with_sdpa() -> None:
    assert agrees_with_sdpa(varlen_kernel.attend_in_windows, torch.float32, CPU)


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with installed(varlen_kernel, rotary_kernel, triton_rowwise) as cuda:
        yield cuda


@pytest.mark.parametrize("name", WITH_BOUNDS)
@pytest.mark.parametrize("is_fast", [True, False])
def test_layers_on_the_device_do_not_wait(
    name: str, is_fast: bool, folders: Callable[[str], pathlib.Path], cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    model, rows = model_and_rows(folders(name))
    if not is_fast:
        monkeypatch.setattr(cuda_tower, "use_varlen_attention", lambda _model: None)
    cuda_tower.make_fast(model)
    waits: list[int] = []
    for block in model.model.visual.blocks:
        block.register_forward_pre_hook(lambda *_: waits.append(-len(cuda.device.events)))
        block.register_forward_hook(lambda *_: waits.append(len(cuda.device.events)))
    with cuda.device.noting() as events:
        rows()
    assert {event.kind for event in events} - {PINNED, PAGEABLE}, "the tower waits before and after its layers"
    # With SDPA, each layer reads the lengths of its windows for queries, keys and values.
    assert sum(waits) == (0 if is_fast else 3 * len(waits) // 2)
