"""What one embedding looks like: the description that travels with rows between encoder, cache and decoder."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class RowDtype(enum.Enum):
    """Element type of rows, little-endian and row-major everywhere."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    # int8 after one float32 scale per level, in each row; int8_rows.py has the layout.
    INT8_SCALED = "int8_scaled"

    @property
    def item_bytes(self) -> int:
        """Bytes of one element, without scales."""
        return _ITEM_BYTES[self]

    def row_bytes(self, hidden_size: int, num_levels: int) -> int:
        """Bytes of one row with its levels and, where the type has them, their scales."""
        scale_bytes = 4 if self is RowDtype.INT8_SCALED else 0
        return (1 + num_levels) * (hidden_size * self.item_bytes + scale_bytes)


_ITEM_BYTES = {RowDtype.FLOAT32: 4, RowDtype.FLOAT16: 2, RowDtype.BFLOAT16: 2, RowDtype.INT8_SCALED: 1}


@dataclass(frozen=True, slots=True)
class EmbeddingMeta:
    """Shape of one embedding: `num_rows` rows of `(1 + num_levels) * hidden_size` elements."""

    # Rows of the embedding, i.e. placeholder tokens that take a row in the prompt.
    num_rows: int
    # Width of one level of one row: the text model's hidden size.
    hidden_size: int
    # Extra feature levels stored beside the rows (deepstack), 0 for most families.
    num_levels: int
    dtype: RowDtype
    # Upright size of the original image in pixels; fixes the placeholder layout.
    image_width: int
    image_height: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row with its levels."""
        return self.dtype.row_bytes(self.hidden_size, self.num_levels)

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows, without header and seals."""
        return self.num_rows * self.row_bytes
