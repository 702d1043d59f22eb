"""Reads the items of a HEIC or AVIF file, their properties and references, from its `meta` box (ISO/IEC 23008-12).

No C library is involved, so a process that only needs a picture's size passes no hostile bytes to one. Content of items
is not read here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from lookonce.errors import ImageDecodeLimitError
from lookonce.media.boxes import Box, Reader, boxes, broken, check_entries

# The brands of files with pictures; a film has others.
_BRANDS = frozenset({b"mif1", b"mif2", b"msf1", b"miaf", b"heic", b"heix", b"heim", b"heis", b"avif", b"avis"})
# A picture of 192 tiles takes 10 kB, a colour profile some hundred.
_MAX_META_BYTES = 1 << 20
# A phone's picture has seven properties or fewer.
_MAX_PROPERTIES = 32
_IN_FILE, _IN_IDAT = 0, 1


class Property(NamedTuple):
    """One property of an item: the place of its content in the file, and whether a reader must understand it."""

    kind: bytes
    start: int
    end: int
    is_essential: bool


_ALPHA = frozenset({b"urn:mpeg:mpegB:cicp:systems:auxiliary:alpha", b"urn:mpeg:hevc:2015:auxid:1"})
# A version and flags, with which most boxes begin.
_FLAGS_BYTES = 4
_MAX_NAME_BYTES = 64


@dataclass(frozen=True, slots=True)
class _Location:
    # Places in the file, each as (start, end).
    spans: tuple[tuple[int, int], ...]
    # All of them are inside of the file.
    is_whole: bool


@dataclass(slots=True)
class Items:
    """The items of a file. Its methods raise ImageUndecodableError if the file lacks the item that they look for."""

    data: bytes
    primary_id: int = 0
    # Types of the items that are not encrypted.
    kinds: dict[int, bytes] = field(default_factory=dict)
    locations: dict[int, _Location] = field(default_factory=dict)
    # (kind, item) → the items that it refers to.
    references: dict[tuple[bytes, int], list[int]] = field(default_factory=dict)
    # Item → the item that holds its opacity.
    opacities: dict[int, int] = field(default_factory=dict)
    boxes_of_properties: list[Box] = field(default_factory=list)
    # Item → places in the list above, from 1, with the mark of an essential property.
    associations: dict[int, list[tuple[int, bool]]] = field(default_factory=dict)

    def kind(self, item: int) -> bytes:
        """The type of an item."""
        if item not in self.kinds:
            raise broken()
        return self.kinds[item]

    def properties(self, item: int) -> list[Property]:
        """The properties of an item in their order, which is that of its transformations."""
        places = self.associations.get(item, [])
        if len(places) > _MAX_PROPERTIES or any(index > len(self.boxes_of_properties) for index, _ in places):
            raise broken()
        # Index 0 stands for no property.
        return [Property(*self.boxes_of_properties[index - 1], mark) for index, mark in places if index]

    def spans(self, item: int) -> tuple[tuple[int, int], ...]:
        """The places of an item's content. Raises ImageUndecodableError if the file ends before it."""
        location = self.locations.get(item)
        if location is None or not location.is_whole:
            raise broken()
        return location.spans

    def referred(self, kind: bytes, item: int) -> list[int]:
        """The items that an item refers to in this way."""
        return self.references.get((kind, item), [])


def is_heif(data: bytes) -> bool:
    """Tells whether a file says that it holds HEIF pictures, which HEIC and AVIF files do."""
    if data[4:8] != b"ftyp":
        return False
    end = min(int.from_bytes(data[:4], "big"), len(data), 256)
    # The bytes 12 to 15 are a version.
    return any(data[start : start + 4] in _BRANDS for start in (8, *range(16, end, 4)))


def read_items(data: bytes) -> Items:
    """Reads the items of a file.

    Raises ImageUndecodableError for a broken structure, ImageDecodeLimitError for more of it than a picture needs.
    """
    meta = next((one for one in boxes_of_file(data) if one.kind == b"meta"), None)
    if meta is None:
        raise broken()
    parts = {one.kind: one for one in boxes(data, meta.start + 4, meta.end)}
    idat = parts.pop(b"idat", None)
    if sum(one.end - one.start for one in parts.values()) > _MAX_META_BYTES:
        raise ImageDecodeLimitError(
            f"the image file describes its parts in more than {_MAX_META_BYTES} bytes; save it without metadata"
        )
    items = Items(data)
    readers = {kind: Reader(data, one.start, one.end) for kind, one in parts.items()}
    if not {b"pitm", b"iinf", b"iloc", b"iprp"} <= readers.keys():
        raise broken()
    version, _ = readers[b"pitm"].version()
    items.primary_id = readers[b"pitm"].number(4 if version else 2)
    _read_kinds(items, readers[b"iinf"])
    _read_locations(items, readers[b"iloc"], idat)
    _read_properties(items, readers[b"iprp"])
    if b"iref" in readers:
        _read_references(items, readers[b"iref"])
        _read_opacities(items)
    return items


