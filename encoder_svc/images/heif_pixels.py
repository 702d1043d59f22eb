"""Decodes the primary image of a HEIC or AVIF file.

Each coded picture is decoded alone, from a small file made for it: the libraries see no metadata, no other image and no
grid. libheif would fill tiles that it cannot decode with green, and say nothing.
"""

from __future__ import annotations

import io

import PIL.AvifImagePlugin
import PIL.features
import PIL.Image

from encoder_svc.images.av1_size import check_av1_size
from lookonce.errors import ImageUndecodableError, UnsupportedError
from lookonce.media.boxes import box, full_box
from lookonce.media.heif_items import Property
from lookonce.media.heif_picture import AV1, HEVC, CodedPicture, Crop, HeifPicture

_BRANDS = {HEVC: b"heic", AV1: b"avif"}
_HANDLER = bytes(4) + b"pict" + bytes(13)
_AV1C = b"av1C"
# Numbers before the sequence header in a configuration.
_AV1C_BYTES = 4
_PREMULTIPLIED = "RGBa"
# One item of this number is the picture; the next one, if there is one, is its opacity.
_PICTURE, _ALPHA = 1, 2


def load_heif(picture: HeifPicture, data: bytes) -> PIL.Image.Image:
    """Returns the primary image of a file, upright.

    Raises ImageUndecodableError for a picture that cannot be decoded or has another size than its header says,
    UnsupportedError if a package that decodes the format is missing, and MemoryError. Other exceptions of the libraries
    pass.
    """
    image = _decoded(picture.tiles[0], data) if len(picture.tiles) == 1 else _joined(picture, data)
    if image.size != (picture.width, picture.height):
        image = image.crop((0, 0, picture.width, picture.height))
    for one in picture.transformations:
        if isinstance(one, Crop):
            image = image.crop((one.left, one.top, one.right, one.bottom))
        else:
            image = image.transpose(one)
    return image


def _joined(picture: HeifPicture, data: bytes) -> PIL.Image.Image:
    """The tiles of a grid in one image."""
    whole: PIL.Image.Image | None = None
    for number, coded in enumerate(picture.tiles):
        tile = _decoded(coded, data)
        if whole is None:
            # Without a colour, no time is spent on filling it.
            whole = PIL.Image.new(tile.mode, (picture.width, picture.height), None)
        if tile.mode != whole.mode:
            raise ImageUndecodableError("the tiles of the image have different kinds of pixels; save it as JPEG")
        row, column = divmod(number, picture.num_columns)
        whole.paste(tile, (column * coded.width, row * coded.height))
    assert whole is not None, "a grid has a tile"
    return whole


def _decoded(coded: CodedPicture, data: bytes) -> PIL.Image.Image:
    file = _file_of(coded, data)
    if coded.coding == AV1:
        _check_sizes(coded, data)
    try:
        image = _decoded_avif(file) if coded.coding == AV1 else _decoded_heic(file)
    except RuntimeError as error:
        if _is_lack_of_memory(str(error)):
            raise MemoryError from None
        raise
    if image.size != (coded.width, coded.height):
        raise ImageUndecodableError("the image has another size than its header says; its pixels cannot be decoded")
    return image.convert("RGBA") if image.mode == _PREMULTIPLIED else image


def _is_lack_of_memory(text: str) -> bool:
    """Tells what an error's text is about, since the libraries raise the same error for every cause."""
    # libheif says "Memory allocation error: Security limit exceeded" of a picture that is larger than it claims.
    return "memory" in text.lower() and "security limit" not in text.lower()


def _check_sizes(coded: CodedPicture, data: bytes) -> None:
    """Raises ImageUndecodableError for an AV1 picture, or its opacity, that has another size than it claims."""
    for one in (coded, coded.alpha):
        if one is not None:
            configurations = (
                data[part.start + _AV1C_BYTES : part.end] for part in one.properties if part.kind == _AV1C
            )
            for headers in (_content(one, data), *configurations):
                check_av1_size(headers, (one.width, one.height))


