"""Native attention equals PyTorch's for every form that it takes, and leaves all other forms to PyTorch."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from structlog.testing import capture_logs
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from encoder_svc.images.image_inputs import VisionAdapter
from encoder_svc.vision import dense_attention
from encoder_svc.vision.dense_attention import NAME, DenseAttention, use_dense_attention
from lookonce.content_key import ProcessorOptions
from lookonce.model.half_model import load_vision_half
from lookonce.model.kernels.kernel_choice import NATIVE, PYTORCH, KernelChoice
from lookonce.model.kernels.native_compiler import NativeLibraryError
from lookonce.model.kernels.native_level import processor_levels
from lookonce.model.model_folder import ModelFolder
from tests import image_files
from tests.tiny_families import FAMILIES

Folders = Callable[[str], pathlib.Path]
# Families whose towers have masks, groups of query heads or a Q-Former.
WITH_MASKS = {
    "aria", "deepseek_ocr2", "exaone4_5", "gemma4", "gemma4_moe", "granite4_vision", "idefics2", "idefics3",
    "lfm3_vl", "lighton_ocr", "mistral3", "mistral4", "pixtral", "smolvlm",
}  # fmt: skip
# Towers that compute attention in their own code.
OWN_ATTENTION = {"got_ocr2"}
# Largest difference from products in float64, relative to the norm of the output.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 6e-3}
# Images, heads, tokens, elements of a head; the sizes lie around multiples of tiles, vectors and words.
SHAPES = [
    (1, 1, 1, 16),
    (1, 2, 11, 32),
    (2, 3, 12, 64),
    (1, 2, 13, 72),
    (3, 1, 32, 80),
    (1, 2, 33, 30),
    (1, 1, 47, 72),
    (2, 12, 577, 64),
]


def chosen(implementation: str) -> Callable[..., KernelChoice]:
    """A trial with a certain result. The real one depends on the processor, and on what else runs."""
    return lambda operation, _, candidates: KernelChoice(operation, implementation, dict.fromkeys(candidates, 1.0))


@pytest.fixture(autouse=True)
def _ours_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_attention, "choose_kernel", chosen(NATIVE))


@pytest.fixture(scope="module")
def native() -> DenseAttention:
    try:
        return DenseAttention()
    except NativeLibraryError as error:
        pytest.skip(f"there is no native library here: {error}")


def heads(shape: tuple[int, int, int, int], dtype: torch.dtype, *, gain: float = 1.0) -> list[torch.Tensor]:
    """Queries, keys and values in a tower's layout: side by side in memory, heads within a token."""
    num_images, num_heads, num_tokens, head_dim = shape
    generator = torch.Generator().manual_seed(num_tokens)
    together = torch.randn(num_images, num_tokens, 3, num_heads, head_dim, generator=generator) * gain
    return list(together.to(dtype).permute(2, 0, 3, 1, 4).unbind())


def sdpa(parts: list[torch.Tensor], scale: float) -> torch.Tensor:
    """PyTorch's output [num_images, num_tokens, num_heads, head_dim]."""
    return torch.nn.functional.scaled_dot_product_attention(*parts, scale=scale).transpose(1, 2)


def sdpa_error(parts: list[torch.Tensor], scale: float, exact: torch.Tensor) -> float:
    """The largest of PyTorch's relative errors over orders of a head's elements: one order may be lucky."""
    queries, keys, values = parts
    generator = torch.Generator().manual_seed(7)
    orders = [torch.randperm(queries.shape[-1], generator=generator) for _ in range(4)]
    outputs = [sdpa([queries[..., order], keys[..., order], values], scale) for order in orders]
    return max(relative_error(output, exact) for output in [sdpa(parts, scale), *outputs])


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("gain", [1.0, 8.0])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_as_exact_as_sdpa(
    shape: tuple[int, int, int, int], dtype: torch.dtype, gain: float, native: DenseAttention
) -> None:
    parts = heads(shape, dtype, gain=gain)
    exact = sdpa([part.double() for part in parts], 0.2)
    found = native.attend(*parts, scale=0.2)
    assert found is not None
    assert found.is_contiguous()
    assert relative_error(found, exact) < TOLERANCES[dtype]
    assert relative_error(found, exact) <= 1.2 * sdpa_error(parts, 0.2, exact) + 1e-7


