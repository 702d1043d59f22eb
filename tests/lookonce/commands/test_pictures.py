"""Files, folders and digests on a command line become references to images."""

from __future__ import annotations

import pathlib

import pytest
import typer

from lookonce.commands.pictures import files_below, is_image, named_image, video_of
from tests.tiny_models import random_image


@pytest.mark.parametrize("name", ["PNG", "JPEG", "WEBP", "GIF", "AVIF"])
def test_accepted_formats_are_known_by_their_first_bytes(tmp_path: pathlib.Path, name: str) -> None:
    path = tmp_path / "picture"
    random_image(1).save(path, name)
    assert is_image(path)


@pytest.mark.parametrize("content", [b"", b"\x89PNG", b"%PDF-1.7 and more", b"BM and so on, a bitmap"])
def test_other_files_are_no_images(tmp_path: pathlib.Path, content: bytes) -> None:
    path = tmp_path / "file.png"
    path.write_bytes(content)
    assert not is_image(path)


def test_a_folder_is_walked_in_the_order_of_names(pictures: pathlib.Path) -> None:
    (pictures / "more" / "loop").symlink_to(pictures)
    names = [str(path.relative_to(pictures)) for path in files_below(pictures)]
    assert names == ["2.png", "10.png", "more/a.png", "notes.txt"]


def test_a_video_needs_two_frames(pictures: pathlib.Path) -> None:
    assert len(video_of(pictures, None, None, None).frames) == 2
    with pytest.raises(typer.BadParameter, match="at least 2"):
        video_of(pictures / "more", None, None, None)


def test_an_image_is_a_file_or_a_digest(pictures: pathlib.Path) -> None:
    by_file = named_image(str(pictures / "2.png"), 50)
    assert by_file.data is not None
    assert named_image(by_file.hex, 50) == by_file
    for wrong in ("", "none.png", str(pictures)):
        with pytest.raises(typer.BadParameter):
            named_image(wrong)
