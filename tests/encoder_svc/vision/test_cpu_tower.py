"""A vision half gives the same rows after it was made fast, in every family."""

from __future__ import annotations

import functools
import gc
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from encoder_svc.images.image_inputs import VisionAdapter
from encoder_svc.vision import cpu_tower
from encoder_svc.vision.cpu_tower import fuse_activation, make_fast
from encoder_svc.vision.unused_layers import skip_unused_layers
from encoder_svc.vision.vision_model import VisionModel
from lookonce.content_key import ProcessorOptions
from lookonce.model.half_model import load_vision_half
from lookonce.model.kernels.activation import Activation
from lookonce.model.kernels.linear_layers import LayerMaker
from lookonce.model.kernels.native_linear import NativeLinear, native_linear
from lookonce.model.kernels.packed_linear import PackedLinear, packed, unpackable_reason
from lookonce.model.model_folder import ModelFolder
from tests import image_files
from tests.encoder_svc.conftest import encoder_settings
from tests.tiny_families import FAMILIES

Folders = Callable[[str], pathlib.Path]
SIZES = ((80, 60), (200, 50))

FAST_TYPES = (PackedLinear, NativeLinear)


@pytest.fixture(params=["onednn", "native"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LayerMaker:
    """Makes layers of each implementation in turn; the other ones are not chosen meanwhile."""
    if request.param == "onednn" and (reason := unpackable_reason(torch.float32, torch.device("cpu"))) is not None:
        pytest.skip(f"not packed here: {reason}")
    if request.param == "native":
        request.getfixturevalue("library")
    chosen: LayerMaker = packed if request.param == "onednn" else functools.partial(native_linear, num_threads=2)
    monkeypatch.setattr(cpu_tower, "layer_maker", lambda _: chosen)
    return chosen


def rows_of(folder: pathlib.Path, model: Any) -> list[torch.Tensor]:
    """Rows of two images, encoded in one pass each."""
    adapter = VisionAdapter.load(ModelFolder.open(folder))
    images = [image_files.noise(seed, *size) for seed, size in enumerate(SIZES)]
    with torch.inference_mode():
        inputs = [adapter.pixel_inputs(image, ProcessorOptions()) for image in images]
        return [adapter.image_rows(model, [one])[0] for one in inputs]


def num_replaced(model: Any) -> int:
    return sum(isinstance(module, FAST_TYPES) for module in model.modules())


@pytest.mark.usefixtures("make")
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_stay_the_same_in_every_family(name: str, tiny_folder: Folders) -> None:
    folder = tiny_folder(name)
    plain, fast = load_vision_half(folder, None), load_vision_half(folder, None)
    make_fast(fast)
    assert num_replaced(fast) > 0
    assert not [module for module in fast.modules() if type(module) is torch.nn.Linear]
    for found, expected in zip(rows_of(folder, fast), rows_of(folder, plain), strict=True):
        # Without fused multiply-add (x86_64) 1 element of 53,312 is off by 1.1e-5 in deepseek_ocr2.
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.usefixtures("make")
def test_rows_in_bfloat16_are_no_further_from_float32_than_before(tiny_folder: Folders) -> None:
    folder = tiny_folder("llava_siglip")
    if (reason := unpackable_reason(torch.bfloat16, torch.device("cpu"))) is not None:
        pytest.skip(reason)
    exact = torch.cat(rows_of(folder, load_vision_half(folder, torch.float32)))
    model = load_vision_half(folder, torch.bfloat16)
    before = torch.cat(rows_of(folder, model)).float()
    make_fast(model)
    assert num_replaced(model) > 0
    after = torch.cat(rows_of(folder, model)).float()
    assert (after - exact).norm() <= 1.1 * (before - exact).norm()


def mapped_files() -> str:
    return pathlib.Path("/proc/self/maps").read_text()


@pytest.mark.usefixtures("make")
def test_the_file_of_weights_is_mapped_no_longer(tiny_folder: Folders) -> None:
    if not pathlib.Path("/proc/self/maps").exists():
        pytest.skip("this system does not tell what a process has mapped")
    folder = tiny_folder("aya_vision")
    model = load_vision_half(folder, None)
    assert str(folder) in mapped_files(), "else there is nothing to see here"
    make_fast(model)
    gc.collect()
    assert str(folder) not in mapped_files()
    assert rows_of(folder, model)


@pytest.mark.parametrize(
    ("name", "num_unused"),
    [("llava_clip", 1), ("llava_next", 1), ("llava_siglip", 0), ("vipllava", 1), ("granite4_vision", 0)],
)
def test_layers_behind_the_last_feature_are_emptied_and_rows_stay_bit_for_bit(
    name: str, num_unused: int, tiny_folder: Folders
) -> None:
    folder = tiny_folder(name)
    model = load_vision_half(folder, None)
    num_parameters = len(list(model.parameters()))
    before = rows_of(folder, model)
    assert skip_unused_layers(model) == num_unused
    assert (len(list(model.parameters())) < num_parameters) == bool(num_unused)
    assert all(torch.equal(one, other) for one, other in zip(rows_of(folder, model), before, strict=True))


@pytest.mark.parametrize(("wanted", "num_unused"), [(-1, 0), (-2, 1), (-3, 2), (1, 2), ([-3, -2], 1), ([1, -1], 0)])
def test_the_number_of_unused_layers_follows_from_the_features(
    wanted: int | list[int], num_unused: int, tiny_folder: Folders
) -> None:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2, image_size=8, patch_size=4
        ),
        text_config=transformers.LlamaConfig(
            vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        ),
        vision_feature_layer=wanted,
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    pixels = torch.randn(1, 3, 8, 8)
    with torch.inference_mode():
        before = model.model.get_image_features(pixels, return_dict=True).pooler_output
        assert skip_unused_layers(model) == num_unused
        after = model.model.get_image_features(pixels, return_dict=True).pooler_output
    assert torch.equal(torch.cat(list(after)), torch.cat(list(before)))


class Block(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A block linear → activation → linear; `forward` fixes the order."""

    def __init__(self, activation: torch.nn.Module, forward: Callable[[Block, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.second = torch.nn.Linear(32, 32)
        self.act = activation
        self.first = torch.nn.Linear(32, 32)
        self._forward = forward
        self.requires_grad_(False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self._forward(self, rows)


def in_order(block: Block, rows: torch.Tensor) -> torch.Tensor:
    return block.second(block.act(block.first(rows)))


def with_residual(block: Block, rows: torch.Tensor) -> torch.Tensor:
    return rows + in_order(block, rows)


def gated(block: Block, rows: torch.Tensor) -> torch.Tensor:
    return block.act(block.first(rows)) * block.second(rows)


def activation_last(block: Block, rows: torch.Tensor) -> torch.Tensor:
    return block.act(block.second(block.first(rows)))


def before_activation_too(block: Block, rows: torch.Tensor) -> torch.Tensor:
    inner = block.first(rows)
    return block.second(block.act(inner)) + inner


def wants_more(block: Block, rows: torch.Tensor) -> torch.Tensor:
    raise TypeError("missing 1 required positional argument")


@pytest.mark.parametrize("forward", [in_order, with_residual, gated])
@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        (torch.nn.GELU(), Activation.GELU),
        (torch.nn.GELU(approximate="tanh"), Activation.GELU_TANH),
        (transformers.activations.ACT2FN["gelu_pytorch_tanh"], Activation.GELU_TANH),
        (transformers.activations.ACT2FN["silu"], Activation.SILU),
        (torch.nn.ReLU(), Activation.RELU),
    ],
    ids=str,
)
def test_an_activation_joins_the_layer_before_it(
    activation: torch.nn.Module,
    expected: Activation,
    forward: Callable[[Block, torch.Tensor], torch.Tensor],
    make: LayerMaker,
) -> None:
    block = Block(activation, forward)
    rows = torch.randn(9, 32)
    before = block(rows)
    assert fuse_activation(block, make)
    assert isinstance(block.first, FAST_TYPES)
    assert block.first.activation is expected
    assert type(block.second) is torch.nn.Linear
    torch.testing.assert_close(block(rows), before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("forward", [before_activation_too, wants_more])
def test_a_block_of_another_form_is_left_as_it_was(
    forward: Callable[[Block, torch.Tensor], torch.Tensor], make: LayerMaker
) -> None:
    block = Block(torch.nn.GELU(), forward)
    parts = (block.first, block.act, block.second)
    assert not fuse_activation(block, make)
    assert (block.first, block.act, block.second) == parts


@pytest.mark.parametrize(
    "activation",
    [transformers.activations.ACT2FN["laplace"], torch.nn.Tanh(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 32)],
    ids=str,
)
def test_an_activation_that_no_fast_layer_has_stays(activation: torch.nn.Module, make: LayerMaker) -> None:
    block = Block(activation, in_order)
    assert not fuse_activation(block, make)
    assert block.act is activation


def test_an_activation_that_one_implementation_lacks_stays() -> None:
    block = Block(transformers.activations.ACT2FN["quick_gelu"], in_order)
    assert not fuse_activation(block, packed)


@pytest.mark.usefixtures("library")
def test_clips_activation_joins_a_native_layer() -> None:
    block = Block(transformers.activations.ACT2FN["quick_gelu"], in_order)
    rows = torch.randn(9, 32)
    before = block(rows)
    assert fuse_activation(block, functools.partial(native_linear, num_threads=2))
    torch.testing.assert_close(block(rows), before, rtol=1e-5, atol=1e-6)


def test_an_activation_behind_the_second_layer_joins_that_one(make: LayerMaker) -> None:
    block = Block(torch.nn.GELU(), activation_last)
    rows = torch.randn(9, 32)
    before = block(rows)
    assert fuse_activation(block, make)
    assert isinstance(block.second, FAST_TYPES)
    torch.testing.assert_close(block(rows), before, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("make")
def test_a_loaded_model_is_fast_and_its_fingerprint_is_that_of_the_weights_as_read(
    tiny_folder: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = encoder_settings(tiny_folder("llava_clip"), device="cpu")
    fast = VisionModel.load(settings.vision)
    assert num_replaced(fast._model) > 0
    monkeypatch.setattr(cpu_tower, "layer_maker", lambda _: None)
    plain = VisionModel.load(settings.vision)
    assert num_replaced(plain._model) == 0
    assert fast.fingerprint == plain.fingerprint