@pytest.mark.parametrize("level", [level.name for level in processor_levels()])
def test_the_library_of_each_level_is_exact(
    level: str, native: DenseAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOKONCE_NATIVE_LEVEL", level)
    of_level = DenseAttention()
    for shape in SHAPES[:-1]:
        for dtype, tolerance in TOLERANCES.items():
            parts = heads(shape, dtype)
            found = of_level.attend(*parts, scale=0.2)
            assert found is not None
            assert relative_error(found, sdpa([part.double() for part in parts], 0.2)) < tolerance, (shape, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_an_image_has_the_same_bits_alone_and_beside_others_with_any_number_of_threads(
    dtype: torch.dtype, native: DenseAttention
) -> None:
    parts = heads((4, 3, 50, 64), dtype)
    together = native.attend(*parts, scale=0.125)
    assert together is not None
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for image in range(4):
            alone = native.attend(*(part[image : image + 1] for part in parts), scale=0.125)
            assert alone is not None
            assert torch.equal(alone[0], together[image])
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("gain", [1e4, 1e9, 1e17])
def test_huge_scores_give_the_value_of_the_largest(native: DenseAttention, gain: float, dtype: torch.dtype) -> None:
    parts = heads((2, 3, 45, 64), dtype, gain=gain)
    parts[2] = parts[2] / gain
    found = native.attend(*parts, scale=0.3)
    assert found is not None
    torch.testing.assert_close(found, sdpa(parts, 0.3), rtol=2e-2, atol=2e-2)


def test_a_scale_that_is_not_positive_is_left_to_pytorch(native: DenseAttention) -> None:
    for scale in (0.0, -0.5):
        assert native.attend(*heads((1, 2, 13, 32), torch.float32), scale=scale) is None


def test_values_that_are_not_finite_stay_visible(native: DenseAttention) -> None:
    for bad in (float("nan"), float("inf")):
        parts = heads((1, 1, 20, 16), torch.float32)
        parts[2][0, 0, 7, 3] = bad
        found = native.attend(*parts, scale=0.25)
        assert found is not None
        assert not torch.isfinite(found[0, :, 0, 3]).any()
        parts[2][0, 0, 7, 3] = 0.0
        parts[0][0, 0, 5, 2] = bad
        found = native.attend(*parts, scale=0.25)
        assert found is not None
        assert torch.isnan(found[0, 5]).all()


def other_head_dims(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    return [parts[0], parts[1], parts[2][..., :8]]


def grouped_heads(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    return [parts[0], parts[1][:, :1], parts[2][:, :1]]


def elements_apart(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    return [part[..., ::2] for part in parts]


def odd_heads(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    return [part[..., :15] for part in parts]


def half_words(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    return [part[..., 1:15] for part in parts]


def no_tokens(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    return [part[:, :, :0] for part in parts]


def other_type(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    return [part.half() for part in parts]


@pytest.mark.parametrize(
    "change", [other_head_dims, grouped_heads, elements_apart, odd_heads, half_words, no_tokens, other_type]
)
def test_unsupported_arguments_are_left_to_pytorch(
    change: Callable[[list[torch.Tensor]], list[torch.Tensor]], native: DenseAttention
) -> None:
    parts = heads((1, 2, 6, 16), torch.bfloat16)
    assert native.attend(*parts, scale=0.25) is not None
    assert native.attend(*change(parts), scale=0.25) is None


class Counted:
    """The implementation that transformers calls, and a count of the calls that C++ answered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_native = 0
        self.num_left = 0
        attend = DenseAttention.attend

        def counted(of: DenseAttention, *parts: torch.Tensor, scale: float) -> torch.Tensor | None:
            output = attend(of, *parts, scale=scale)
            self.num_native += output is not None
            return output

        def left(*arguments: Any, **named: Any) -> Any:
            self.num_left += 1
            return sdpa_attention_forward(*arguments, **named)

        monkeypatch.setattr(DenseAttention, "attend", counted)
        monkeypatch.setattr(dense_attention, "sdpa_attention_forward", left)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gives_the_same_rows(
    name: str, tiny_folder: Folders, native: DenseAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder(name)
    adapter = VisionAdapter.load(ModelFolder.open(folder))
    images = [image_files.noise(seed, *size) for seed, size in enumerate(((80, 60), (200, 50)))]
    counted = Counted(monkeypatch)
    model = load_vision_half(folder, None)
    with torch.inference_mode():
        inputs = [adapter.pixel_inputs(image, ProcessorOptions()) for image in images]
        before = [adapter.image_rows(model, [one])[0] for one in inputs]
        assert use_dense_attention(model)
        counted.num_native = 0
        after = [adapter.image_rows(model, [one])[0] for one in inputs]
    for found, expected in zip(after, before, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (counted.num_native + counted.num_left > 0) == (name not in OWN_ATTENTION), "the tower asks for attention"
    if counted.num_left == 0:
        return
    assert name in WITH_MASKS, "its tower has masks, grouped heads or a Q-Former"


def implementation(monkeypatch: pytest.MonkeyPatch) -> tuple[Counted, Any]:
    counted = Counted(monkeypatch)
    assert dense_attention._register(torch.float32) is None
    counted.num_native = 0
    return counted, transformers.AttentionInterface()[NAME]


@pytest.mark.parametrize(
    "arguments",
    [
        {"is_causal": True},
        {},
        {"is_causal": False, "dropout": 0.1},
        {"is_causal": False, "attention_mask": torch.zeros(1, 1, 9, 9).masked_fill(torch.eye(9) > 0, -torch.inf)},
    ],
    ids=["causal", "causal by default", "dropout", "mask"],
)
def test_another_computation_goes_to_sdpa(
    arguments: dict[str, Any], native: DenseAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, forward = implementation(monkeypatch)
    parts = heads((1, 2, 9, 16), torch.float32)
    mask = arguments.get("attention_mask")
    others = {name: value for name, value in arguments.items() if name != "attention_mask"}
    torch.manual_seed(0)
    found, _ = forward(torch.nn.Identity(), *parts, mask, scaling=0.5, **others)
    assert (counted.num_native, counted.num_left) == (0, 1)
    torch.manual_seed(0)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *parts,
        attn_mask=mask,
        scale=0.5,
        dropout_p=others.get("dropout", 0.0),
        is_causal=mask is None and others.get("is_causal", True),
    )
    torch.testing.assert_close(found, expected.transpose(1, 2))


@pytest.mark.parametrize(("scaling", "scale"), [(None, 0.25), (0.5, 0.5)])
def test_plain_attention_is_native_with_the_scale_that_is_meant(
    scaling: float | None, scale: float, native: DenseAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, forward = implementation(monkeypatch)
    parts = heads((1, 2, 9, 16), torch.float32)
    found, _ = forward(torch.nn.Identity(), *parts, None, scaling=scaling, is_causal=False)
    assert (counted.num_native, counted.num_left) == (1, 0)
    torch.testing.assert_close(found, sdpa(parts, scale))


def no_library(*_: object) -> None:
    raise NativeLibraryError("there is no C++ compiler")


@pytest.mark.parametrize(
    ("place", "stand_in", "reason"),
    [
        ((dense_attention, "load_library"), no_library, "no C++ compiler"),
        ((DenseAttention, "agrees_with_sdpa"), lambda *_: False, "other values"),
        ((dense_attention, "choose_kernel"), chosen(PYTORCH), "PyTorch's is faster"),
    ],
)
def test_without_a_good_and_faster_library_sdpa_stays_with_the_reason_in_the_log(
    place: tuple[Any, str], stand_in: Any, reason: str, tiny_folder: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*place, stand_in)
    model = load_vision_half(tiny_folder("llava_clip"), None)
    with capture_logs() as logs:
        assert not use_dense_attention(model)
    assert model.config.vision_config._attn_implementation == "sdpa"
    assert reason in logs[0]["reason"]


def test_a_type_without_native_attention_keeps_sdpa(tiny_folder: Folders) -> None:
    model = load_vision_half(tiny_folder("llava_clip"), torch.float16)
    with capture_logs() as logs:
        assert not use_dense_attention(model)
    assert "float16" in logs[0]["reason"]
