"""Files, sizes and digests of images and of pairs of video frames."""

from __future__ import annotations

import hashlib

from lookonce.image_file import FramePair, file_digest, files_of, num_file_bytes


def test_an_image_is_its_own_file() -> None:
    assert files_of(b"abc") == (b"abc",)
    assert num_file_bytes(b"abc") == 3
    assert file_digest(b"abc") == hashlib.sha256(b"abc").digest()


def test_a_pair_has_both_files() -> None:
    pair = FramePair(b"abc", b"de")
    assert files_of(pair) == (b"abc", b"de")
    assert num_file_bytes(pair) == 5


def test_a_frame_paired_with_itself_is_one_file_but_another_entry_than_the_image() -> None:
    alone = FramePair(b"abc", None)
    assert files_of(alone) == (b"abc",)
    assert num_file_bytes(alone) == 3
    assert file_digest(alone) != file_digest(b"abc")


def test_a_missing_second_frame_is_the_first_one_again() -> None:
    assert file_digest(FramePair(b"abc", None)) == file_digest(FramePair(b"abc", b"abc"))


def test_the_order_of_a_pair_matters() -> None:
    assert file_digest(FramePair(b"a", b"b")) != file_digest(FramePair(b"b", b"a"))


def test_a_pairs_text_shows_no_image_bytes() -> None:
    assert "secret" not in repr(FramePair(b"secret", b"secret"))
