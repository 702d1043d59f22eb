"""Videos over gRPC and Redis: pairs of frames are encoded once for all decoders, and known by digest afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import PIL.Image
import pytest

from lookonce.aio import AsyncClient
from lookonce.client import Client
from lookonce.common.v1 import common_pb2
from lookonce.content_key import image_digest
from lookonce.decoder.v1 import decoder_service_pb2 as pb
from lookonce.encoder.v1 import encoder_service_pb2 as encoder_pb2
from lookonce.errors import EmbeddingNotCachedError, FingerprintMismatchError, InvalidInputError, UnsupportedError
from lookonce.generation import Message
from lookonce.images import ImageRef
from lookonce.local.local_stack import LocalStack
from lookonce.sdk.connection.channel import Deadline
from lookonce.videos import Video
from tests.conftest import REPOSITORY
from tests.e2e.served_videos import MAX_FRAMES, Served, answer, said, served_videos
from tests.lookonce.command import run_here
from tests.parity import videos
from tests.parity.pair_videos import PairModel
from tests.tiny_families import FAMILIES


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PairModel:
    return PairModel(FAMILIES[request.param], tmp_path_factory.mktemp("videos") / request.param)


@pytest.fixture(scope="module")
def served(model: PairModel) -> Iterator[Served]:
    with served_videos(model) as running:
        yield running


async def test_answers_are_those_of_generate_and_each_pair_is_encoded_once(served: Served) -> None:
    expected = [chat.expected for chat in served.chats]
    (target,) = served.stack.decoder_targets
    for _ in ("cold", "cached"):
        answers = await asyncio.gather(*(answer(target, said(chat.parts)) for chat in served.chats))
        assert [list(one.token_ids) for one in answers] == expected
    again = await asyncio.gather(*(answer(target, said(chat.parts, by_digest=True)) for chat in served.chats))
    assert [list(one.token_ids) for one in again] == expected, "frames by digest, since their size is stated"
    assert served.num_encodes == served.num_entries
    assert all(one.usage.encoded_image_tokens == 0 for one in again)


def test_bytes_travel_when_the_server_lacks_a_pair(served: Served) -> None:
    """The SDK asks by digest first where it may."""
    num_before = served.num_encodes
    files = [videos.png(frame) + bytes(80_000) for frame in videos.frames(31, 4)]
    with Client.connect(served.stack.decoder_targets[0]) as client:
        for num_encodes in (2, 2):
            video = Video.from_frames(files, size=(80, 60))
            client.generate([Message("user", [video, "what"])], max_tokens=1)
            assert served.num_encodes == num_before + num_encodes
        # The same frames in other pairs are other entries.
        client.generate([Message("user", [Video.from_frames(files[1:3], size=(80, 60)), "what"])], max_tokens=1)
        assert served.num_encodes == num_before + 3
        refs = [ImageRef.from_digest(image_digest(file)) for file in (*files, *files[:1])]
        known = Message("user", [Video.from_frames(refs, size=(80, 60)), "what"])
        with pytest.raises(EmbeddingNotCachedError) as missing:
            client.generate([known], max_tokens=1)
        assert missing.value.indexes == (2,), "the odd frame's pair with itself was never encoded"


def test_the_command_shows_a_folder_of_frames(served: Served, tmp_path: pathlib.Path) -> None:
    frames = videos.frames(51, 12, 80, 60)
    for number, frame in enumerate(frames):
        # By their names as texts, 10 and 11 would come before 2.
        frame.save(tmp_path / f"{number}.png")
    (target,) = served.stack.decoder_targets
    asked = ["generate", "what", "--video", str(tmp_path), "--json", "--temperature", "0", "--max-tokens", "4"]
    first = run_here(os.environ, *asked, "--target", target)
    assert first.returncode == 0, first.stderr
    with Client.connect(target) as client:
        video = Video.from_frames([videos.png(frame) for frame in frames])
        expected = client.generate([Message("user", [video, "what"])], temperature=0.0, max_tokens=4)
    found = json.loads(first.stdout)
    assert found["token_ids"] == list(expected.token_ids)
    assert found["num_video_frames"] == 12
    assert found["usage"]["image_tokens"] == expected.usage.image_tokens == found["usage"]["encoded_image_tokens"]
    assert expected.usage.encoded_image_tokens == 0


def test_the_example_of_the_sdks_page_runs(served: Served, tmp_path: pathlib.Path) -> None:
    for number, frame in enumerate(videos.frames(41, 4, 640, 480)):
        frame.save(tmp_path / f"{number}.png")
    page = (REPOSITORY / "docs/sdk.md").read_text()
    (example,) = re.findall(r"<!-- run by tests/e2e/test_videos.py -->\n```python\n(.*?)```", page, re.DOTALL)
    code = example.replace("127.0.0.1:50051", served.stack.decoder_targets[0])
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert process.returncode == 0, process.stderr
    assert re.search(r"[1-9]\d* rows encoded\n$", process.stdout)


def wrong_videos(square: int) -> dict[str, tuple[pb.VideoSource, str]]:
    """Maps each mistake to a video that has it and to a part of the refusal's text."""
    one, other = (common_pb2.ImageSource(data=videos.png(frame)) for frame in videos.frames(1, 2))
    larger = common_pb2.ImageSource(data=videos.png(videos.frames(1, 1, 100, 60)[0]))
    known = common_pb2.ImageSource(key=common_pb2.ContentKey(digest=bytes(32)))
    elsewhere = common_pb2.ImageSource(key=common_pb2.ContentKey(digest=bytes(32), encoder_fingerprint="0" * 64))
    known.key.encoder_fingerprint = "1" * 64
    size, right = common_pb2.PixelSize(width=80, height=61), common_pb2.PixelSize(width=80, height=60)
    mistaken = common_pb2.ImageSource(data=one.data, expected_digest=bytes(32))
    bounded = common_pb2.ImageSource(data=one.data, max_pixels=1000)
    paired = common_pb2.ImageSource(data=one.data, second_frame=one.data)
    thin = common_pb2.ImageSource(data=videos.png(PIL.Image.new("RGB", (2010, 10))))
    return {
        "one frame": (pb.VideoSource(frames=[one]), "at least 2"),
        "no speed": (pb.VideoSource(frames=[one, other], fps=0), "fps"),
        "no number": (pb.VideoSource(frames=[one, other], fps=float("nan")), "fps"),
        "as good as none": (pb.VideoSource(frames=[one, other, one], fps=1e-30), "0.001"),
        "too slow": (pb.VideoSource(frames=[one, other], fps=0.0009), "0.001"),
        "another digest beside a key": (pb.VideoSource(frames=[mistaken, known], size=right), "expected_digest"),
        "two encoders": (pb.VideoSource(frames=[known, elsewhere], size=right), "encoder fingerprints"),
        "too fast": (pb.VideoSource(frames=[one, other], fps=1001), "0.001 … 1000"),
        "two sizes": (pb.VideoSource(frames=[one, other, larger]), "80×60 and 100×60"),
        "another size than stated": (pb.VideoSource(frames=[one, other], size=size), "is 80×61"),
        "no size": (pb.VideoSource(frames=[one, known]), "size"),
        "empty size": (pb.VideoSource(frames=[one, other], size=common_pb2.PixelSize(width=80)), "80 × 0"),
        "too few pixels": (pb.VideoSource(frames=[one, other], max_pixels=square - 1), "at least"),
        "no pixels": (pb.VideoSource(frames=[one, other], max_pixels=0), "at least 1"),
        "another digest": (pb.VideoSource(frames=[one, mistaken]), "expected_digest"),
        "no picture": (pb.VideoSource(frames=[one, common_pb2.ImageSource(data=b"no picture")]), "not an image"),
        "empty frame": (pb.VideoSource(frames=[one, common_pb2.ImageSource()]), "set data or key"),
        "bounds of its own": (pb.VideoSource(frames=[one, bounded]), "max_pixels"),
        "a pair of pairs": (pb.VideoSource(frames=[one, paired]), "second_frame"),
        "too thin": (pb.VideoSource(frames=[thin, thin]), "the limit is 200"),
        "too many frames": (pb.VideoSource(frames=[one] * (MAX_FRAMES + 1)), f"the limit is {MAX_FRAMES}"),
    }


