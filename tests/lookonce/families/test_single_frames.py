"""Single frames: sizes and rows of each family, the text around them, and settings that are refused."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import num2words
import pytest

from lookonce.content_key import ProcessorOptions
from lookonce.errors import InvalidParameterError, UnsupportedError
from lookonce.families.single_frames import SingleFrames, timestamp
from lookonce.families.smolvlm import in_words
from lookonce.model.family_model import FamilyModel
from lookonce.model.half_model import load_vision_half
from lookonce.model.model_folder import ModelFolder
from lookonce.model.vision_fingerprint import vision_fingerprint
from tests.tiny_families import FAMILIES

# Settings that fit the tiny model of each family.
RIGHT: dict[str, dict[str, Any]] = {
    "llava_onevision": {"size": {"height": 64, "width": 64}},
    "llava_next_video": {"size": {"shortest_edge": 60}, "crop_size": {"height": 60, "width": 60}},
    "internvl": {"size": {"height": 84, "width": 84}},
    "smolvlm": {"size": {"longest_edge": 168}, "max_image_size": {"longest_edge": 56}},
    "gemma4": {"max_soft_tokens": 140},
}

Load = Callable[..., FamilyModel]


@pytest.fixture
def load(tmp_path: pathlib.Path) -> Load:
    def make(name: str, **settings: Any) -> FamilyModel:
        folder = FAMILIES[name].build(tmp_path / f"{name} {len(list(tmp_path.iterdir()))}")
        (folder / "video_preprocessor_config.json").write_text(json.dumps({**RIGHT[name], **settings}))
        return FamilyModel.load(ModelFolder.open(folder))

    return make


def videos_of(model: FamilyModel) -> SingleFrames:
    assert isinstance(model.video, SingleFrames), model.no_video_reason
    return model.video


@pytest.mark.parametrize("name", ["llava_onevision", "llava_next_video", "internvl", "smolvlm"])
def test_all_frames_have_the_towers_size(load: Load, name: str) -> None:
    model = load(name)
    video = videos_of(model)
    assert {model.frame_size(*size, 2, None) for size in ((1, 1), (4000, 30), (30, 4000), (640, 480))} == {video.unit}
    assert video.entry_shape(video.unit).num_rows == video.most_rows
    width, height = video.unit
    assert not any(video.is_frame_size(*size) for size in ((2 * width, height), (width, 0), (-width, -height), (1, 1)))


def test_a_frame_of_gemma_keeps_its_proportions(load: Load) -> None:
    model = load("gemma4")
    video = videos_of(model)
    assert video.unit == (12, 12)
    rows = {}
    for size in ((640, 480), (480, 640), (30, 30), (1000, 5), (5, 1000), (1, 1)):
        width, height = model.frame_size(*size, 2, None)
        assert width % 12 == height % 12 == 0
        rows[size] = video.entry_shape((width, height)).num_rows
        assert 0 < rows[size] == width * height // 144 <= video.most_rows == 140
    # √(140 × 3/4) = 10.2 lines and 13.7 columns.
    assert rows[640, 480] == rows[480, 640] == 130


@pytest.mark.parametrize("name", sorted(RIGHT))
def test_a_video_is_a_shape_per_frame(load: Load, name: str) -> None:
    video = videos_of(load(name))
    shapes = video.shapes(video.unit, num_frames=5, fps=0.5)
    assert len(shapes) == 5
    closing = 1 if name == "llava_onevision" else 0
    assert [shape.num_unused_rows for shape in shapes] == [closing] * 4 + [0]
    assert {shape.num_rows + shape.num_unused_rows for shape in shapes} == {video.entry_shape(video.unit).num_rows}


def test_a_number_alone_is_the_side_of_what_is_cut_out(load: Load) -> None:
    assert videos_of(load("llava_next_video", crop_size=60)).unit == (60, 60)


def test_smolvlm_says_how_long_a_video_is(load: Load) -> None:
    video = videos_of(load("smolvlm"))
    shapes = video.shapes(video.unit, num_frames=31, fps=0.25)
    (intro, _, after), (before, _, _), (last, _, outro) = shapes[0].parts, shapes[1].parts, shapes[-1].parts
    assert str(intro).startswith("You are provided the following series of thirty-one frames from a 0:02:04 [H:MM:SS]")
    assert str(intro).endswith("\nFrame from 00:00:<fake_token_around_image><global-img>")
    assert str(before).startswith("\nFrame from 00:04:")
    assert str(last).startswith("\nFrame from 02:00:")
    assert outro == f"{after}\n\n"


def test_numbers_in_words_are_those_of_the_library() -> None:
    numbers = [*range(3000), *range(3000, 999_999, 617), 100_000, 999_999]
    assert [in_words(number) for number in numbers] == [num2words.num2words(number) for number in numbers]


def test_times_are_minutes_and_seconds() -> None:
    assert [timestamp(*one) for one in ((0, 2.0), (119, 1.0), (1, 0.001), (7, 3.0))] == [
        "00:00",
        "01:59",
        "16:40",
        "00:02",
    ]


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("llava_onevision", {"size": {"height": 80, "width": 64}}, "the tower sees squares of 64 pixels"),
        ("llava_onevision", {"size": {"shortest_edge": 64}}, "the tower sees squares of 64 pixels"),
        ("llava_onevision", {"size": 64}, "size is 64 for videos, and the tower sees squares of 64 pixels"),
        ("internvl", {"size": 84}, "the tower sees squares of 84 pixels"),
        ("llava_onevision", {"do_rescale": False}, "do_rescale is switched off"),
        ("llava_next_video", {"do_center_crop": False}, "the tower sees squares of 60 pixels"),
        ("llava_next_video", {"crop_size": {"height": 30, "width": 30}}, "crop_size"),
        ("internvl", {"size": {"height": 42, "width": 42}}, "squares of 84 pixels"),
        ("smolvlm", {"max_image_size": {"longest_edge": 112}}, "squares of 56 pixels"),
        ("smolvlm", {"max_image_size": 56}, "TypeError"),
        ("gemma4", {"max_soft_tokens": 71}, "max_soft_tokens is 71"),
        ("gemma4", {"patch_size": 8}, "patch_size is 8 for videos, but 4 for images"),
    ],
)
def test_settings_that_the_tower_cannot_take_leave_the_folder_without_videos(
    load: Load, name: str, settings: dict[str, Any], reason: str
) -> None:
    model = load(name, **settings)
    assert model.video is None
    with pytest.raises(UnsupportedError, match=f"video processor does not fit.*{reason}"):
        model.frame_size(100, 100, 4, None)
    assert model.image_shape(100, 100, ProcessorOptions()).num_rows


@pytest.mark.parametrize(
    ("size", "sampling", "longest"),
    [(500, 400, 500), (None, 400, 400), (None, None, 1456)],
    ids=["both", "old", "none"],
)
def test_old_folders_of_smolvlm_have_the_size_of_frames_elsewhere(
    load: Load, size: int | None, sampling: int | None, longest: int
) -> None:
    """The rule of transformers' video processor."""
    settings: dict[str, Any] = {"size": size and {"longest_edge": size}}
    if sampling:
        settings["video_sampling"] = {"video_size": {"longest_edge": sampling}, "fps": 1, "max_frames": 8}
    assert videos_of(load("smolvlm", **settings)).arguments["size"] == {"longest_edge": longest}


@pytest.mark.parametrize("name", sorted(RIGHT))
def test_a_bound_of_pixels_is_refused(load: Load, name: str) -> None:
    with pytest.raises(InvalidParameterError, match="does not support this option"):
        load(name).frame_size(640, 480, 2, 100_000)


def test_settings_of_frames_change_the_fingerprint(load: Load) -> None:
    prints = set()
    for settings in ({}, {"image_mean": [0.1, 0.1, 0.1]}, {"resample": 2}):
        model = load("llava_onevision", **settings)
        folder = ModelFolder.open(pathlib.Path(model.source.config._name_or_path))
        prints.add(vision_fingerprint(folder, load_vision_half(folder.path, None), model))
    assert len(prints) == 3
