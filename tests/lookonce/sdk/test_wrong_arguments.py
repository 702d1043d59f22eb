"""Arguments of a wrong kind are refused with an error of the SDK before anything is sent."""

from __future__ import annotations

import asyncio
import pathlib
from typing import Any

import pytest

import lookonce
from lookonce.errors import ConfigurationError, InvalidParameterError
from lookonce.generation import Message, TextPrompt
from lookonce.images import ImageRef
from lookonce.sdk.connection.channel import Deadline
from lookonce.videos import Video

CLIENTS: list[Any] = [lookonce.Client, lookonce.AsyncClient]
ALL_CLIENTS: list[Any] = [*CLIENTS, lookonce.AdminClient, lookonce.AsyncAdminClient]
FRAMES = (ImageRef.from_bytes(b"1"), ImageRef.from_bytes(b"2"))
VIDEO = Video(FRAMES)


async def called(kind: Any, method: str, *arguments: Any, **options: Any) -> Any:
    """Makes one call of a client whose server does not exist; reads a stream to its end."""
    client = kind.connect("127.0.0.1:1", "127.0.0.1:1", timeout_s=5.0)
    if kind is lookonce.AsyncClient:
        async with client:
            found = getattr(client, method)(*arguments, **options)
            return [piece async for piece in found] if method == "stream" else await found
    with client:
        found = await asyncio.to_thread(getattr(client, method), *arguments, **options)
        return list(found) if method == "stream" else found


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize(
    ("prompt", "field", "words"),
    [
        (TextPrompt(b"abc"), "prompt", "bytes"),  # type: ignore[arg-type]
        (TextPrompt(5), "prompt", "int"),  # type: ignore[arg-type]
        (TextPrompt(None), "prompt", "NoneType"),  # type: ignore[arg-type]
        (TextPrompt("x", pathlib.Path("x.png")), "images", "list"),  # type: ignore[arg-type]
        (TextPrompt("x", None), "images", "list"),  # type: ignore[arg-type]
        (TextPrompt("x", [VIDEO]), "images", "Video"),  # type: ignore[list-item]
        (b"abc", "prompt", "bytes"),
        (None, "prompt", "NoneType"),
        (5, "prompt", "int"),
        (["a"], "prompt", "str"),
        (Message("user", "a"), "prompt", "list of Message"),
        ([Message("user", None)], "content", "NoneType"),  # type: ignore[arg-type]
        ([Message("user", b"abc")], "content", "bytes"),  # type: ignore[arg-type]
        ([Message("user", [5])], "images", "int"),  # type: ignore[list-item]
        ([Message(["user"], "a")], "role", "one of"),  # type: ignore[arg-type]
    ],
)
async def test_prompts_of_a_wrong_kind_are_refused(kind: Any, prompt: Any, field: str, words: str) -> None:
    for method in ("generate", "stream"):
        with pytest.raises(InvalidParameterError, match=words) as caught:
            await called(kind, method, prompt)
        assert caught.value.field == field


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("images", [None, 5, bytearray(b"x"), pathlib.Path("x.png"), FRAMES[0], VIDEO])
async def test_one_image_is_no_list_of_images(kind: Any, images: Any) -> None:
    for method, *prompt in (("generate", "x"), ("stream", "x"), ("encode",), ("lookup",)):
        with pytest.raises(InvalidParameterError, match="images: must be a list of images"):
            await called(kind, method, *prompt, images)


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("image", [None, 5, VIDEO, 1.5, "a\0b"])
async def test_images_of_a_wrong_kind_are_refused(kind: Any, image: Any) -> None:
    for method, *prompt in (("generate", "x"), ("encode",), ("lookup",)):
        with pytest.raises(InvalidParameterError, match="images: "):
            await called(kind, method, *prompt, [image])


@pytest.mark.parametrize("size", [(160,), (160, 90, 3), 160, "ab", (1.5, 2), (True, 2)])
def test_a_video_s_size_is_a_pair_of_whole_numbers(size: Any) -> None:
    with pytest.raises(InvalidParameterError, match="size: must be width and height"):
        Video(FRAMES, size=size)
    with pytest.raises(InvalidParameterError, match="size: must be width and height"):
        Video.from_frames(FRAMES, size=size)


@pytest.mark.parametrize("digest", [" 00" * 32, "00 " * 32, "0x" + "0" * 62, "é" * 64, "0" * 63])
def test_digests_are_hexadecimal_without_spaces(digest: str) -> None:
    with pytest.raises(InvalidParameterError, match="64 hexadecimal characters"):
        ImageRef.from_digest(digest)


@pytest.mark.parametrize("digest", [5, None, [1] * 32])
def test_digests_are_bytes_or_text(digest: Any) -> None:
    with pytest.raises(InvalidParameterError, match="digest: "):
        ImageRef.from_digest(digest)


@pytest.mark.parametrize("data", ["text", 5, None])
def test_the_bytes_of_an_image_are_bytes(data: Any) -> None:
    with pytest.raises(InvalidParameterError, match="data: must be bytes"):
        ImageRef.from_bytes(data)


@pytest.mark.parametrize("kind", ALL_CLIENTS)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tls_ca": ""}, "tls_ca is empty"),
        ({"tls_ca": 5}, "tls_ca must be a path"),
        ({"tls_cert": "", "tls_key": "k.pem"}, "tls_cert is empty"),
        ({"tls_cert": "c.pem", "tls_key": ""}, "tls_key is empty"),
        ({"token": 5}, "token must be"),
        ({"token": b"abc"}, "token must be"),
        ({"token": ""}, "token must be"),
    ],
)
async def test_connections_with_unusable_options_are_refused(kind: Any, options: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        kind.connect("127.0.0.1:1", **options)


def test_deadlines_beyond_a_float_are_the_longest_or_refused() -> None:
    left_s = Deadline.after(10**400).remaining_s()
    assert left_s is not None
    assert left_s > 9e7
    for refused in (-(10**400), -(10**5000)):
        with pytest.raises(InvalidParameterError, match="timeout_s: must be a number of seconds above 0"):
            Deadline.after(refused)


@pytest.mark.parametrize("kind", CLIENTS)
async def test_numbers_beyond_a_field_are_refused(kind: Any) -> None:
    for option in ("temperature", "seed", "max_tokens"):
        with pytest.raises(InvalidParameterError, match=option):
            await called(kind, "generate", "x", **{option: 10**400})