@pytest.mark.parametrize("what", sorted(wrong_videos(1)))
async def test_a_wrong_video_is_refused_and_says_why(served: Served, model: PairModel, what: str) -> None:
    video, reason = wrong_videos(model.square)[what]
    params = pb.GenerateParams(sampling=pb.SamplingParams(max_tokens=1))
    params.chat.messages.add(role=pb.ROLE_USER).parts.add(video=video)
    async with AsyncClient.connect(served.stack.decoder_targets[0]) as client:
        with pytest.raises((InvalidInputError, FingerprintMismatchError), match=reason):
            await client._calls.unary(
                client._connection.decoder.Generate, pb.GenerateRequest(params=params), Deadline.after(30)
            )


async def test_a_wrong_size_is_refused_of_cached_frames_as_of_others(served: Served) -> None:
    files = [videos.png(frame) for frame in videos.frames(51, 4)]
    sent = [ImageRef.from_bytes(file) for file in files]
    known = [ImageRef.from_digest(image_digest(file)) for file in files]
    (target,) = served.stack.decoder_targets
    await answer(target, [Video.from_frames(sent), "what"])
    for frames in (known, [*sent[:2], *known[2:]], sent):
        # One pixel less gives the same size of the resized frames, and so the same cache entries.
        for size in ((79, 60), (80, 59)):
            with pytest.raises(InvalidInputError, match=rf"videos\[0\].size: is {size[0]}×{size[1]}.*80×60"):
                await answer(target, [Video.from_frames(frames, size=size), "what"])
    assert await answer(target, [Video.from_frames(known, size=(80, 60)), "what"])


