"""Forged values by an attacker who knows the format and seals them: changed headers and invented entries."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from hypothesis import strategies as st

from lookonce.content_key import ContentKey
from lookonce.embedding_meta import EmbeddingMeta, RowDtype
from lookonce.store.codec import HEADER_BYTES, EmbeddingCodec
from lookonce.store.sealing import Sealer
from tests.lookonce.store.entries import make_rows, pack_entry

# Offsets and sizes of the fields of an entry, as in the codec. Metadata has those before `row bytes`, too.
FIELDS = {
    "magic": (0, "<8s"),
    "version": (8, "<H"),
    "seal kind": (10, "<H"),
    "key": (12, "<32s"),
    "dtype": (44, "<B"),
    "rows": (48, "<I"),
    "hidden size": (52, "<I"),
    "levels": (56, "<I"),
    "image width": (60, "<I"),
    "row bytes": (68, "<I"),
    "block rows": (72, "<I"),
    "blocks": (76, "<I"),
    "payload bytes": (80, "<Q"),
    "nonce": (88, "<16s"),
    "created": (104, "<Q"),
    "second seal": (120, "<8s"),
}
METADATA_BYTES = 68


def reseal(record: bytes, sealer: Sealer) -> bytes:
    """Returns the record with the seal of its present content."""
    unsealed = record[: len(record) - sealer.record_seal_bytes]
    return unsealed + sealer.seal_record(unsealed)


def changed_fields(record: bytes, size: int) -> st.SearchStrategy[bytes]:
    """Draws the record with one to four of the fields in its first `size` bytes changed."""

    def one(name: str) -> st.SearchStrategy[tuple[int, bytes]]:
        offset, form = FIELDS[name]
        width = struct.calcsize(form)
        if form.endswith("s"):
            return st.binary(min_size=width, max_size=width).map(lambda data: (offset, data))
        (true,) = struct.unpack_from(form, record, offset)
        largest = (1 << 8 * width) - 1
        near = [0, 1, true - 1, true, true + 1, 2 * true, true // 2, 4 * true, largest // 2, largest]
        numbers = st.sampled_from([number for number in near if 0 <= number <= largest]) | st.integers(0, largest)
        return numbers.map(lambda number: (offset, struct.pack(form, number)))

    names = [name for name, (offset, _) in FIELDS.items() if offset < size]

    def put(changes: list[tuple[int, bytes]]) -> bytes:
        changed = bytearray(record)
        for offset, data in changes:
            changed[offset : offset + len(data)] = data
        return bytes(changed)

    return st.lists(st.sampled_from(names).flatmap(one), min_size=1, max_size=4).map(put)


def forged_headers(entry: bytes, sealer: Sealer) -> st.SearchStrategy[bytes]:
    """Draws our rows behind a changed and resealed header, with the length that the header states."""

    def forged(header: bytes, is_consistent: bool, fits: bool) -> bytes:
        changed = bytearray(header)
        if is_consistent:
            code, num_rows, hidden_size, num_levels = struct.unpack_from("<B3xIII", changed, 44)
            (block_rows,) = struct.unpack_from("<I", changed, 72)
            row_bytes = (1 + num_levels) * hidden_size * (4 if code == 1 else 2)
            numbers = row_bytes, block_rows, -(-num_rows // max(1, block_rows)), num_rows * row_bytes
            struct.pack_into("<IIIQ", changed, 68, *(number % (1 << 32) for number in numbers))
        payload = entry[HEADER_BYTES:]
        (payload_bytes,) = struct.unpack_from("<Q", changed, 80)
        if fits and payload_bytes < 1 << 16:
            payload = payload[:payload_bytes].ljust(payload_bytes, b"\0")
        return reseal(bytes(changed), sealer) + payload

    return st.builds(forged, changed_fields(entry[:HEADER_BYTES], 128), st.booleans(), st.booleans())


def forged_entries(key: ContentKey, usual: EmbeddingMeta, sealers: Sequence[Sealer]) -> st.SearchStrategy[bytes]:
    """Draws entries that the forger invented, correct except for the key that sealed them."""
    shapes = st.just(usual) | st.builds(
        EmbeddingMeta,
        num_rows=st.integers(1, 40),
        hidden_size=st.sampled_from([3, 6, 12]),
        num_levels=st.integers(0, 2),
        dtype=st.sampled_from(RowDtype),
        image_width=st.integers(1, 100),
        image_height=st.integers(1, 100),
    )
    return st.builds(
        lambda sealer, meta, seed: pack_entry(
            EmbeddingCodec(sealer), key.value, meta, make_rows(meta, seed), seed.to_bytes(16, "little")
        ),
        st.sampled_from(sealers),
        shapes,
        st.integers(3, 1 << 32),
    )
