"""Videos are split into pairs of frames; bytes and digests are kept apart, and wrong sizes refused by name."""

from __future__ import annotations

import json
import pathlib

import pytest

from decoder_svc.prompt.prompt_spec import CachedImage, ImageSource, InlineImage, VideoFrame, VideoSource
from decoder_svc.prompt.video_frames import SplitVideo, VideoSplitter, check_sizes
from decoder_svc.service import LoadedText
from lookonce.content_key import ImageDigest, ProcessorOptions, image_digest, pair_digest
from lookonce.errors import (
    DigestMismatchError,
    FingerprintMismatchError,
    ImageUndecodableError,
    InvalidParameterError,
    LookonceError,
    UnsupportedError,
    located_in_image,
)
from lookonce.image_file import FramePair
from lookonce.media.image_header import ImageLimits, probe_image
from tests import image_files, tiny_models
from tests.decoder_svc.conftest import loaded

LIMITS = ImageLimits(max_bytes=200_000, max_pixels=1_000_000, max_aspect=50)
WIDTH, HEIGHT = 80, 60
FRAMES = [image_files.encoded(image_files.noise(seed, WIDTH, HEIGHT)) for seed in range(4)]
DIGESTS = [image_digest(frame) for frame in FRAMES]


@pytest.fixture(scope="module")
def splitter(tmp_path_factory: pytest.TempPathFactory) -> VideoSplitter:
    folder: pathlib.Path = tmp_path_factory.mktemp("video") / "qwen2_vl"
    tiny_models.BUILDERS["qwen2_vl"](folder)
    settings = {
        "size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 64 * 28 * 28},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "temporal_patch_size": 2,
    }
    (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))
    return VideoSplitter(loaded(folder).family, LIMITS)


def by_bytes(*numbers: int) -> list[VideoFrame]:
    return [VideoFrame(FRAMES[number]) for number in numbers]


def by_digest(*numbers: int, fingerprint: str | None = None) -> list[VideoFrame]:
    return [VideoFrame(None, DIGESTS[number], fingerprint) for number in numbers]


def video(frames: list[VideoFrame], size: tuple[int, int] | None = None, max_pixels: int | None = None) -> VideoSource:
    return VideoSource(tuple(frames), 2.0, max_pixels, size)


def digest_of(source: ImageSource) -> ImageDigest:
    if isinstance(source, CachedImage):
        return source.digest
    assert source.facts is not None
    return source.facts.digest


def split_all(splitter: VideoSplitter, visuals: list[ImageSource | VideoSource]) -> list[SplitVideo]:
    """Reads all frames and splits the videos, as a decoder does."""
    facts = []
    for index, frame in splitter.frames_of(visuals):
        with located_in_image(index):
            facts.append(None if frame.data is None else splitter.read(frame.data))
    return splitter.split_all(visuals, facts)


def split_one(splitter: VideoSplitter, source: VideoSource) -> SplitVideo:
    """Splits the only video of a prompt."""
    (video,) = split_all(splitter, [source])
    return video


def test_frames_become_pairs_and_an_odd_last_one_is_alone(splitter: VideoSplitter) -> None:
    split = split_one(splitter, video(by_bytes(0, 1, 2)))
    pairs = [source.data for source in split.sources if isinstance(source, InlineImage)]
    assert pairs == [FramePair(FRAMES[0], FRAMES[1]), FramePair(FRAMES[2], None)]
    assert len(split.layouts) == 2
    # All pairs are resized to one size, as their layouts are for it.
    (frame_size,) = {source.options.frame_size for source in split.sources}
    assert frame_size is not None
    assert len({layout.num_rows for layout in split.layouts}) == 1


def test_fewer_pixels_give_fewer_rows(splitter: VideoSplitter) -> None:
    large, small = (split_one(splitter, video(by_bytes(0, 1), max_pixels=pixels)) for pixels in (None, 4 * 28 * 28))
    assert small.layouts[0].num_rows < large.layouts[0].num_rows


