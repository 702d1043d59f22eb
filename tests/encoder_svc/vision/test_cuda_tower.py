"""A vision half gives the same rows after it was made fast for CUDA, with kernels in Triton's interpreter."""

from __future__ import annotations

import gc
import pathlib
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from encoder_svc.images.image_inputs import VisionAdapter
from encoder_svc.vision import cuda_tower
from lookonce.content_key import ProcessorOptions
from lookonce.model.half_model import load_vision_half
from lookonce.model.model_folder import ModelFolder
from tests import image_files
from tests.decoder_svc.runner.cuda import interpreted_triton
from tests.tiny_families import FAMILIES

from encoder_svc.vision import aligned_mlp, fused_block  # isort: skip  # interpreted_triton finds Triton
from lookonce.model.kernels import triton_rowwise  # isort: skip

assert interpreted_triton.TRITON_FOLDER
CPU = torch.device("cpu")
# Replaced modules of towers with three layers.
REPLACED = {
    # The merger has a norm, too.
    "qwen2_5_vl": {"gated_mlp": 3, "norm": 7, "attention": 3, "layer": 3},
    "exaone4_5": {"gated_mlp": 3, "norm": 7, "attention": 3, "layer": 3},
    "glm4v": {"gated_mlp": 3, "norm": 8, "attention": 3, "layer": 3},
    # Heads of queries and keys have norms.
    "glm_ocr": {"gated_mlp": 3, "norm": 13, "layer": 3},
    # Norms have a mean, and MLPs have no gate.
    "qwen2_vl": {"attention": 3},
    "qwen3_vl": {"attention": 4},
    # Attention has no windows.
    "pixtral": {"gated_mlp": 3, "norm": 7},
    "llava_clip": {},
    "llava_siglip": {},
}
# Multiples neither of 64 nor of 16 bytes in float32, with padding.
UNALIGNED, PADDED = 50, 64

Folders = Callable[[str], pathlib.Path]
Rows = Callable[[], list[torch.Tensor]]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_tower, "PLATFORM", types.SimpleNamespace(torch_device=lambda: CPU))


def model_and_rows(folder: pathlib.Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Rows]:
    """Returns a vision half and a function that computes the rows of two images."""
    model = load_vision_half(folder, dtype)
    adapter = VisionAdapter.load(ModelFolder.open(folder))
    images = [image_files.noise(0, 100, 90), image_files.noise(1, 60, 130)]
    inputs = [adapter.pixel_inputs(image, ProcessorOptions()) for image in images]

    def rows() -> list[torch.Tensor]:
        with torch.inference_mode():
            return [row for each in inputs for row in adapter.image_rows(model, [each])]

    return model, rows


