"""A folder with its family's rules: the files that it reads, the options that it refuses, and why it has no videos."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import transformers

from lookonce.content_key import ProcessorOptions
from lookonce.errors import ImageTooLargeError, InvalidParameterError, ModelFolderError, UnsupportedError
from lookonce.families.registry import FAMILIES as REGISTRY
from lookonce.model.family_model import FamilyModel
from lookonce.model.model_folder import ModelFolder
from tests import tiny_models
from tests.tiny_families import FAMILIES

Folder = Callable[[str], pathlib.Path]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    root = tmp_path_factory.mktemp("models")

    def folder(name: str) -> pathlib.Path:
        path: pathlib.Path = root / name
        builder = tiny_models.BUILDERS.get(name) or FAMILIES[name].build
        return path if path.exists() else builder(path)

    return folder


@pytest.fixture
def copied(built: Folder, tmp_path: pathlib.Path) -> Folder:
    """A copy of a tiny model's folder, to be changed."""
    return lambda name: pathlib.Path(shutil.copytree(built(name), tmp_path / name))


def load(path: pathlib.Path) -> FamilyModel:
    return FamilyModel.load(ModelFolder.open(path))


def edit(path: pathlib.Path, name: str, **fields: Any) -> None:
    file = path / name
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, **fields}))


def test_special_tokens_are_read_by_name_as_text_or_object(copied: Folder) -> None:
    path = copied("gemma3")
    more = {"extra_token": {"content": "<x>", "lstrip": False}, "not_a_name": "<y>", "number_token": 5}
    groups = {"extra_special_tokens": {"eoi_token": "<end>"}, "model_specific_special_tokens": {"boi_token": "<begin>"}}
    edit(path, "tokenizer_config.json", **groups, **more)
    tokens = load(path).source.tokens
    assert [tokens[name] for name in ("boi_token", "eoi_token", "extra_token")] == ["<begin>", "<end>", "<x>"]
    assert not {"not_a_name", "number_token"} & set(tokens)


def test_settings_are_those_of_the_processor_without_its_parts(copied: Folder) -> None:
    path = copied("llava_clip")
    edit(path, "processor_config.json", patch_size=14, image_processor={"size": 5}, video_processor={"size": 6})
    settings = load(path).source.settings
    assert settings["patch_size"] == 14
    assert not {"image_processor", "video_processor"} & set(settings)


def test_a_folder_without_an_image_processor_is_refused(copied: Folder) -> None:
    path = copied("llava_clip")
    (path / "preprocessor_config.json").unlink()
    (path / "processor_config.json").unlink(missing_ok=True)
    with pytest.raises(ModelFolderError, match="no usable image processor"):
        load(path)


def test_a_folder_without_the_files_of_its_family_is_refused(copied: Folder) -> None:
    path = copied("gemma3")
    config = json.loads((path / "tokenizer_config.json").read_text())
    edit(path, "tokenizer_config.json", boi_token=None, extra_special_tokens={}, model_specific_special_tokens={})
    assert config["boi_token"] or config["extra_special_tokens"]
    with pytest.raises(ModelFolderError, match=r"lacks something that Gemma 3 needs: KeyError 'boi_token'"):
        load(path)


def test_a_folder_that_its_family_refuses_is_refused_with_the_familys_reason(copied: Folder) -> None:
    path = copied("gemma3")
    edit(path, "preprocessor_config.json", do_pan_and_scan=True)
    if (path / "processor_config.json").exists():
        nested = json.loads((path / "processor_config.json").read_text()).get("image_processor", {})
        edit(path, "processor_config.json", image_processor={**nested, "do_pan_and_scan": True})
    with pytest.raises(ModelFolderError, match="cannot be served: pan and scan"):
        load(path)


