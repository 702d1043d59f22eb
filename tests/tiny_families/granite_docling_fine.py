"""A tiny Granite Docling whose image processor chooses the fine connector: up to 3 tiles, 16 rows each."""

from __future__ import annotations

import functools

from tests.tiny_families import granite_docling

NAME = "granite_docling_fine"

build = functools.partial(granite_docling.build, most_tiles=3, is_fine=True)
load_processor = granite_docling.load_processor
