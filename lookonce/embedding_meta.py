"""Shape and element type of one embedding, sent with its rows between encoder, cache and decoder."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class RowDtype(enum.Enum):
    """Element type of rows. Rows are always little-endian and row-major."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    # Each row has int8 elements after one float32 scale per level; store/int8_rows.py defines the layout.
    INT8_SCALED = "int8_scaled"

    @property
    def item_bytes(self) -> int:
        """Bytes of one element, without scales."""
        return _ITEM_BYTES[self]

    def row_bytes(self, hidden_size: int, num_levels: int) -> int:
        """Returns the bytes of one row with its levels, and with their scales if the type has them."""
        scale_bytes = 4 if self is RowDtype.INT8_SCALED else 0
        return (1 + num_levels) * (hidden_size * self.item_bytes + scale_bytes)


_ITEM_BYTES = {RowDtype.FLOAT32: 4, RowDtype.FLOAT16: 2, RowDtype.BFLOAT16: 2, RowDtype.INT8_SCALED: 1}


@dataclass(frozen=True, slots=True)
class EmbeddingMeta:
    """Shape of one embedding: `num_rows` rows of `(1 + num_levels) * hidden_size` elements."""

    # Rows of the embedding: the placeholder tokens of the prompt that take a row.
    num_rows: int
    # Width of one level of one row: the text model's hidden size.
    hidden_size: int
    # Extra feature levels stored beside the rows (deepstack), 0 for most families.
    num_levels: int
    dtype: RowDtype
    # Upright size of the original image in pixels; it determines the placeholder layout.
    image_width: int
    image_height: int
    # `file_tag` of each file that the rows were made from, at most two. Empty: not known. Not part of the shape.
    file_tags: tuple[bytes, ...] = field(default=(), repr=False, compare=False)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row with its levels."""
        return self.dtype.row_bytes(self.hidden_size, self.num_levels)

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows, without header and seals."""
        return self.num_rows * self.row_bytes
