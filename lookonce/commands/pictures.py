"""Pictures as a command line names them: files, digests, and folders of files. Decodes nothing."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator

import typer

from lookonce.commands.output import harmless
from lookonce.errors import InvalidParameterError
from lookonce.images import ImageRef
from lookonce.videos import Video

# First bytes of the formats that encoders accept. AVIF and HEIC have a box `ftyp` with one of the brands.
_SIGNATURES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a")
_BRANDS = frozenset({b"avif", b"avis", b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"})
_HEAD_BYTES = 12
_DIGITS = re.compile(r"(\d+)")


def existing_path(text: str) -> pathlib.Path:
    """Returns the path of a file or a folder. Raises BadParameter for anything else.

    An empty one would mean the current folder. Devices and pipes have no end, or wait for a writer.
    """
    if not text:
        raise typer.BadParameter("is empty; name a file or a folder")
    path = pathlib.Path(text)
    if not path.exists():
        raise typer.BadParameter(f"{harmless(text)} does not exist")
    if not path.is_file() and not path.is_dir():
        raise typer.BadParameter(f"{harmless(text)} is neither a file nor a folder")
    return path


def existing_file(text: str) -> pathlib.Path:
    """Returns the path of a file. Raises BadParameter for anything else."""
    path = existing_path(text)
    if path.is_dir():
        raise typer.BadParameter(f"{harmless(text)} is a folder; name a file")
    return path


def existing_folder(text: str) -> pathlib.Path:
    """Returns the path of a folder. Raises BadParameter for anything else."""
    path = existing_path(text)
    if path.is_file():
        raise typer.BadParameter(f"{harmless(text)} is a file; name a folder")
    return path


def named_image(text: str, max_pixels: int | None = None, beside_others: bool = False) -> ImageRef:
    """Returns the image of a file or a digest. Raises BadParameter for anything else."""
    path = pathlib.Path(text)
    if path.is_file():
        return ImageRef.from_file(path, max_pixels=max_pixels, beside_others=beside_others)
    if text and path.is_dir():
        raise typer.BadParameter(f"{harmless(text)} is a folder; name the image files in it")
    try:
        return ImageRef.from_digest(text, max_pixels=max_pixels, beside_others=beside_others)
    except InvalidParameterError:
        raise typer.BadParameter(
            f"{harmless(text) or repr(text)} is neither a file nor a SHA-256 digest of 64 hex characters"
        ) from None


def video_of(folder: pathlib.Path, fps: float | None, max_pixels: int | None, size: tuple[int, int] | None) -> Video:
    """Returns the video whose frames are the images of a folder, by their names; `9.png` comes before `10.png`.

    Raises BadParameter for a folder with fewer than two images.
    """
    frames = [path for path in _in_order(folder) if path.is_file() and is_image(path)]
    try:
        return Video.from_frames(frames, fps=fps, max_pixels=max_pixels, size=size)
    except InvalidParameterError as error:
        raise typer.BadParameter(f"{harmless(folder)}: {error.message}", param_hint="--video") from None


def files_below(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the files in a folder and its subfolders, by their names, without hidden ones and linked folders."""
    for path in _in_order(folder):
        if path.is_dir() and not path.is_symlink():
            yield from files_below(path)
        elif path.is_file():
            yield path


def is_image(path: pathlib.Path) -> bool:
    """Whether a file begins as images of the accepted formats do. Raises OSError if it cannot be read."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    is_webp = head[:4] == b"RIFF" and head[8:] == b"WEBP"
    is_heif = head[4:8] == b"ftyp" and head[8:] in _BRANDS
    return head.startswith(_SIGNATURES) or is_webp or is_heif


def _in_order(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns what a folder has and does not hide, by the names, in which numbers count by their value."""
    return sorted((path for path in folder.iterdir() if not path.name.startswith(".")), key=_order)


def _order(path: pathlib.Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(path.name)]