def _decoded_avif(file: bytes) -> PIL.Image.Image:
    if not PIL.features.check("avif"):
        raise UnsupportedError(
            "the image is AVIF, and the encoder's Pillow is built without AVIF; install Pillow's own wheel there "
            "(pip install pillow), or send JPEG"
        )
    # Decoding processes run side by side already.
    PIL.AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    with PIL.Image.open(io.BytesIO(file), formats=["AVIF"]) as image:
        image.load()
        return image


def _decoded_heic(file: bytes) -> PIL.Image.Image:
    try:
        import pillow_heif

        pillow_heif.options.DECODE_THREADS = 1
        # Samples of 10 and 12 bits are scaled to 8.
        return pillow_heif.open_heif(io.BytesIO(file), convert_hdr_to_8bit=True).to_pillow()
    except ImportError:
        raise UnsupportedError(
            "the image is HEIC, and the encoder lacks the package that decodes it; "
            "install it there (pip install 'lookonce[heic]'), or send JPEG"
        ) from None


def _content(coded: CodedPicture, data: bytes) -> bytes:
    return b"".join(data[start:end] for start, end in coded.spans)


def _file_of(coded: CodedPicture, data: bytes) -> bytes:
    """A file that holds one coded picture and its opacity."""
    pictures = [coded] if coded.alpha is None else [coded, coded.alpha]
    contents = [_content(one, data) for one in pictures]
    kinds = box(b"ftyp", _BRANDS[coded.coding] + bytes(4) + b"mif1" + _BRANDS[coded.coding] + b"miaf")
    # The length of this box does not depend on the places that it names.
    start = len(kinds) + len(_meta(coded, pictures, contents, data, 0)) + len(box(b"mdat", b""))
    return kinds + _meta(coded, pictures, contents, data, start) + box(b"mdat", b"".join(contents))


def _meta(coded: CodedPicture, pictures: list[CodedPicture], contents: list[bytes], data: bytes, start: int) -> bytes:
    """The description of the items, whose contents follow each other from `start` on."""
    entries = [_number(item) + bytes(2) + coded.coding + b"\0" for item in range(_PICTURE, len(pictures) + _PICTURE)]
    infos = b"".join(full_box(b"infe", entry, version=2) for entry in entries)
    places = b""
    for item, content in enumerate(contents, _PICTURE):
        places += _number(item) + bytes(2) + _number(1) + _number(start, 4) + _number(len(content), 4)
        start += len(content)
    return full_box(
        b"meta",
        full_box(b"hdlr", _HANDLER)
        + full_box(b"pitm", _number(_PICTURE))
        + full_box(b"iloc", b"\x44\0" + _number(len(contents)) + places)
        + full_box(b"iinf", _number(len(entries)) + infos)
        + _properties(pictures, data)
        + _references(coded),
    )


def _properties(pictures: list[CodedPicture], data: bytes) -> bytes:
    properties = [one for picture in pictures for one in picture.properties]
    associations = b""
    index = 0
    for item, picture in enumerate(pictures, _PICTURE):
        associations += _number(item) + bytes([len(picture.properties)])
        for one in picture.properties:
            index += 1
            associations += bytes([index | 0x80 if one.is_essential else index])
    return box(
        b"iprp",
        box(b"ipco", b"".join(_box_of(one, data) for one in properties))
        + full_box(b"ipma", _number(len(pictures), 4) + associations),
    )


def _box_of(one: Property, data: bytes) -> bytes:
    return box(one.kind, data[one.start : one.end])


def _references(coded: CodedPicture) -> bytes:
    if coded.alpha is None:
        return b""
    references = box(b"auxl", _number(_ALPHA) + _number(1) + _number(_PICTURE))
    if coded.is_premultiplied:
        references += box(b"prem", _number(_PICTURE) + _number(1) + _number(_ALPHA))
    return full_box(b"iref", references)


def _number(number: int, num_bytes: int = 2) -> bytes:
    return number.to_bytes(num_bytes, "big")
