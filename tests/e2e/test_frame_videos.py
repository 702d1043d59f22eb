"""Videos of models that encode frames one by one: each frame is encoded once, whatever videos it is part of."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from lookonce.admin.aio import AsyncAdminClient
from lookonce.aio import AsyncClient
from lookonce.client import Client
from lookonce.common.v1 import common_pb2
from lookonce.content_key import image_digest
from lookonce.encoder.v1 import encoder_service_pb2 as encoder_pb2
from lookonce.errors import EmbeddingNotCachedError, InvalidInputError, InvalidParameterError
from lookonce.generation import Message, Part
from lookonce.images import ImageRef
from lookonce.sdk.connection.channel import Deadline
from lookonce.videos import Video
from tests.e2e.served_videos import MAX_FRAMES, Served, answer, said, served_videos
from tests.parity import videos
from tests.parity.frame_videos import MODELS
from tests.tiny_families import FAMILIES


@pytest.fixture(scope="module", params=["llava_onevision", "smolvlm", "gemma4"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = MODELS[request.param](FAMILIES[request.param], tmp_path_factory.mktemp("videos") / request.param)
    with served_videos(model) as running:
        yield running


async def test_answers_are_those_of_generate_and_each_frame_is_encoded_once(served: Served) -> None:
    expected = [chat.expected for chat in served.chats]
    (target,) = served.stack.decoder_targets
    for by_digest in (False, False, True):
        answers = await asyncio.gather(
            *(answer(target, said(chat.parts, by_digest=by_digest)) for chat in served.chats)
        )
        assert [list(one.token_ids) for one in answers] == expected
    assert served.num_encodes == served.num_entries
    for one in answers:
        usage = one.usage
        assert usage.encoded_image_tokens == 0
        assert usage.cached_image_tokens + usage.skipped_image_tokens == usage.image_tokens


def test_a_video_of_known_frames_is_encoded_nowhere(served: Served) -> None:
    """Frames in another order and number: rows of a frame depend on nothing else."""
    num_before = served.num_encodes
    files = [videos.png(frame) for frame in videos.frames(31, 5)]
    with Client.connect(served.stack.decoder_targets[0]) as client:
        first = client.generate([Message("user", [Video.from_frames(files), "what"])], max_tokens=1)
        assert served.num_encodes == num_before + 5
        assert first.usage.encoded_image_tokens == first.usage.image_tokens
        shown = Video.from_frames(files[::-2], fps=0.5)
        again = client.generate([Message("user", [shown, "what"])], max_tokens=1)
    assert served.num_encodes == num_before + 5
    assert again.usage.encoded_image_tokens == 0


def test_bytes_travel_when_the_server_lacks_a_frame(served: Served) -> None:
    """The SDK asks by digest first, and the server counts frames, not pairs."""
    num_before = served.num_encodes
    files = [videos.png(frame) + bytes(80_000) for frame in videos.frames(41, 5)]
    picture = ImageRef.from_bytes(videos.png(videos.frames(42, 1)[0]) + bytes(80_000))
    with Client.connect(served.stack.decoder_targets[0]) as client:
        assert client.model_info().frames_per_entry == 1
        client.generate([Message("user", [Video.from_frames(files[:4], size=(80, 60)), "what"])], max_tokens=1)
        assert served.num_encodes == num_before + 4
        shown: list[Part] = [picture, Video.from_frames(files, size=(80, 60)), "what"]
        client.generate([Message("user", shown)], max_tokens=1)
        assert served.num_encodes == num_before + 6
        refs = [ImageRef.from_digest(image_digest(file)) for file in files[:3]]
        unknown = ImageRef.from_digest(bytes(32))
        with pytest.raises(EmbeddingNotCachedError) as missing:
            client.generate(
                [Message("user", [Video.from_frames([*refs, unknown], size=(80, 60)), "what"])], max_tokens=1
            )
    assert missing.value.indexes == (3,)


async def test_a_removed_image_is_removed_as_a_frame(served: Served) -> None:
    files = [videos.png(frame) for frame in videos.frames(61, 3)]
    (target,) = served.stack.decoder_targets
    await answer(target, [ImageRef.from_bytes(files[1]), Video.from_frames(files), "what"])
    known = Video.from_frames([ImageRef.from_digest(image_digest(file)) for file in files], size=(80, 60))
    assert await answer(target, [known, "what"])
    async with AsyncAdminClient.connect(served.stack.admin_targets[0]) as admin:
        (result,) = await admin.evict([files[1]])
    assert (result.entries, result.pairs) == (1, 1)
    # The decoder drops its rows when it hears of the removal.
    missing: tuple[int, ...] = ()
    async with asyncio.timeout(30):
        while not missing:
            try:
                await answer(target, [known, "what else"])
            except EmbeddingNotCachedError as error:
                missing = error.indexes
            await asyncio.sleep(0.05)
    assert missing == (1,)


async def test_a_bound_of_pixels_is_refused(served: Served) -> None:
    video = Video.from_frames([videos.png(frame) for frame in videos.frames(1, 2)], max_pixels=1000)
    with pytest.raises(InvalidParameterError, match=r"videos\[0\].max_pixels: .* does not support"):
        await answer(served.stack.decoder_targets[0], [video, "what"])


async def test_too_many_frames_are_refused(served: Served) -> None:
    video = Video.from_frames([videos.png(videos.frames(1, 1)[0])] * (MAX_FRAMES + 1))
    with pytest.raises(InvalidInputError, match=f"the limit is {MAX_FRAMES}"):
        await answer(served.stack.decoder_targets[0], [video, "what"])


@pytest.mark.parametrize("what", ["a second frame", "another size", "no multiple", "a key of another size"])
async def test_a_wrong_frame_is_refused_by_the_encoder(served: Served, what: str) -> None:
    one, other = (videos.png(frame) for frame in videos.frames(1, 2))
    async with AsyncClient.connect(served.stack.decoder_targets[0]) as client:
        deadline = Deadline.after(30)
        encoder = await client._encoder(deadline)

        async def encode(**fields: object) -> encoder_pb2.EncodeResult:
            image = common_pb2.ImageSource(**fields)  # type: ignore[arg-type]
            request = encoder_pb2.EncodeRequest(items=[encoder_pb2.EncodeItem(image=image)])
            response: encoder_pb2.EncodeResponse = await client._calls.unary(encoder.Encode, request, deadline)
            return response.results[0]

        with pytest.raises(InvalidInputError) as sized:
            await encode(data=one, frame_size=common_pb2.PixelSize(width=7, height=7))
        assert "multiples" in str(sized.value)
        unit = int(str(sized.value).split("multiples of ")[1].split(" ")[0])
        # The frames of most models are squares of one size.
        sizes = [common_pb2.PixelSize(width=unit * columns, height=unit * lines) for columns, lines in ((1, 1), (9, 7))]
        right = sizes[1] if "at most 70" in str(sized.value) else sizes[0]
        assert (await encode(data=one, frame_size=right)).embedding.num_rows
        num_before = served.num_encodes
        wrong = {
            "a second frame": ({"data": one, "second_frame": other, "frame_size": right}, "one by one"),
            "another size": ({"data": one, "frame_size": sizes[right == sizes[0]]}, "multiples|resizes frames"),
            "no multiple": (
                {"data": one, "frame_size": common_pb2.PixelSize(width=unit, height=unit - 1)},
                "multiples",
            ),
            "a key of another size": (
                {"data": one, "frame_size": right, "expected_digest": image_digest(one)},
                "hash",
            ),
        }
        fields, reason = wrong[what]
        with pytest.raises(InvalidInputError, match=reason):
            await encode(**fields)
    assert served.num_encodes == num_before


async def test_a_frame_has_one_key(served: Served) -> None:
    """A second frame is refused also if the first one is cached, and so is the option of images beside others."""
    one = videos.png(videos.frames(71, 1)[0])
    async with AsyncClient.connect(served.stack.decoder_targets[0]) as client:
        await answer(served.stack.decoder_targets[0], [Video.from_frames([one, one]), "what"])
        deadline = Deadline.after(30)
        encoder = await client._encoder(deadline)
        unit = served.frame_size
        for field, given in (("second_frame", {"second_frame": one}), ("beside_others", {"beside_others": True})):
            image = common_pb2.ImageSource(data=one, frame_size=unit, **given)
            request = encoder_pb2.EncodeRequest(items=[encoder_pb2.EncodeItem(image=image)])
            with pytest.raises(InvalidParameterError, match=field):
                await client._calls.unary(encoder.Encode, request, deadline)
