"""The kinds of images and options that the clients take, and texts that are surely meant as images."""

from __future__ import annotations

import base64
import io
import pathlib
import time
from typing import Any

import PIL.Image
import pytest

from lookonce.errors import InvalidParameterError
from lookonce.generation import Message, TextPrompt
from lookonce.images import ImageRef, as_image
from lookonce.sdk.messages import PreparedPrompt

PICTURE = PIL.Image.new("RGB", (5, 4), (200, 30, 10))


def png() -> bytes:
    file = io.BytesIO()
    PICTURE.save(file, "PNG")
    return file.getvalue()


def test_an_image_is_a_path_bytes_a_file_a_data_url_or_a_pil_image(tmp_path: pathlib.Path) -> None:
    data, path = png(), tmp_path / "picture.png"
    path.write_bytes(data)
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    with path.open("rb") as file:
        given: list[Any] = [path, str(path), data, bytearray(data), file, io.BytesIO(data), url, PICTURE]
        found = [as_image(image) for image in given]
    assert found == [ImageRef.from_bytes(data)] * len(given)
    assert [image.data for image in found] == [data] * len(given)


@pytest.mark.parametrize(
    ("image", "text"),
    [
        ("data:image/png,abc", "not in base64"),
        ("data:image/png;base64", "not in base64"),
        ("data:image/png;base64,%%%", "not valid base64"),
        ("data:image/png;base64,abc", "not valid base64"),
        (io.StringIO("abc"), "not open for reading bytes"),
        (PIL.Image.new("CMYK", (2, 2)), "convert it to RGB"),
        (7, "one is a int"),
        (None, "one is a NoneType"),
        ("https://images.example.com/a.png", r"fetch it first, .*lookonce\.ImageFetcher"),
        ("HTTP://images.example.com/a.png", "fetch it first"),
        ("", "an empty path"),
        (pathlib.PurePath, "one is a type"),
        (PIL.Image.Image, "one is a "),
        (io.BytesIO, "one is a "),
        (io.BytesIO(), "was it read before"),
        (PIL.Image.new("RGB", (0, 0)), "without pixels"),
    ],
)
def test_other_images_are_refused(image: Any, text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        as_image(image)


@pytest.mark.parametrize(
    "written",
    [
        "{text}",
        "{text}\n",
        " {text}",
        "{lines}",
        "{escaped}",
    ],
)
def test_base64_with_line_ends_and_escapes_is_read(written: str) -> None:
    data = bytes(range(256)) * 5
    text = base64.b64encode(data).decode()
    escaped = text.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D") + "%0A"
    content = written.format(text=text, lines=base64.encodebytes(data).decode(), escaped=escaped)
    assert as_image(f"data:image/png;base64,{content}").data == data


def test_millions_of_escapes_take_no_time() -> None:
    """Percent-decoding took seconds, in which no other thread ran."""
    begin_s = time.process_time()
    for content in ("%" * 20_000_000, "%41" * 7_000_000):
        with pytest.raises(InvalidParameterError, match="not valid base64"):
            as_image(f"data:image/png;base64,{content}")
    assert time.process_time() - begin_s < 20.0


def test_closed_files_and_images_are_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(png())
    with path.open("rb") as file, PIL.Image.open(path) as picture:
        pass
    with path.open("wb") as written:
        for closed in (file, written):
            with pytest.raises(InvalidParameterError, match="closed or not open for reading"):
                as_image(closed)
    with pytest.raises(InvalidParameterError, match="closed"):
        as_image(picture)
    with pytest.raises(FileNotFoundError):
        as_image(tmp_path / "missing.png")


@pytest.mark.parametrize("name", ["picture.png", "Picture.JPEG", "picture.heic"])
def test_a_path_as_text_of_a_message_is_noticed(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(png())
    for text in (name, str(tmp_path / name)):
        with pytest.raises(InvalidParameterError, match=r"ImageRef\.from_file"):
            PreparedPrompt([Message("user", ["What is it?", text])], (), {})
    params = PreparedPrompt([Message("user", ["What is it?", tmp_path / name])], (), {}).params()
    assert params.chat.messages[0].parts[1].HasField("image")


@pytest.mark.parametrize("text", ["picture.png", "see picture.png", "x" * 10_000 + ".png", "a\0.png", "data: none"])
def test_other_texts_stay_texts(text: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    params = PreparedPrompt([Message("user", [text])], (), {}).params()
    assert [part.text for part in params.chat.messages[0].parts] == [text]


def test_a_data_url_as_text_of_a_message_is_noticed() -> None:
    with pytest.raises(InvalidParameterError, match="data URL"):
        PreparedPrompt([Message("user", ["data:image/png;base64,AAAA"])], (), {})


@pytest.mark.parametrize(
    "prompt", ["", " \n", TextPrompt(""), [], [Message("user", "")], [Message("user", []), Message("user", [" "])]]
)
def test_an_empty_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidParameterError, match="is empty"):
        PreparedPrompt(prompt, (), {})


def test_an_image_alone_is_a_prompt() -> None:
    assert PreparedPrompt("", [png()], {}).params().chat.messages[0].parts[0].HasField("image")
    assert PreparedPrompt(TextPrompt("", [png()]), (), {}).params().text.images


def test_an_option_that_is_none_is_left_out() -> None:
    names = ("temperature", "top_k", "seed", "stop", "logit_bias", "max_tokens", "request_id", "priority", "timeout_s")
    options: Any = dict.fromkeys(names)
    assert PreparedPrompt("word", (), options).params() == PreparedPrompt("word", (), {}).params()


@pytest.mark.parametrize("value", [1.0, None])
def test_an_unknown_option_is_refused(value: float | None) -> None:
    options: Any = {"temprature": value}
    with pytest.raises(TypeError, match="unknown option 'temprature'"):
        PreparedPrompt("word", (), options)
