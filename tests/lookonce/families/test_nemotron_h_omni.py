"""A folder of Nemotron-H Omni is served only if its rows depend on one image, and its time steps have no limits."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import PIL.Image
import pytest
import transformers

from decoder_svc.prompt.family import load_family
from lookonce.content_key import ProcessorOptions
from lookonce.errors import ImageTooLargeError, ModelFolderError, UnsupportedError
from lookonce.model.family_model import FamilyModel
from lookonce.model.half_model import load_text_half, load_vision_half
from lookonce.model.model_folder import ModelFolder
from lookonce.model.pretrained_tokenizer import load_pretrained
from tests.folder_verdicts import doctor_refusal, start_refusal
from tests.tiny_families import FAMILIES as TINY_FAMILIES

CONFIG, IMAGES = "config.json", "preprocessor_config.json"

pytestmark = pytest.mark.parametrize("name", ["nemotron_h_omni"])

Edited = Callable[[str, str, Mapping[str, Any]], ModelFolder]


@pytest.fixture
def edited(family_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path) -> Edited:
    def edit(name: str, file: str, fields: Mapping[str, Any]) -> ModelFolder:
        shutil.copytree(family_folder(name), tmp_path / name)
        path = tmp_path / name / file
        content = json.loads(path.read_text())
        for field, value in fields.items():
            content[field] = content[field] | value if isinstance(value, dict) else value
        path.write_text(json.dumps(content))
        return ModelFolder.open(tmp_path / name)

    return edit


@pytest.mark.parametrize(
    ("file", "fields", "reason"),
    [
        (IMAGES, {"max_model_len": 33}, "depend on how many images a prompt has"),
        (IMAGES, {"max_num_patches": 0}, "max_num_patches of its image processor must be a whole number ≥ 1, not 0"),
        (IMAGES, {"min_num_patches": "many"}, "min_num_patches of its image processor must be .*, not 'many'"),
        (IMAGES, {"downsample_ratio": 0.25}, r"must be 0\.5, not \(0\.25, 0\.5\)"),
        (IMAGES, {"patch_size": 16}, "patches of 16 pixels, but its vision tower of 8"),
        (CONFIG, {"downsample_ratio": 1.0}, r"must be 0\.5, not \(0\.5, 1\.0\)"),
        (CONFIG, {"text_config": {"time_step_limit": [0.01, 0.1]}}, r"without limits, but time_step_limit .* \[0\.01"),
        (CONFIG, {"text_config": {"n_groups": 3}}, "mamba_num_heads, 4, is no multiple of n_groups, 3"),
        (CONFIG, {"text_config": {"chunk_size": 0}}, "chunk_size of its text model must be a whole number ≥ 1, not 0"),
        (CONFIG, {"text_config": {"mamba_head_dim": 1 << 40}}, "mamba_head_dim"),
        (CONFIG, {"text_config": {"layers_block_type": ["linear_attention", "attends"]}}, "cannot read"),
        (CONFIG, {"text_config": {"model_type": "llama"}}, "its parts are llama and radio|cannot read|lacks"),
    ],
)
def test_a_folder_that_cannot_be_served_is_refused(
    name: str, file: str, fields: Mapping[str, Any], reason: str, edited: Edited
) -> None:
    with pytest.raises(ModelFolderError, match=reason):
        FamilyModel.load(edited(name, file, fields))


def test_a_limit_that_transformers_applies_in_prompts_alone_is_no_reason_to_refuse(name: str, edited: Edited) -> None:
    FamilyModel.load(edited(name, CONFIG, {"text_config": {"time_step_min": 0.001}}))


def test_videos_are_refused(name: str, family_folder: Callable[[str], pathlib.Path]) -> None:
    model = FamilyModel.load(ModelFolder.open(family_folder(name)))
    with pytest.raises(UnsupportedError, match="Nemotron-H Omni takes no videos; send single images"):
        model.frame_size(64, 64, 4, None)


def test_an_image_that_the_processor_cannot_resize_is_refused(
    name: str, family_folder: Callable[[str], pathlib.Path]
) -> None:
    model = FamilyModel.load(ModelFolder.open(family_folder(name)))
    for size in ((8 * 1000, 1), (1, 8 * 1000)):
        with pytest.raises(ImageTooLargeError, match="too elongated"):
            model.image_shape(*size, ProcessorOptions())


def test_a_folder_with_the_field_names_of_published_ones_is_served(
    name: str, family_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    shutil.copytree(family_folder(name), tmp_path / name)
    path = tmp_path / name / CONFIG
    config = json.loads(path.read_text())
    for new, old in {"image_token_id": "img_context_token_id", "text_config": "llm_config"}.items():
        config[old] = config.pop(new)
    text = config["llm_config"]
    letters = {"linear_attention": "M", "moe": "E", "full_attention": "*", "mlp": "-"}
    text["hybrid_override_pattern"] = "".join(letters[each] for each in text.pop("layers_block_type"))
    path.write_text(json.dumps(config))
    folder = ModelFolder.open(tmp_path / name)
    whole = load_family(ModelFolder.open(family_folder(name)), load_pretrained(family_folder(name)))
    family = load_family(folder, load_pretrained(folder.path))
    assert (family.image_token, family.image_token_id) == (whole.image_token, whole.image_token_id)
    assert load_vision_half(folder.path, None).model.vision_model.patch_size == 8
    kinds = load_text_half(folder.path, None, "eager").config.layer_types
    assert kinds == ["linear_attention", "mlp", "full_attention", "linear_attention", "moe", "full_attention"]


def test_a_model_with_sound_is_served_without_it(name: str, tmp_path: pathlib.Path) -> None:
    sound = transformers.ParakeetEncoderConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        subsampling_conv_channels=8,
        projection_hidden_size=16,
        projection_bias=False,
    )
    path = TINY_FAMILIES[name].build(tmp_path / name, audio=sound)
    FamilyModel.load(ModelFolder.open(path))
    vision, text = load_vision_half(path, None), load_text_half(path, None, "eager")
    for half in (vision, text):
        names = [part for part, _ in half.named_parameters()]
        assert names
        assert not [part for part in names if "audio" in part]


def test_a_model_without_attention_is_refused_by_the_decoder_and_by_doctor(name: str, tmp_path: pathlib.Path) -> None:
    """transformers' own words for layers that are all Mamba2 are "math domain error"."""
    reason = "has no layer with attention, of which one is needed"
    for number, types in enumerate((["linear_attention", "mlp"], ["linear_attention", "linear_attention"])):
        path = tmp_path / f"{name}-{number}"
        shutil.copytree(TINY_FAMILIES[name].build(tmp_path / f"whole-{number}"), path)
        config = json.loads((path / CONFIG).read_text())
        config["text_config"] |= {"layers_block_type": types, "num_hidden_layers": len(types)}
        (path / CONFIG).write_text(json.dumps(config))
        assert reason in (doctor_refusal(path) or "")
        assert reason in (start_refusal(path) or "")


def test_elongated_images_are_served_where_the_bound_is_tiny(name: str, edited: Edited) -> None:
    """Their one line of patches becomes two, with more patches than the bound, as in the processor of transformers."""
    folder = edited(name, IMAGES, {"min_num_patches": 1, "max_num_patches": 16})
    model = FamilyModel.load(folder)
    image = PIL.Image.new("RGB", (8 * 16, 8))
    pixels = model.source.processor([image], return_tensors="pt")
    num_rows = int(pixels["image_grid_hw"].prod()) // 4
    assert num_rows > 16 // 4
    assert model.image_shape(*image.size, ProcessorOptions()).num_rows == num_rows
    assert model.sizing.largest.num_rows >= num_rows
