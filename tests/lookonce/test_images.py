"""References to images: from bytes, files and digests."""

from __future__ import annotations

import hashlib
import pathlib

import pytest

from lookonce.errors import InvalidParameterError
from lookonce.images import ImageRef, as_image, as_images


def test_image_references_are_equal_by_content_and_options() -> None:
    ref = ImageRef.from_bytes(b"a")
    assert ref == ImageRef.from_digest(ref.hex)
    assert ref != ImageRef.from_bytes(b"a", max_pixels=100)
    assert ref != ImageRef.from_bytes(b"b")
    with pytest.raises(InvalidParameterError, match="hexadecimal"):
        ImageRef.from_digest("no digest")
    with pytest.raises(InvalidParameterError, match="32 bytes"):
        ImageRef.from_digest(b"abcd")


def test_a_file_and_its_bytes_are_the_same_image(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"file")
    refs = as_images([b"file", bytearray(b"file"), memoryview(b"file"), path, str(path)])  # type: ignore[list-item]
    assert {ref.digest for ref in refs} == {hashlib.sha256(b"file").digest()}
    assert {ref.data for ref in refs} == {b"file"}


def test_a_reference_stays_as_it_is() -> None:
    ref = ImageRef.from_bytes(b"a", max_pixels=100)
    assert as_image(ref) is ref


def test_a_file_that_cannot_be_read_is_an_os_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError):
        as_image(tmp_path / "missing.png")


@pytest.mark.parametrize("images", ["a.png", b"file"])
def test_a_single_image_is_not_a_list(images: str | bytes) -> None:
    with pytest.raises(InvalidParameterError, match="list"):
        as_images(images)  # type: ignore[arg-type]


def test_a_references_text_shows_neither_digest_nor_bytes() -> None:
    ref = ImageRef.from_bytes(b"secret")
    assert "secret" not in repr(ref)
    assert ref.hex[:8] not in repr(ref)