def boxes_of_file(data: bytes) -> Iterator[Box]:
    """Yields the outermost boxes up to the description of items; the pixels behind it may be cut off."""
    for one in boxes(data, 0, len(data)):
        yield one
        if one.kind == b"meta":
            return


def _read_kinds(items: Items, reader: Reader) -> None:
    version, _ = reader.version()
    reader.count(4 if version else 2)
    for one in boxes(items.data, reader.position, reader.end):
        entry = Reader(items.data, one.start, one.end)
        version, _ = entry.version()
        if one.kind != b"infe" or version < 2:
            continue
        item, protection, kind = entry.number(2 if version == 2 else 4), entry.number(2), entry.take(4)
        if not protection:
            items.kinds[item] = kind


def _read_locations(items: Items, reader: Reader, idat: Box | None) -> None:
    version, _ = reader.version()
    sizes = reader.number(2)
    offset_bytes, length_bytes, base_bytes, index_bytes = (sizes >> shift & 15 for shift in (12, 8, 4, 0))
    whole_file = Box(b"", 0, len(items.data))
    num_extents = 0
    for _ in range(reader.count(2 if version < 2 else 4)):
        item = reader.number(2 if version < 2 else 4)
        method = reader.number(2) & 15 if version else _IN_FILE
        file, base = reader.number(2), reader.number(base_bytes)
        # Content in other files, or in other items, is never read.
        place = {_IN_FILE: whole_file, _IN_IDAT: idat}.get(method) if file == 0 else None
        spans = []
        for _ in range(reader.count(2)):
            num_extents += 1
            check_entries(num_extents)
            reader.take(index_bytes if version else 0)
            offset, length = base + reader.number(offset_bytes), reader.number(length_bytes)
            if place is not None:
                start = place.start + offset
                # The length 0 stands for the rest of the file.
                spans.append((start, start + length if length else place.end))
        if place is not None and spans:
            items.locations[item] = _Location(tuple(spans), all(start < end <= place.end for start, end in spans))


def _read_properties(items: Items, reader: Reader) -> None:
    num_associations = 0
    for one in boxes(items.data, reader.position, reader.end):
        if one.kind == b"ipco":
            items.boxes_of_properties.extend(boxes(items.data, one.start, one.end))
        if one.kind != b"ipma":
            continue
        entries = Reader(items.data, one.start, one.end)
        version, flags = entries.version()
        for _ in range(entries.count(4)):
            item = entries.number(4 if version else 2)
            places = items.associations.setdefault(item, [])
            for _ in range(entries.number(1)):
                num_associations += 1
                # An item has some properties.
                check_entries(num_associations // 8)
                bits = 15 if flags & 1 else 7
                number = entries.number(2 if flags & 1 else 1)
                places.append((number & (1 << bits) - 1, bool(number >> bits)))


def _read_references(items: Items, reader: Reader) -> None:
    version, _ = reader.version()
    num_bytes = 4 if version else 2
    num_targets = 0
    for one in boxes(items.data, reader.position, reader.end):
        entry = Reader(items.data, one.start, one.end)
        source = entry.number(num_bytes)
        num_more = entry.count(2)
        check_entries(num_targets := num_targets + num_more)
        targets = [entry.number(num_bytes) for _ in range(num_more)]
        items.references.setdefault((one.kind, source), []).extend(targets)


def _read_opacities(items: Items) -> None:
    """Notes which items hold the opacity of which. Each property is read once, however many items have it."""
    marks = {index for index, one in enumerate(items.boxes_of_properties, 1) if _marks_opacity(items.data, one)}
    for (kind, source), targets in items.references.items():
        if kind == b"auxl" and any(index in marks for index, _ in items.associations.get(source, ())):
            for target in targets:
                items.opacities.setdefault(target, source)


def _marks_opacity(data: bytes, one: Box) -> bool:
    name = data[one.start + _FLAGS_BYTES : min(one.end, one.start + _MAX_NAME_BYTES)].partition(b"\0")[0]
    return one.kind == b"auxC" and name in _ALPHA
