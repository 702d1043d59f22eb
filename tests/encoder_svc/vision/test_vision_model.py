"""Rows equal Hugging Face's, only half of the weights is loaded, and the fingerprint covers all that decides rows."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from encoder_svc.images.image_inputs import PixelInputs, VisionAdapter
from encoder_svc.settings import EncoderSettings
from encoder_svc.vision import vision_model as vision_model_module
from encoder_svc.vision.vision_model import VisionModel, row_bytes
from lookonce.content_key import ProcessorOptions
from lookonce.devices import cpu
from lookonce.embedding_meta import RowDtype
from lookonce.errors import InvalidParameterError, ModelFolderError
from lookonce.model.half_model import load_vision_half
from lookonce.model.model_folder import ModelFolder
from lookonce.model.vision_fingerprint import iter_vision_tensors, vision_fingerprint
from tests import image_files, tiny_models

FAMILIES = sorted(tiny_models.BUILDERS)
VISION_PARTS = {"vision_tower", "multi_modal_projector", "visual"}
SIZES = ((80, 60), (60, 80), (200, 50), (33, 190), (16, 16))

Folders = Callable[[str], pathlib.Path]
Models = Callable[[str], VisionModel]


def load(folder: pathlib.Path, **settings: Any) -> VisionModel:
    """The vision half of a folder."""
    return VisionModel.load(EncoderSettings(model=folder, **settings).vision)


def reference_rows(folder: pathlib.Path, images: list[Any], **kwargs: Any) -> list[torch.Tensor]:
    """Rows of the whole Hugging Face model, one image at a time, through its own processor."""
    model = tiny_models.load_model(folder)
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    rows = []
    for image in images:
        with torch.inference_mode():
            features = model.get_image_features(**processor(images=image, return_tensors="pt", **kwargs))
        rows.append(features.pooler_output[0])
    return rows


def test_weights_are_asked_for_before_they_are_read(tiny_folder: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(vision_model_module, "read_ahead", lambda all_: asked.extend(one.data_ptr() for one in all_))

    def fingerprint(folder: ModelFolder, model: torch.nn.Module, *arguments: Any) -> Any:
        assert asked == [parameter.data_ptr() for parameter in model.parameters()]
        return vision_fingerprint(folder, model, *arguments)

    monkeypatch.setattr(vision_model_module, "vision_fingerprint", fingerprint)
    load(tiny_folder("llava_clip"))
    assert asked


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_a_mixed_batch_equal_hugging_face_for_each_image(
    name: str, tiny_folder: Folders, vision_model: Models
) -> None:
    images = [image_files.noise(seed, *size) for seed, size in enumerate(SIZES)]
    model = vision_model(name)
    batch = [model.adapter.pixel_inputs(image, ProcessorOptions()) for image in images]
    together = model.forward(batch)
    expected = reference_rows(tiny_folder(name), images)
    for index, wanted in enumerate(expected):
        torch.testing.assert_close(together[index], wanted, rtol=1e-5, atol=1e-5)
        assert together[index].untyped_storage().nbytes() == together[index].nbytes, "kept rows do not hold a batch"
        torch.testing.assert_close(model.forward([batch[index]])[0], wanted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(together[0][0], together[1][0], atol=0.1), "different images give different rows"


def test_qwen2_vl_rows_follow_the_size(vision_model: Models) -> None:
    model = vision_model("qwen2_vl")
    batch = [model.adapter.pixel_inputs(image_files.noise(0, *size), ProcessorOptions()) for size in SIZES]
    assert [len(rows) for rows in model.forward(batch)] == [6, 6, 14, 7, 4]


def test_max_pixels_bounds_qwen2_vl_as_in_hugging_face(tiny_folder: Folders, vision_model: Models) -> None:
    image = image_files.noise(4, 300, 200)
    model = vision_model("qwen2_vl")
    rows = model.forward([model.adapter.pixel_inputs(image, ProcessorOptions(max_pixels=8 * 28 * 28))])[0]
    size = {"shortest_edge": 4 * 28 * 28, "longest_edge": 8 * 28 * 28}
    torch.testing.assert_close(rows, reference_rows(tiny_folder("qwen2_vl"), [image], size=size)[0])
    assert len(rows) <= 8


@pytest.mark.parametrize(("name", "max_pixels"), [("llava_clip", 5000), ("qwen2_vl", 3135), ("qwen2_vl", 18817)])
def test_max_pixels_that_a_family_cannot_keep_is_refused(name: str, max_pixels: int, vision_model: Models) -> None:
    with pytest.raises(InvalidParameterError, match="max_pixels"):
        vision_model(name).adapter.check_options(ProcessorOptions(max_pixels))


@pytest.mark.parametrize("name", FAMILIES)
def test_only_the_vision_half_is_held(name: str, tiny_folder: Folders) -> None:
    model = load_vision_half(tiny_folder(name), None)
    names = [tensor_name for tensor_name, _ in iter_vision_tensors(model)]
    assert names == sorted(names)
    assert not [tensor_name for tensor_name in names if "language_model" in tensor_name or "lm_head" in tensor_name]
    whole = load_file(tiny_folder(name) / "model.safetensors")
    vision = [
        tensor
        for key, tensor in whole.items()
        if key.split(".")[0] in VISION_PARTS or key.split(".")[1] in VISION_PARTS
    ]
    held = sum(parameter.numel() for parameter in model.parameters())
    assert 0 < held == sum(tensor.numel() for tensor in vision) < sum(tensor.numel() for tensor in whole.values())
    assert sum(data.nbytes for _, data in iter_vision_tensors(model)) >= 4 * held


@pytest.mark.parametrize("name", FAMILIES)
def test_the_fingerprint_is_the_same_for_a_copy(
    name: str, tiny_folder: Folders, vision_model: Models, tmp_path: pathlib.Path
) -> None:
    copy = shutil.copytree(tiny_folder(name), tmp_path / "other name")
    assert load(copy).fingerprint == vision_model(name).fingerprint


def changed_weights(folder: pathlib.Path, part: str) -> None:
    """Changes one number of the first tensor whose name holds `part`."""
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(tensors) if part in name)
    tensors[name].view(-1)[0] += 1.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def changed_json(folder: pathlib.Path, name: str, **values: Any) -> None:
    """Changes fields of a JSON file."""
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(content | values))


CHANGES: dict[str, Callable[[pathlib.Path], None]] = {
    "tower weights": lambda folder: changed_weights(folder, "vision_tower"),
    "projector weights": lambda folder: changed_weights(folder, "multi_modal_projector"),
    "feature layer": lambda folder: changed_json(folder, "config.json", vision_feature_layer=-1),
    "feature strategy": lambda folder: changed_json(folder, "config.json", vision_feature_select_strategy="full"),
    "processor": lambda folder: changed_json(folder, "preprocessor_config.json", image_mean=[0.5, 0.5, 0.5]),
    "processor class": lambda folder: changed_json(
        folder, "preprocessor_config.json", image_processor_type="SiglipImageProcessor"
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_fingerprint_changes_with_everything_that_decides_rows(
    change: str, tiny_folder: Folders, vision_model: Models, tmp_path: pathlib.Path
) -> None:
    copy = shutil.copytree(tiny_folder("llava_clip"), tmp_path / "model")
    CHANGES[change](copy)
    assert load(copy).fingerprint != vision_model("llava_clip").fingerprint


def test_the_fingerprint_ignores_the_language_model(
    tiny_folder: Folders, vision_model: Models, tmp_path: pathlib.Path
) -> None:
    copy = shutil.copytree(tiny_folder("llava_clip"), tmp_path / "model")
    changed_weights(copy, "language_model")
    assert load(copy).fingerprint == vision_model("llava_clip").fingerprint


def test_language_model_settings_that_a_projector_uses_are_part_of_the_fingerprint(
    tiny_folder: Folders, vision_model: Models, tmp_path: pathlib.Path
) -> None:
    copy = shutil.copytree(tiny_folder("mistral3"), tmp_path / "model")
    config = json.loads((copy / "config.json").read_text())
    changed_json(copy, "config.json", text_config=config["text_config"] | {"rms_norm_eps": 0.25})
    model, other = load(copy), vision_model("mistral3")
    image = image_files.noise(1)
    rows, of_other = (
        one.forward([one.adapter.pixel_inputs(image, ProcessorOptions())])[0].float() for one in (model, other)
    )
    assert not torch.allclose(rows, of_other, rtol=1e-3)
    assert model.fingerprint != other.fingerprint


def test_the_dtype_is_part_of_the_fingerprint_and_of_the_rows(tiny_folder: Folders, vision_model: Models) -> None:
    model = load(tiny_folder("llava_clip"), dtype="bfloat16")
    assert model.dtype is RowDtype.BFLOAT16
    assert model.fingerprint != vision_model("llava_clip").fingerprint
    image = image_files.noise(1)
    rows = model.forward([model.adapter.pixel_inputs(image, ProcessorOptions())])[0]
    assert rows.dtype == torch.bfloat16
    assert row_bytes(rows).nbytes == 16 * tiny_models.HIDDEN_SIZE * 2
    expected = reference_rows(tiny_folder("llava_clip"), [image])[0]
    assert (rows.float() - expected).norm() / expected.norm() < 0.05


def test_row_bytes_are_little_endian_row_major_and_read_only(vision_model: Models) -> None:
    model = vision_model("llava_siglip")
    rows = model.forward([model.adapter.pixel_inputs(image_files.noise(1), ProcessorOptions())])[0]
    data = row_bytes(rows)
    assert data.readonly
    assert np.array_equal(np.frombuffer(data, "<f4").reshape(rows.shape), rows.numpy())


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([], "1 images gave 0 outputs"),
        ([torch.zeros(4, 63)], "shape"),
        ([torch.zeros(0, 64)], "shape"),
        ([torch.zeros(1, 4, 64)], "shape"),
        ([torch.zeros(4, 64, dtype=torch.float16)], "element type"),
        ([torch.full((4, 64), float("nan"))], "not finite"),
        ([torch.full((4, 64), float("inf"))], "not finite"),
    ],
)
def test_rows_that_must_not_be_stored_are_refused(
    outputs: list[torch.Tensor], message: str, tiny_folder: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ModelFolder.open(tiny_folder("llava_clip"))
    model = VisionModel(folder, load_vision_half(folder.path, None), VisionAdapter.load(folder), cpu.PLATFORM)
    monkeypatch.setattr(model.adapter, "image_rows", lambda *_: outputs)
    with pytest.raises(ValueError, match=message):
        model.forward([PixelInputs({"pixel_values": torch.zeros(1, 3, 56, 56)}, 4)])


def test_rows_that_are_not_as_many_as_the_images_size_says_are_refused(vision_model: Models) -> None:
    model = vision_model("llava_clip")
    pixels = {"pixel_values": torch.zeros(1, 3, 56, 56)}
    assert len(model.forward([PixelInputs(pixels, 16)])[0]) == 16
    for num_rows in (15, 17):
        with pytest.raises(ValueError, match=f"16 rows for images that take .{num_rows}"):
            model.forward([PixelInputs(pixels, num_rows)])


@pytest.mark.parametrize("name", FAMILIES)
def test_warm_up_passes_for_a_good_folder_and_tries_two_shapes(
    name: str, vision_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = vision_model(name)
    forward, shapes = model.forward, []

    def recorded(batch: Sequence[PixelInputs]) -> list[torch.Tensor]:
        outputs = forward(batch)
        shapes.append([tuple(rows.shape) for rows in outputs])
        return outputs

    monkeypatch.setattr(model, "forward", recorded)
    model.warm_up()
    assert len(shapes) == 1, "one pass with both images, and a pair of frames where videos are taken"
    num_tried = 2 if model.adapter.model.video is None else 3
    assert [width for _, width in shapes[0]] == [model.hidden_size] * num_tried


def test_warm_up_refuses_a_processor_that_does_not_fit_the_tower(tiny_folder: Folders, tmp_path: pathlib.Path) -> None:
    copy = shutil.copytree(tiny_folder("llava_clip"), tmp_path / "model")
    changed_json(copy, "preprocessor_config.json", crop_size={"height": 70, "width": 70})
    with pytest.raises(ModelFolderError, match="does not fit"):
        load(copy).warm_up()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_warm_up_refuses_weights_of_the_tower_that_are_no_numbers(
    value: float, tiny_folder: Folders, tmp_path: pathlib.Path
) -> None:
    copy = shutil.copytree(tiny_folder("llava_clip"), tmp_path / "model")
    tensors = load_file(copy / "model.safetensors")
    name = next(name for name in tensors if "vision_tower" in name and name.endswith("layers.0.mlp.fc1.weight"))
    tensors[name].view(-1)[3] = value
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFolderError, match=r"^the vision tower computes NaN or infinity: a weight .* is damaged"):
        load(copy).warm_up()


def test_warm_up_tells_pixels_that_are_no_numbers_from_weights(tiny_folder: Folders, tmp_path: pathlib.Path) -> None:
    copy = shutil.copytree(tiny_folder("llava_clip"), tmp_path / "model")
    changed_json(copy, "preprocessor_config.json", image_mean=[float("nan"), 0.5, 0.5])
    with pytest.raises(ModelFolderError, match=r"^the image processor makes pixels of NaN or infinity: .*rocessor"):
        load(copy).warm_up()


def test_an_unknown_tower_is_refused(tiny_folder: Folders, tmp_path: pathlib.Path) -> None:
    copy = shutil.copytree(tiny_folder("llava_clip"), tmp_path / "model")
    changed_json(copy, "config.json", vision_config={"model_type": "vit"})
    with pytest.raises(ModelFolderError, match="'vit'"):
        VisionAdapter.load(ModelFolder.open(copy))


def test_a_folder_without_an_image_processor_is_refused(tiny_folder: Folders, tmp_path: pathlib.Path) -> None:
    copy = shutil.copytree(tiny_folder("llava_clip"), tmp_path / "model")
    (copy / "preprocessor_config.json").unlink()
    with pytest.raises(ModelFolderError, match="image processor"):
        load(copy)
