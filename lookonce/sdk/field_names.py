"""The fields of decoders' errors by the names of the SDK's arguments: `regex` for the contract's `sampling.regex`."""

from __future__ import annotations

import re

from lookonce.errors import InvalidParameterError, LookonceError

# Beginnings of field paths in the contract, and what programs call them.
_BEGINNINGS = (
    ("sampling.", ""),
    ("chat.messages", "prompt"),
    ("chat.", ""),
    ("text.text", "prompt"),
    ("tokens.token_ids", "prompt"),
)
_PATH = re.compile(r"[a-z_]+(?:\[\d+\]|\.[a-z_]+)+")
# Other fields that a message names.
_OTHER_FIELD = re.compile(r"\b(?:cannot be combined with|with) sampling\.(?=[a-z])")


def in_arguments(error: LookonceError) -> LookonceError:
    """Gives an error of a decoder the name of the argument instead of the path in the contract.

    The path stays in `contract_field`, for programs that have names of their own. Other errors stay as they are.
    """
    path = error.message.partition(": ")[0]
    if not _PATH.fullmatch(path):
        return error
    for beginning, name in _BEGINNINGS:
        if path.startswith(beginning):
            own = name + path.removeprefix(beginning)
            rest = error.message.removeprefix(path)
            rest = _OTHER_FIELD.sub(lambda found: found[0].removesuffix("sampling."), rest)
            error.contract_field = path
            error.message = own + rest
            error.args = (error.message,)
            if isinstance(error, InvalidParameterError):
                error.field, error.description = own, rest.removeprefix(": ")
                error.metadata["field"] = own
            return error
    return error