def close(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def made_fast(model: Any) -> dict[str, Any]:
    """Makes a model fast and returns what is logged about it."""
    with capture_logs() as logs:
        cuda_tower.make_fast(model)
    return dict(next(log for log in logs if log["event"] == "vision half is made fast"))


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_stay_the_same_in_every_family(name: str, tiny_folder: Folders) -> None:
    model, rows = model_and_rows(tiny_folder(name))
    wanted = rows()
    log = made_fast(model)
    close(rows(), wanted)
    assert log["reasons_against"] == {}
    if name in REPLACED:
        assert log["num_replaced"] == REPLACED[name]


def test_rows_in_float16_are_as_close_to_float32_as_before(tiny_folder: Folders) -> None:
    exact = torch.cat(model_and_rows(tiny_folder("qwen2_5_vl"))[1]())
    model, rows = model_and_rows(tiny_folder("qwen2_5_vl"), torch.float16)
    before = torch.cat(rows()).float()
    assert made_fast(model)["num_replaced"] == REPLACED["qwen2_5_vl"]
    after = torch.cat(rows()).float()
    assert (after - exact).norm() <= 1.1 * (before - exact).norm()


def with_inner_size(model: Any, tower: str, size: int) -> Any:
    """Gives a model a new tower with MLPs of another inner size, and returns the tower."""
    old = getattr(model.model, tower)
    old.config.intermediate_size = size
    torch.manual_seed(5)
    setattr(model.model, tower, type(old)(old.config).eval().requires_grad_(False))
    return getattr(model.model, tower)


@pytest.mark.parametrize("has_kernels", [True, False])
def test_gated_mlps_are_merged_and_padded(
    has_kernels: bool, tiny_folder: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = model_and_rows(tiny_folder("qwen2_5_vl"))
    tower = with_inner_size(model, "visual", UNALIGNED)
    wanted = rows()
    if not has_kernels:
        # None makes the import fail, as without Triton.
        monkeypatch.setitem(sys.modules, cuda_tower._BLOCK, None)
    log = made_fast(model)
    assert log["num_replaced"]["gated_mlp"] == 3
    assert ("kernels" in log["reasons_against"]) != has_kernels
    for block in tower.blocks:
        assert block.mlp.gate_up.weight.shape == (2 * PADDED, tower.config.hidden_size)
        assert block.mlp.down.weight.shape == (tower.config.hidden_size, PADDED)
    close(rows(), wanted)


@pytest.mark.parametrize(
    ("name", "tower", "linears"),
    [("llava_siglip", "vision_tower", ("fc1", "fc2")), ("qwen3_vl", "visual", ("linear_fc1", "linear_fc2"))],
)
def test_mlps_without_gates_are_padded(name: str, tower: str, linears: tuple[str, str], tiny_folder: Folders) -> None:
    model, rows = model_and_rows(tiny_folder(name))
    with_inner_size(model, tower, UNALIGNED)
    wanted = rows()
    num_layers = made_fast(model)["num_replaced"]["mlp"]
    first, second = (
        [each for part, each in model.named_modules() if part.endswith(f"mlp.{linear}")] for linear in linears
    )
    assert num_layers == len(first) == len(second)
    assert {each.weight.shape[0] for each in first} == {each.weight.shape[1] for each in second} == {PADDED}
    close(rows(), wanted)


@pytest.mark.parametrize(
    ("size", "dtype", "is_unaligned"),
    [
        (50, torch.float32, True),
        (52, torch.float32, False),
        (52, torch.bfloat16, True),
        (4304, torch.bfloat16, False),
    ],
    ids=str,
)
def test_rows_of_16_bytes_need_no_padding(size: int, dtype: torch.dtype, is_unaligned: bool) -> None:
    mlp = torch.nn.Sequential(torch.nn.Linear(16, size), torch.nn.GELU(), torch.nn.Linear(size, 16))
    assert aligned_mlp.is_unaligned_mlp(mlp.to(dtype)) == is_unaligned


class InTheOtherOrder(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """An MLP whose second layer is registered first; `is_mlp` False: the first layer's output is used twice."""

    def __init__(self, *, is_mlp: bool) -> None:
        super().__init__()
        self.second = torch.nn.Linear(UNALIGNED, 16)
        self.act = torch.nn.GELU()
        self.first = torch.nn.Linear(16, UNALIGNED)
        self._is_mlp = is_mlp
        self.requires_grad_(False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        inner = self.first(rows)
        output: torch.Tensor = self.second(self.act(inner))
        return output if self._is_mlp else output + inner.mean(-1, keepdim=True)


def test_the_order_of_layers_does_not_matter() -> None:
    mlp, rows = InTheOtherOrder(is_mlp=True), torch.randn(3, 16)
    wanted = mlp(rows)
    assert aligned_mlp.is_unaligned_mlp(mlp)
    assert aligned_mlp.pad_mlp(mlp) is None
    assert (mlp.first.out_features, mlp.second.in_features) == (PADDED, PADDED)
    close([mlp(rows)], [wanted])


def test_a_module_that_computes_something_else_is_left_as_it_was() -> None:
    module = InTheOtherOrder(is_mlp=False)
    layers = (module.first, module.second)
    assert aligned_mlp.pad_mlp(module) == "it gives other values than transformers' module"
    assert (module.first, module.second) == layers


def slightly_wrong(hidden: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    summed, normed = ADD_NORM(hidden, *others)
    return summed, normed * 1.001


def failing(*_: Any) -> torch.Tensor:
    raise RuntimeError("out of resource: shared memory")


ADD_NORM = triton_rowwise.add_norm
OTHER_VALUES, FAILS = "it gives other values than transformers' module", "it fails on this device (RuntimeError)"


@pytest.mark.parametrize(
    ("module", "kernel", "broken", "reason", "kinds"),
    [
        (fused_block, "add_norm", slightly_wrong, OTHER_VALUES, {"norm", "layer"}),
        (fused_block, "add_norm", failing, FAILS, {"norm", "layer"}),
        (fused_block, "rotated_heads", lambda merged, *_: merged.view(70, -1, 16)[:, :8], OTHER_VALUES, {"attention"}),
        (fused_block, "attend_in_windows", lambda query, *_: query * torch.nan, OTHER_VALUES, {"attention"}),
        (triton_rowwise, "gated", lambda merged: merged.chunk(2, 1)[0] * torch.nan, OTHER_VALUES, {"gated_mlp"}),
        (triton_rowwise, "gated", failing, FAILS, {"gated_mlp"}),
    ],
    ids=["wrong norm", "failing norm", "no rotation", "nan", "nan in MLP", "failing MLP"],
)
def test_a_kernel_that_does_not_work_here_is_not_used(
    module: Any,
    kernel: str,
    broken: Any,
    reason: str,
    kinds: set[str],
    tiny_folder: Folders,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, rows = model_and_rows(tiny_folder("qwen2_5_vl"))
    wanted = rows()
    monkeypatch.setattr(module, kernel, broken)
    log = made_fast(model)
    assert log["reasons_against"] == dict.fromkeys(kinds, reason)
    assert log["num_replaced"].keys() == REPLACED["qwen2_5_vl"].keys() - kinds
    close(rows(), wanted)


def test_layers_that_no_feature_needs_are_emptied(tiny_folder: Folders) -> None:
    model, _ = model_and_rows(tiny_folder("llava_clip"))
    num_parameters = len(list(model.parameters()))
    assert made_fast(model)["num_skipped_layers"] == 1
    assert len(list(model.parameters())) < num_parameters


class ClampedMlp(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Looks like a gated MLP, and clamps what it multiplies, as GLM 5's tower does."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = torch.nn.Linear(16, 24), torch.nn.Linear(16, 24)
        self.down_proj, self.act_fn = torch.nn.Linear(24, 16), torch.nn.SiLU()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(hidden).clamp(max=10), self.up_proj(hidden).clamp(-10, 10)
        output: torch.Tensor = self.down_proj(self.act_fn(gate) * up)
        return output


class ScaledLayer(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Looks like a layer, and scales what it adds by so little that the sum hardly shows it."""

    def __init__(self, layer: Any, has_parameter: bool) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attn, self.mlp = layer.norm1, layer.norm2, layer.attn, layer.mlp
        scale = torch.full((1,), 1e-3)
        self.scale: Any = torch.nn.Parameter(scale) if has_parameter else scale

    def forward(self, hidden: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        hidden = hidden + self.scale * self.attn(self.norm1(hidden), *arguments, **named)
        output: torch.Tensor = hidden + self.scale * self.mlp(self.norm2(hidden))
        return output


def test_an_mlp_that_clamps_is_not_replaced() -> None:
    torch.manual_seed(0)
    parent = torch.nn.ModuleDict({"mlp": ClampedMlp()})
    assert aligned_mlp.is_gated_mlp(parent["mlp"])
    assert aligned_mlp.replace_gated_mlp(parent, "mlp", None) == "it gives other values than transformers' module"
    assert isinstance(parent["mlp"], ClampedMlp)


def test_a_layer_that_scales_what_it_adds_is_not_replaced(tiny_folder: Folders) -> None:
    model, _ = model_and_rows(tiny_folder("qwen2_5_vl"))
    layer = next(module for module in model.modules() if fused_block.is_block(module))
    for parameter in layer.parameters():
        if parameter.ndim > 1:
            parameter.mul_(0.1)
    assert not fused_block.is_block(ScaledLayer(layer, has_parameter=True))
    looks_like_one = ScaledLayer(layer, has_parameter=False)
    assert fused_block.is_block(looks_like_one)
    assert fused_block.fuse_block(looks_like_one) == "it gives other values than transformers' module"


def test_attention_is_no_mlp_and_old_weights_are_freed_one_by_one(
    tiny_folder: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = model_and_rows(tiny_folder("qwen2_5_vl"))
    layer = next(module for module in model.modules() if fused_block.is_block(module))
    assert not aligned_mlp.is_unaligned_mlp(layer.attn)
    mlps = [weakref.ref(module) for module in model.modules() if aligned_mlp.is_gated_mlp(module)]
    alive: list[int] = []
    replace = aligned_mlp.replace_gated_mlp

    def counted(*arguments: Any) -> str | None:
        reason = replace(*arguments)
        gc.collect()
        alive.append(sum(mlp() is not None for mlp in mlps))
        return reason

    monkeypatch.setattr(cuda_tower, "replace_gated_mlp", counted)
    cuda_tower.make_fast(model)
    assert alive == [2, 1, 0]