def pair_items(square: int) -> dict[str, tuple[common_pb2.ImageSource, str]]:
    """Maps each mistake to a pair for the encoder that has it and to a part of the refusal's text."""
    side = int(square**0.5)
    one, other = (videos.png(frame) for frame in videos.frames(1, 2))
    larger = videos.png(videos.frames(1, 1, 100, 60)[0])
    size = common_pb2.PixelSize(width=2 * side, height=side)
    source = common_pb2.ImageSource
    return {
        "no rows": (source(data=one, second_frame=other, frame_size=common_pb2.PixelSize()), "multiples"),
        "half a row": (source(data=one, frame_size=common_pb2.PixelSize(width=side, height=side - 1)), "multiples"),
        "too many rows": (
            source(data=one, frame_size=common_pb2.PixelSize(width=side * 1000, height=side * 1000)),
            "at most",
        ),
        "no size": (source(data=one, second_frame=other), "belongs to"),
        "two sizes": (source(data=one, second_frame=larger, frame_size=size), "one size"),
        "bound and size": (source(data=one, frame_size=size, max_pixels=9 * square), "max_pixels"),
        "another digest": (
            source(data=one, second_frame=other, frame_size=size, expected_digest=image_digest(one)),
            "hash",
        ),
        "broken second frame": (
            source(data=one, second_frame=other[:200], frame_size=size),
            "cut off|broken|not an image",
        ),
    }


@pytest.mark.parametrize("what", sorted(pair_items(1)))
async def test_a_wrong_pair_is_refused_by_the_encoder(served: Served, model: PairModel, what: str) -> None:
    image, reason = pair_items(model.square)[what]
    num_before = served.num_encodes
    request = encoder_pb2.EncodeRequest(items=[encoder_pb2.EncodeItem(image=image)])
    async with AsyncClient.connect(served.stack.decoder_targets[0]) as client:
        deadline = Deadline.after(30)
        encoder = await client._encoder(deadline)
        with pytest.raises(InvalidInputError, match=reason):
            await client._calls.unary(encoder.Encode, request, deadline)
    assert served.num_encodes == num_before


async def test_a_model_without_videos_says_so(stack: LocalStack) -> None:
    video = Video.from_frames([videos.png(frame) for frame in videos.frames(1, 2)])
    async with AsyncClient.connect(stack.decoder_targets[0]) as client:
        assert (await client.model_info()).max_video_frames == 0
        with pytest.raises(UnsupportedError, match="takes no videos"):
            await client.generate([Message("user", [video, "what"])], max_tokens=1)


async def test_a_model_with_videos_says_how_many_frames(served: Served) -> None:
    async with AsyncClient.connect(served.stack.decoder_targets[0]) as client:
        info = await client.model_info()
    assert (info.max_video_frames, info.frames_per_entry) == (MAX_FRAMES, 2)
