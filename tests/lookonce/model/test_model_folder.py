"""Model folders that are accepted, and the messages with which others are refused."""

from __future__ import annotations

import functools
import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from lookonce.errors import ModelFolderError
from lookonce.model.model_folder import ModelFolder
from tests import tiny_models


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Returns a valid folder; tests change copies of it."""
    return tiny_models.build_llava_clip(tmp_path_factory.mktemp("models") / "llava")


@pytest.fixture
def folder(built: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """Returns a copy of the valid folder."""
    return pathlib.Path(shutil.copytree(built, tmp_path / "llava"))


def edit(file: pathlib.Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a JSON file in place."""
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def refusal(folder: pathlib.Path) -> str:
    """Returns the message with which a folder is refused."""
    with pytest.raises(ModelFolderError) as caught:
        ModelFolder.open(folder)
    return caught.value.message


def test_a_valid_folder_is_described(folder: pathlib.Path) -> None:
    found = ModelFolder.open(folder)
    assert (found.model_type, found.architecture) == ("llava", "LlavaForConditionalGeneration")
    assert found.weight_files == (folder / "model.safetensors",)
    assert found.text_hidden_size == tiny_models.HIDDEN_SIZE
    assert found.config["image_seq_length"] == 16


def test_every_tiny_family_is_accepted(tmp_path: pathlib.Path) -> None:
    for name, build in tiny_models.BUILDERS.items():
        found = ModelFolder.open(build(tmp_path / name))
        assert found.text_hidden_size == tiny_models.HIDDEN_SIZE


def test_older_configurations_keep_the_text_models_width_at_the_top(folder: pathlib.Path) -> None:
    def flatten(config: dict[str, Any]) -> None:
        config["hidden_size"] = config.pop("text_config")["hidden_size"]

    edit(folder / "config.json", flatten)
    assert ModelFolder.open(folder).text_hidden_size == tiny_models.HIDDEN_SIZE


def test_an_omitted_width_is_absent(folder: pathlib.Path) -> None:
    edit(folder / "config.json", lambda config: config["text_config"].pop("hidden_size"))
    assert ModelFolder.open(folder).text_hidden_size is None


def test_sharded_weights_are_listed_in_order(folder: pathlib.Path) -> None:
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weights = folder / "model.safetensors"
    for name in names:
        shutil.copy(weights, folder / name)
    weights.unlink()
    index = folder / "model.safetensors.index.json"
    weight_map = {"a": names[1], "b": names[0], "c": names[1]}
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert 'add "metadata": {} to it' in refusal(folder)
    index.write_text(json.dumps({"weight_map": weight_map, "metadata": {}}))
    assert [file.name for file in ModelFolder.open(folder).weight_files] == names
    (folder / names[1]).unlink()
    assert "incomplete" in refusal(folder)
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}, "metadata": {}}))
    assert "not a safetensors file of this folder" in refusal(folder)
    index.write_text(json.dumps({}))
    assert "weight_map" in refusal(folder)


def test_a_missing_folder_or_configuration_is_refused(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert "not a folder" in refusal(tmp_path / "nowhere")
    (folder / "config.json").unlink()
    assert "config.json is missing" in refusal(folder)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_configuration_that_is_no_json_object_is_refused(folder: pathlib.Path, text: str) -> None:
    (folder / "config.json").write_text(text, encoding="latin-1")
    assert "JSON" in refusal(folder)


def test_other_model_types_are_refused_with_the_supported_ones(folder: pathlib.Path) -> None:
    edit(folder / "config.json", lambda config: config.update(model_type="mllama"))
    assert "'mllama'" in refusal(folder)
    assert "llava, llava_next" in refusal(folder)
    edit(folder / "config.json", lambda config: config.pop("model_type"))
    assert "None" in refusal(folder)


def test_another_architecture_of_a_known_type_is_refused(folder: pathlib.Path) -> None:
    edit(folder / "config.json", lambda config: config.update(architectures=["LlavaForSequenceClassification"]))
    assert "LlavaForConditionalGeneration" in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "preprocessor_config.json"])
def test_custom_code_is_refused(folder: pathlib.Path, name: str) -> None:
    edit(folder / name, lambda config: config.update(auto_map={"AutoModel": "modeling_own.OwnModel"}))
    assert "auto_map" in refusal(folder)


def test_quantized_weights_are_refused(folder: pathlib.Path) -> None:
    edit(folder / "config.json", lambda config: config.update(quantization_config={"bits": 4}))
    assert "quantized" in refusal(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_alone_are_refused(folder: pathlib.Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    assert "pickled" in refusal(folder)
    assert name in refusal(folder)


def test_a_folder_without_weights_is_refused(folder: pathlib.Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "no weights" in refusal(folder)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data + b"x",
        lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        lambda data: b"",
        lambda data: b"\x02\x00\x00\x00\x00\x00\x00\x00[]",
    ],
)
def test_incomplete_weights_are_refused(folder: pathlib.Path, damage: Callable[[bytes], bytes]) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(damage(weights.read_bytes()))
    assert "not a complete safetensors file" in refusal(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00001.safetensors"])
def test_weights_that_are_a_folder_are_refused(name: str, folder: pathlib.Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).mkdir()
    if name != "model.safetensors":
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}, "metadata": {}}))
    with pytest.raises(ModelFolderError, match=r"is no regular file|is missing, although"):
        ModelFolder.open(folder)


@pytest.mark.parametrize(
    ("part", "name", "size"),
    [
        ("text_config", "hidden_size", 1 << 31),
        ("text_config", "vocab_size", 0),
        ("text_config", "num_hidden_layers", 1_000_000),
        ("vision_config", "num_hidden_layers", 1_000_000),
        ("vision_config", "patch_size", 0),
        ("vision_config", "image_size", -1),
        ("vision_config", "num_labels", 1 << 24),
    ],
)
def test_a_size_that_no_model_has_is_told_before_memory_is_taken(
    folder: pathlib.Path, part: str, name: str, size: int
) -> None:
    edit(folder / "config.json", lambda config: config[part].update({name: size}))
    assert f"{part}.{name} must be a number from 1 to" in refusal(folder)


@pytest.mark.parametrize("token_id", [-1, 1 << 40])
def test_an_image_token_that_is_no_id_is_told(folder: pathlib.Path, token_id: int) -> None:
    edit(folder / "config.json", lambda config: config.update(image_token_index=token_id))
    assert f"image_token_index must be the id of a token, not {token_id}" in refusal(folder)


@pytest.mark.parametrize("layers", [99, -99, [-2, 99]])
def test_a_layer_that_the_tower_does_not_have_is_told(folder: pathlib.Path, layers: int | list[int]) -> None:
    edit(folder / "config.json", lambda config: config.update(vision_feature_layer=layers))
    assert "vision_feature_layer is " in refusal(folder)
    num_layers = json.loads((folder / "config.json").read_text())["vision_config"]["num_hidden_layers"]
    allowed: list[int | list[int]] = [-num_layers - 1, num_layers, [-2, 0]]
    for layer in allowed:
        edit(folder / "config.json", functools.partial(dict.update, vision_feature_layer=layer))
        ModelFolder.open(folder)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [("mllama", "attends to images apart from the text"), ("t5gemma2", "reads image and prompt together")],
)
def test_a_type_that_cannot_be_served_is_told_with_the_property(
    folder: pathlib.Path, model_type: str, reason: str
) -> None:
    edit(folder / "config.json", lambda config: config.update(model_type=model_type))
    assert reason in refusal(folder)