def test_a_pair_with_a_frame_by_digest_is_looked_up(splitter: VideoSplitter) -> None:
    frames = [*by_bytes(0), *by_digest(1, 2, fingerprint="f")]
    split = split_one(splitter, video(frames, (WIDTH, HEIGHT)))
    assert [type(source) for source in split.sources] == [CachedImage, CachedImage]
    expected = [pair_digest(DIGESTS[0], DIGESTS[1]), pair_digest(DIGESTS[2], DIGESTS[2])]
    assert [digest_of(source) for source in split.sources] == expected
    assert [source.fingerprint for source in split.sources if isinstance(source, CachedImage)] == ["f", "f"]


@pytest.mark.parametrize("stated", [(None, None), (None, 1), (0, 1)])
def test_a_pair_has_the_digest_of_its_bytes_and_the_pixels_of_the_frame_that_costs_more(
    splitter: VideoSplitter, stated: tuple[int | None, int | None]
) -> None:
    costly = image_files.jpeg_of_many_scans(WIDTH, HEIGHT, 100)
    files = [FRAMES[0], costly]
    digests = [None if which is None else image_digest(files[which]) for which in stated]
    (source,) = split_one(splitter, video([*map(VideoFrame, files, digests)])).sources
    assert digest_of(source) == pair_digest(*map(image_digest, files))
    assert isinstance(source, InlineImage)
    assert source.facts is not None
    assert source.facts.header.num_pixels == probe_image(costly, LIMITS).num_pixels > WIDTH * HEIGHT


OTHER_SIZE = image_files.encoded(image_files.noise(9, WIDTH + 1, HEIGHT))


@pytest.mark.parametrize(
    ("source", "error", "reason"),
    [
        (video([*by_bytes(0), VideoFrame(OTHER_SIZE)]), InvalidParameterError, "frames"),
        (video([*by_bytes(0), *by_digest(1)]), InvalidParameterError, "size.*is required"),
        (video(by_bytes(0, 1), (HEIGHT, WIDTH)), InvalidParameterError, "size.*60×80"),
        (video([*by_bytes(0), VideoFrame(b"no image")]), ImageUndecodableError, "image"),
        (
            video([*by_digest(0, fingerprint="f"), *by_digest(1, fingerprint="g")], (WIDTH, HEIGHT)),
            FingerprintMismatchError,
            "two frames name different",
        ),
        (
            video([VideoFrame(FRAMES[0], DIGESTS[1]), *by_digest(1)], (WIDTH, HEIGHT)),
            DigestMismatchError,
            "expected_digest",
        ),
    ],
    ids=["two sizes", "no size", "wrong size", "no image", "two encoders", "wrong digest"],
)
def test_a_wrong_video_is_refused(
    splitter: VideoSplitter, source: VideoSource, error: type[LookonceError], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        split_one(splitter, source)


def test_an_error_names_the_pair_among_the_prompts_images_and_the_video(splitter: VideoSplitter) -> None:
    image = InlineImage(FRAMES[0], ProcessorOptions())
    broken = video([*by_bytes(0, 1, 2), VideoFrame(b"no image")])
    with pytest.raises(ImageUndecodableError) as undecodable:
        split_all(splitter, [image, video(by_bytes(0, 1)), broken])
    # The image, one pair of the first video, one good pair of the second.
    assert undecodable.value.metadata["index"] == "3"
    with pytest.raises(InvalidParameterError) as wrong_size:
        split_all(splitter, [image, video(by_bytes(0, 1)), video(by_bytes(0, 1), (1, 1))])
    assert wrong_size.value.field == "videos[1].size"


def test_a_model_without_videos_refuses_them(llava_text: LoadedText) -> None:
    with pytest.raises(UnsupportedError, match="send single images"):
        split_one(VideoSplitter(llava_text.family, LIMITS), video(by_bytes(0, 1)))


def test_the_size_of_each_video_is_compared_with_that_of_its_own_cached_frames(splitter: VideoSplitter) -> None:
    other = video(by_digest(0, 1), (WIDTH + 1, HEIGHT))
    videos = split_all(splitter, [video(by_bytes(0, 1, 2)), other])
    size = (WIDTH, HEIGHT)
    check_sizes(videos, [size, size, (WIDTH + 1, HEIGHT)])
    with pytest.raises(InvalidParameterError, match=r"is 81×60, but the frames have 80×60 pixels") as wrong:
        check_sizes(videos, [size, size, size])
    assert wrong.value.field == "videos[1].size"
