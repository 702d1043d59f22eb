"""Frame sizes, rows and times of videos, compared with the video processors of transformers."""

from __future__ import annotations

import json
import pathlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize as smart_resize_of_glm
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as smart_resize_of_all

from encoder_svc.vision.vision_model import VisionModel
from lookonce.content_key import ProcessorOptions
from lookonce.errors import ImageTooLargeError, InvalidParameterError, ModelFolderError, UnsupportedError
from lookonce.families.frame_pairs import FramePairs
from lookonce.images import ImageRef
from lookonce.model.family_model import FamilyModel
from lookonce.model.half_model import load_vision_half
from lookonce.model.model_folder import ModelFolder
from lookonce.model.vision_fingerprint import vision_fingerprint
from lookonce.videos import Video
from tests.encoder_svc.conftest import encoder_settings
from tests.tiny_families import FAMILIES

SETTINGS = {"size": {"shortest_edge": 4000, "longest_edge": 90_000}}
_draw = random.Random(8)
SIZES = [(_draw.randint(5, 900), _draw.randint(5, 900), _draw.randint(2, 40)) for _ in range(60)]

Folder = Callable[..., pathlib.Path]


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> Folder:
    def make(name: str = "qwen2_5_vl", **settings: Any) -> pathlib.Path:
        path: pathlib.Path = FAMILIES[name].build(tmp_path / f"{name} {len(list(tmp_path.iterdir()))}")
        (path / "video_preprocessor_config.json").write_text(json.dumps({**SETTINGS, **settings}))
        return path

    return make


def model_of(path: pathlib.Path) -> FamilyModel:
    return FamilyModel.load(ModelFolder.open(path))


def videos_of(path: pathlib.Path) -> FramePairs:
    video = model_of(path).video
    assert isinstance(video, FramePairs)
    return video