@pytest.mark.parametrize(
    ("architecture", "missing", "needed"),
    [
        ("Lfm2VlForConditionalGeneration", "torchvision", "the image processor of this model needs torchvision"),
        ("FastVlmForConditionalGeneration", "torchvision", "the vision tower of this model needs timm and torchvision"),
        ("FastVlmForConditionalGeneration", "timm", "the vision tower of this model needs timm and torchvision"),
    ],
)
def test_a_folder_that_needs_a_missing_package_is_refused_with_the_way_out(
    architecture: str, missing: str, needed: str, copied: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is another family's: nothing of it is read before."""
    (model_type,) = (name for name, family in REGISTRY.items() if family.architecture == architecture)
    path = copied("llava_clip")
    edit(path, "config.json", model_type=model_type, architectures=[architecture])
    for package in ("timm", "torchvision"):
        monkeypatch.setattr(transformers.utils, f"is_{package}_available", lambda is_there=package != missing: is_there)
    with pytest.raises(ModelFolderError, match=rf"{needed}.*: install .* \(pip install 'lookonce\[") as raised:
        load(path)
    assert "\n" not in str(raised.value)


def test_a_processor_that_writes_its_own_system_prompt_is_refused(copied: Folder) -> None:
    path = copied("janus")
    assert load(path).sizing.largest.num_rows == 16
    edit(path, "processor_config.json", use_default_system_prompt=True)
    with pytest.raises(ModelFolderError, match="use_default_system_prompt"):
        load(path)


@pytest.mark.parametrize(
    ("file", "kind"), [("preprocessor_config.json", "image"), ("video_preprocessor_config.json", "video")]
)
def test_a_factor_that_only_some_processors_of_transformers_apply_is_refused(
    file: str, kind: str, copied: Folder
) -> None:
    path = copied("glmga")
    settings = json.loads((path / "preprocessor_config.json").read_text())
    (path / file).write_text(json.dumps(settings | {"patch_expand_factor": 1}))
    load(path)
    edit(path, file, patch_expand_factor=2)
    with pytest.raises(ModelFolderError, match=f"its {kind} processor has a patch_expand_factor of 2"):
        load(path)


@pytest.mark.parametrize(
    ("name", "of_vision", "fields", "reason"),
    [
        ("vipllava", True, {"model_type": "siglip_vision_model"}, "vision tower 'siglip_vision_model'"),
        ("video_llava", True, {"model_type": "siglip_vision_model"}, "vision tower 'siglip_vision_model'"),
        ("ovis2", True, {"tokenize_function": "gumbel_argmax"}, "visual words at random"),
        ("ovis2", True, {"hidden_stride": 4}, "do not fill squares of 4"),
        ("minicpmv4_6", False, {"downsample_mode": "4x"}, "counts rows for downsample_mode '16x'"),
        ("granite4_vision", False, {"vision_feature_select_strategy": "default"}, "drops a patch"),
        ("muse_glimmer", True, {"merge_size": 1}, "has patch_size, merge_size and temporal_patch_size"),
        ("muse_spark", True, {"merge_size": 1}, "has patch_size, merge_size and temporal_patch_size"),
        ("llama4", True, {"image_size": 112}, "tiles of 56 × 56 pixels, but its vision tower takes squares of 112"),
        ("llama4", True, {"patch_size": 28}, "gives 4 rows per tile, by .*, but its vision tower gives 1"),
        ("kimi_k25", True, {"merge_kernel_size": [1, 2]}, r"a merge_size of 2, but its .* and merges \[1, 2\]"),
        (
            "kimi_k25",
            True,
            {"patch_size": 16},
            "a patch_size of 14 and .*, but its vision tower has patches of 16 pixels",
        ),
    ],
)
def test_a_configuration_that_its_family_refuses_is_refused_with_the_familys_reason(
    name: str, of_vision: bool, fields: dict[str, Any], reason: str, copied: Folder
) -> None:
    path = copied(name)
    config = json.loads((path / "config.json").read_text())
    edit(path, "config.json", **({"vision_config": config["vision_config"] | fields} if of_vision else fields))
    with pytest.raises(ModelFolderError, match=f"cannot be served: .*{reason}"):
        load(path)


@pytest.mark.parametrize(
    ("name", "options", "field", "reason"),
    [
        ("llava_clip", ProcessorOptions(max_pixels=5000), "max_pixels", "does not support this option"),
        ("llava_clip", ProcessorOptions(beside_others=True), "beside_others", "independently of others"),
        ("llava_clip", ProcessorOptions(frame_size=(28, 28)), "frame_size", "LLaVA 1.5 takes no videos"),
        ("qwen2_vl", ProcessorOptions(max_pixels=1), "max_pixels", "must be between 3136 and 18816, not 1"),
        ("qwen2_vl", ProcessorOptions(frame_size=(27, 28)), "frame_size", "must be multiples of 28"),
        ("qwen2_vl", ProcessorOptions(frame_size=(28, 28), max_pixels=4000), "max_pixels", "does not apply to video"),
    ],
)
def test_options_that_the_model_does_not_have_are_refused_by_name(
    name: str, options: ProcessorOptions, field: str, reason: str, built: Folder
) -> None:
    with pytest.raises(InvalidParameterError, match=reason) as raised:
        load(built(name)).image_shape(50, 50, options)
    assert field in str(raised.value)


# Muse Glimmer's processor takes any size, and makes more rows than its bound from a very elongated image.
@pytest.mark.parametrize(("name", "width", "height"), [("qwen2_vl", 10, 4000), ("muse_glimmer", 7000, 2)])
def test_an_image_that_is_too_elongated_is_too_large(name: str, width: int, height: int, built: Folder) -> None:
    with pytest.raises(ImageTooLargeError, match=f"{width}×{height}"):
        load(built(name)).image_shape(width, height, ProcessorOptions())


def test_images_are_served_and_videos_refused_where_the_config_names_no_video_token(copied: Folder) -> None:
    path = copied("llava_clip")
    model = load(path)
    assert model.video is None
    assert model.most_rows == model.sizing.largest.num_rows == 16
    with pytest.raises(UnsupportedError, match="takes no videos"):
        model.frame_size(100, 100, 4, None)


def test_most_rows_cover_pairs_of_frames(built: Folder) -> None:
    model = load(built("qwen2_vl"))
    assert model.video is not None
    assert model.most_rows == max(model.sizing.largest.num_rows, model.video.most_rows)


def test_max_pixels_below_the_need_of_frames_is_refused(built: Folder) -> None:
    with pytest.raises(InvalidParameterError, match="must be at least"):
        load(built("qwen2_vl")).frame_size(100, 100, 4, 1)
