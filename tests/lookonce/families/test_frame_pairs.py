"""Pairs of frames: valid frame sizes, the expansion of each pair, and settings that are refused."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

import pytest

from lookonce.families.base import FamilySource, FramePlace, PairRule
from lookonce.families.frame_pairs import FramePairs, PairSettings, even_share

FACTOR = 28
PROCESSOR = types.SimpleNamespace(patch_size=14, merge_size=2, temporal_patch_size=2)
SETTINGS = {"size": {"shortest_edge": 4 * FACTOR**2, "longest_edge": 24 * FACTOR**2}, "max_video_tokens": 100}
RULE = PairRule(
    defaults=SETTINGS,
    frame_size=lambda settings, width, height, num_frames, most: (2 * FACTOR, 3 * FACTOR),
    bounded_frames=lambda num_frames: num_frames,
)


def source(video: dict[str, Any] | None = None, **config: Any) -> FamilySource:
    return FamilySource(types.SimpleNamespace(**{"video_token_id": 7, **config}), PROCESSOR, {}, {}, video or {})


def model(rule: PairRule = RULE, **video: Any) -> FramePairs:
    loaded = FramePairs.load(source(video), rule)
    assert loaded is not None
    return loaded


def test_a_folder_without_a_video_token_has_no_videos() -> None:
    assert FramePairs.load(source(video_token_id=None), RULE) is None


def test_a_frame_size_is_whole_rows_and_at_most_the_largest_pair() -> None:
    videos = model()
    assert videos.is_frame_size(3 * FACTOR, 2 * FACTOR)
    assert not videos.is_frame_size(3 * FACTOR + 1, 2 * FACTOR)
    assert not videos.is_frame_size(0, 2 * FACTOR)
    assert not videos.is_frame_size(-3 * FACTOR, -2 * FACTOR)
    assert videos.is_frame_size(videos.most_rows * FACTOR, FACTOR)
    assert not videos.is_frame_size((videos.most_rows + 1) * FACTOR, FACTOR)


def test_a_video_is_one_expansion_per_pair_and_the_last_pair_may_be_half_full() -> None:
    shapes = model().shapes((3 * FACTOR, 2 * FACTOR), num_frames=5, fps=2.0)
    assert [shape.num_rows for shape in shapes] == [6, 6, 6]
    assert {shape.grid for shape in shapes} == {(1, 2, 3)}
    assert {shape.place for shape in shapes} == {None}, "without a time axis a pair is positioned like an image"


def test_text_around_a_pair_tells_the_time_between_its_frames() -> None:
    rule = replace(RULE, surrounding_text=lambda seconds: (f"<{seconds:.2f}>", ""))
    shapes = model(rule).shapes((FACTOR, FACTOR), num_frames=3, fps=2.0)
    assert [shape.parts for shape in shapes] == [("<0.25>", 1), ("<1.00>", 1)]


def test_a_rule_with_a_time_axis_places_each_pair_on_it() -> None:
    rule = replace(RULE, time_steps=lambda _config, seconds: 3 * seconds)
    shapes = model(rule).shapes((FACTOR, FACTOR), num_frames=6, fps=4.0)
    assert [shape.place for shape in shapes] == [FramePlace(0, 0), FramePlace(1, 1), FramePlace(2, 3)]


@pytest.mark.parametrize("ticks", [0.0, 1e9])
def test_time_steps_out_of_range_are_refused(ticks: float) -> None:
    with pytest.raises(ValueError, match="time steps"):
        FramePairs.load(source(), replace(RULE, time_steps=lambda _config, _seconds: ticks))


@pytest.mark.parametrize(
    ("video", "reason"),
    [
        ({"do_resize": False}, "do_resize is switched off"),
        ({"do_normalize": False}, "do_normalize is switched off"),
        ({"patch_size": 16}, "patch_size is 16 for videos, but 14 for images"),
        ({"temporal_patch_size": 1}, "temporal_patch_size is 1"),
        ({"min_pixels": 500, "max_pixels": 400}, "500 to 400"),
        ({"size": {"shortest_edge": 0, "longest_edge": 400}}, "0 to 400"),
    ],
)
def test_settings_that_do_not_fit_are_refused(video: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        FramePairs.load(source(video), RULE)


def test_the_folders_settings_win_over_the_familys_and_null_means_unset() -> None:
    assert model(max_pixels=9 * FACTOR**2, min_pixels=None).settings == PairSettings(
        least_pixels=4 * FACTOR**2,
        most_pixels=9 * FACTOR**2,
        factor=FACTOR,
        has_frame_cap=False,
        max_video_tokens=100,
        frame_cap=None,
        pixels={},
    )


def test_the_largest_pair_is_bounded_by_the_cap_of_a_frame() -> None:
    def capped(num_rows: int | None) -> FramePairs:
        cap = None if num_rows is None else num_rows * FACTOR**2
        return model(replace(RULE, frame_cap=lambda _source: cap), max_pixels=2000 * FACTOR**2)

    assert [capped(num_rows).most_rows for num_rows in (None, 500, 3000)] == [1000, 500, 1000]


def test_a_pair_may_have_the_time_of_its_first_frame() -> None:
    rule = replace(RULE, surrounding_text=lambda seconds: ("", f"<{seconds:.2f}>"), timed_frame=lambda first, _: first)
    shapes = model(rule).shapes((FACTOR, FACTOR), num_frames=3, fps=4.0)
    assert [shape.parts for shape in shapes] == [(1, "<0.00>"), (1, "<0.50>")]


def test_the_share_of_a_frame_is_never_below_the_least() -> None:
    settings = model().settings
    assert even_share(settings, 10**6) == 10**6
    assert even_share(settings, 1) == int(settings.least_pixels * 1.05)


def test_the_least_pixels_of_a_frame_are_its_share_but_at_least_one_row() -> None:
    videos = model()
    assert videos.least_pixels(2) == 2 * FACTOR**2
    assert videos.least_pixels(40) == FACTOR**2