def bounded_each(width: int, height: int, num_frames: int, max_tokens: int | None) -> tuple[int, int]:
    """Returns height and width for a family that bounds each frame; `max_tokens` is the bound of a video."""
    most = 90_000
    if max_tokens is not None:
        most = max(min(most, int(max_tokens * 28 * 28 * 0.9) * 2 // num_frames), int(4000 * 1.05))
    return tuple(smart_resize(height, width, 28, 4000, most))


def bounded_together(width: int, height: int, num_frames: int, max_tokens: int | None) -> tuple[int, int]:
    """Returns height and width for a family that bounds all frames together; `max_tokens` is the bound of a frame."""
    most = 90_000
    if max_tokens is not None:
        most = num_frames * max(min(max_tokens * 32 * 32, 90_000 // num_frames), int(4000 * 1.05))
    return tuple(smart_resize_of_all(num_frames, height, width, 2, 32, 4000, most))


@pytest.mark.parametrize("has_cap", [False, True])
@pytest.mark.parametrize(
    ("name", "expected", "max_tokens"), [("qwen2_5_vl", bounded_each, 500), ("qwen3_vl", bounded_together, 6)]
)
def test_frames_are_sized_as_the_familys_video_processor_sizes_them(
    folder: Folder, name: str, expected: Callable[..., tuple[int, int]], max_tokens: int, has_cap: bool
) -> None:
    video = videos_of(folder(name, cap_pixels_per_frame=has_cap, max_video_tokens=max_tokens))
    found = [video.frame_size(*size, None) for size in SIZES]
    assert found == [expected(*size, max_tokens if has_cap else None)[::-1] for size in SIZES]
    assert all(video.is_frame_size(*size) for size in found)
    assert len(set(found)) > 10


def test_a_frame_of_glm_has_no_more_pixels_than_an_image(folder: Folder) -> None:
    model = model_of(folder("glm4v"))
    assert isinstance(model.video, FramePairs)
    most = model.source.processor.size.longest_edge // 2
    assert model.video.settings.frame_cap == most < model.video.settings.most_pixels // 2
    for width, height, num_frames in ((5000, 4000, 2), (5000, 4000, 3), (4000, 5000, 9)):
        found = model.video.frame_size(width, height, num_frames, None)
        assert found[0] * found[1] <= most
        assert model.video.is_frame_size(*found)
    small = model.video.frame_size(120, 80, 2, None)
    height, width = smart_resize_of_glm(2, 80, 120, 2, 28, 4000, 90_000)
    assert small == (width, height), "its own bounds count below that"


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_no_pair_has_more_rows_than_the_largest(folder: Folder, name: str) -> None:
    """Tries thin, long and short videos, because the memory reserved for one pair depends on this bound."""
    model = model_of(folder(name))
    assert model.video is not None
    sizes = [*SIZES, (2000, 10, 2), (10, 2000, 2), (2000, 10, 64), (300, 300, 2), (200_000, 1000, 2)]
    rows = [model.video.entry_shape(model.frame_size(*size, None)).num_rows for size in sizes]
    assert max(rows) <= model.video.most_rows <= model.most_rows
    assert max(rows) > model.video.most_rows * 0.8


def test_a_bound_makes_frames_smaller_and_may_not_be_below_their_least_size(folder: Folder) -> None:
    for name in ("qwen2_5_vl", "qwen3_vl"):
        model = model_of(folder(name))
        free, bounded = (model.frame_size(400, 300, 4, bound) for bound in (None, 8000))
        assert bounded[0] * bounded[1] <= 8000 < free[0] * free[1]
        assert model.frame_size(400, 300, 4, 10**9) == free, "the model's own bound stays"
        with pytest.raises(InvalidParameterError, match="max_pixels"):
            model.frame_size(400, 300, 4, 700)
        with pytest.raises(ImageTooLargeError, match="elongated"):
            model.frame_size(5000, 10, 4, None)


def test_settings_come_from_the_file_that_transformers_would_read(folder: Folder) -> None:
    path = folder()
    assert videos_of(path).settings.most_pixels == 90_000
    (path / "video_preprocessor_config.json").unlink()
    images = json.loads((path / "preprocessor_config.json").read_text())
    # Older folders have one file for images and videos.
    (path / "preprocessor_config.json").write_text(json.dumps({**images, "min_pixels": 3136, "max_pixels": 50_000}))
    assert (videos_of(path).settings.least_pixels, videos_of(path).settings.most_pixels) == (3136, 50_000)
    nested = {"image_processor": images, "video_processor": {"size": {"shortest_edge": 784, "longest_edge": 7840}}}
    (path / "processor_config.json").write_text(json.dumps(nested))
    assert videos_of(path).settings.most_pixels == 7840


@pytest.mark.parametrize(
    "wrong",
    [
        {"patch_size": 16},
        {"temporal_patch_size": 4},
        {"size": {"longest_edge": "many"}},
        {"size": {"shortest_edge": 5000, "longest_edge": 4000}},
        {"do_normalize": False},
    ],
)
def test_with_a_video_processor_that_does_not_fit_images_are_served_and_videos_are_not(
    folder: Folder, wrong: dict[str, Any]
) -> None:
    model = model_of(folder("qwen2_5_vl", **wrong))
    assert model.video is None
    with pytest.raises(UnsupportedError, match="video processor does not fit"):
        model.frame_size(100, 100, 4, None)
    assert model.image_shape(100, 100, ProcessorOptions()).num_rows


def test_a_setting_of_null_counts_as_absent(folder: Folder) -> None:
    assert videos_of(folder(patch_size=None, max_video_tokens=None, image_mean=None)).settings.pixels["image_mean"]


def test_frames_that_must_grow_are_no_larger_than_the_largest_pair(folder: Folder) -> None:
    """If the lower bound equals the upper bound, both sides are rounded up."""
    video = videos_of(folder("qwen2_5_vl", size={"shortest_edge": 90_000, "longest_edge": 90_000}))
    sizes = [video.frame_size(width, height, num_frames, None) for width, height, num_frames in SIZES]
    assert all(video.is_frame_size(*size) for size in sizes)
    assert max(width * height for width, height in sizes) > 90_000


def test_a_bound_holds_for_odd_numbers_of_frames_too(folder: Folder) -> None:
    """The processor counts 5 frames as 4 when it compares them with its bound for all frames."""
    video = videos_of(folder("qwen3_vl", size={"shortest_edge": 4096, "longest_edge": 25_000_000}))
    for num_frames in range(2, 20):
        width, height = video.frame_size(1270, 635, num_frames, 655_523)
        assert width * height <= 655_523


def test_times_are_those_that_transformers_computes_in_single_precision(folder: Folder) -> None:
    video = videos_of(folder())
    tokens_per_second = ModelFolder.open(folder()).config["vision_config"].get("tokens_per_second", 4)
    for hundredths in range(1, 3001, 3):
        seconds = torch.tensor(2 / (hundredths / 100), dtype=torch.float32)
        expected = (torch.arange(40) * (tokens_per_second * seconds)).long().tolist()
        shapes = video.shapes((28, 28), 80, hundredths / 100)
        assert [shape.place.time for shape in shapes if shape.place is not None] == expected


def test_a_folder_that_names_no_video_token_takes_no_videos(folder: Folder) -> None:
    path = folder("paddleocr_vl")
    model = model_of(path)
    assert model.video is None
    with pytest.raises(UnsupportedError, match="takes no videos"):
        model.frame_size(100, 100, 4, None)
    with pytest.raises(InvalidParameterError, match="takes no videos"):
        model.check_options(ProcessorOptions(frame_size=(28, 28)))


def test_a_setting_that_changes_pixels_changes_the_fingerprint(folder: Folder) -> None:
    def fingerprint(path: pathlib.Path) -> str:
        opened = ModelFolder.open(path)
        return vision_fingerprint(opened, load_vision_half(path, None), FamilyModel.load(opened))

    path = folder()
    before = fingerprint(path)
    (path / "video_preprocessor_config.json").write_text(json.dumps({**SETTINGS, "image_mean": [0.1, 0.2, 0.3]}))
    assert fingerprint(path) != before
    other_size = {"size": {"shortest_edge": 4000, "longest_edge": 80_000}}
    (path / "video_preprocessor_config.json").write_text(json.dumps(other_size))
    assert fingerprint(path) == before, "sizes are part of each pair's key"


@pytest.mark.parametrize(
    ("fps", "times"),
    [(0.5, [0, 8, 16]), (2.0, [0, 2, 4]), (8.0, [0, 0, 1]), (29.97, [0, 0, 0])],
)
def test_real_time_is_counted_in_whole_steps(folder: Folder, fps: float, times: list[int]) -> None:
    """This family has two steps a second and two frames a pair, so a pair at 8 frames a second is half a step."""
    path = folder()
    config = json.loads((path / "config.json").read_text())
    config["vision_config"]["tokens_per_second"] = 2
    (path / "config.json").write_text(json.dumps(config))
    shapes = videos_of(path).shapes((56, 56), 6, fps)
    assert [shape.place.time for shape in shapes if shape.place is not None] == times


def test_times_in_words_are_those_between_the_two_frames(folder: Folder) -> None:
    shapes = videos_of(folder("qwen3_vl")).shapes((64, 32), 5, 2.0)
    said = [str(shape.parts[0]).partition("<|")[0] for shape in shapes]
    assert said == ["<0.2 seconds>", "<1.2 seconds>", "<2.0 seconds>"]
    assert [shape.place for shape in shapes] == [None, None, None]


def test_the_sdk_refuses_invalid_videos() -> None:
    one, known = ImageRef.from_bytes(b"file"), ImageRef.from_digest(bytes(32))
    for frames, size in (([one], None), ([one, known], None), ([one, ImageRef.from_bytes(b"x", max_pixels=5)], None)):
        with pytest.raises(InvalidParameterError):
            Video.from_frames(frames, size=size)
    assert Video.from_frames([one, known, known], size=(5, 5)).num_pairs == 2


def test_an_encoder_tries_a_pair_of_frames_before_it_serves(folder: Folder) -> None:
    VisionModel.load(encoder_settings(folder()).vision).warm_up()
    model = VisionModel.load(encoder_settings(folder(image_mean=[0.5, 0.5])).vision)
    with pytest.raises(ModelFolderError, match="does not fit"):
        model.warm_up()
