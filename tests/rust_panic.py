"""Real panics of a library in Rust, on certain texts or on certain tokens."""

from __future__ import annotations

import base64
import json
import pathlib
import struct
from typing import Any

from tokenizers import Tokenizer, decoders, models


def panic() -> BaseException:
    """Returns the exception of a tokenizer whose decoder strips more characters than a token has."""
    tokenizer = Tokenizer(models.WordLevel({" ": 0}, unk_token=" "))
    tokenizer.decoder = decoders.Strip(" ", 1, 1)
    try:
        tokenizer.decode([0])
    except BaseException as error:
        return error
    raise AssertionError("the tokenizer does not panic any more")


# A text with a byte (0xEF, the first of the ligature in UTF-8) that the table below has no place for, and one without.
PANICKING_TEXT, GOOD_TEXT = "an eﬃcient zebra", "an efficient zebra"


def with_short_table(state: dict[str, Any], num_entries: int = 230) -> dict[str, Any]:
    """Returns a tokenizer's state with a normaliser of SentencePiece whose table was cut off behind so many entries."""
    table = struct.pack("<I", 4 * num_entries) + bytes(4 * num_entries)
    return state | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}}


def change_tokenizer(folder: pathlib.Path, **parts: Any) -> None:
    """Changes parts of the tokenizer of a model folder."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
