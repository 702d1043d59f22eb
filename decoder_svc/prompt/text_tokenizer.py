"""The model folder's tokenizer, made safe against control tokens spelled in users' text.

A control token is an added token of the tokenizer (`<image>`, `<|im_end|>`, …). In text that a user wrote, its spelling
must stay plain text. To ensure that, a second copy of the tokenizer knows every control token by a random alias only.
Control tokens in trusted text are replaced by their aliases, user text stays as it is, and everything is tokenized in
one pass. So no spelling of a control token (split over parts, with Unicode look-alikes that a normaliser folds, …)
reaches its id, and the text around it is tokenized as if the control token did not exist.
"""

from __future__ import annotations

import json
import pathlib
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer

from lookonce.errors import InvalidParameterError, ModelFolderError

# Digits survive every normaliser and every case filter of a chat template. 10^32 values cannot be guessed.
_NONCE_DIGITS = 32


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A stretch of a prompt's text."""

    text: str
    # True: control tokens spelled in it count (the template's text). False: they are plain text (a user's text).
    is_trusted: bool


class TextTokenizer:
    """Tokenizes and detokenizes; safe to use from several threads at once."""

    def __init__(self, pretrained: Any) -> None:
        """`pretrained` is a fast tokenizer from transformers."""
        state = json.loads(pretrained.backend_tokenizer.to_str())
        state["truncation"] = state["padding"] = None
        # The unchanged tokenizer, for trusted text and for decoding.
        self.backend: Tokenizer = Tokenizer.from_str(json.dumps(state))
        self.bos_token: str | None = pretrained.bos_token
        self.eos_token_id: int | None = pretrained.eos_token_id
        self._aliased = _AliasedTokenizer(state)
        # Ids that are omitted from generated text.
        self.special_token_ids = frozenset(token["id"] for token in state["added_tokens"] if token["special"])
        vocabulary = self.backend.get_vocab()
        self._ids = frozenset(vocabulary.values())
        # Characters of the longest token. Gives a lower bound for the number of tokens of a text.
        self.longest_token_chars = max((len(token) for token in vocabulary), default=1)

    def encode_trusted(self, text: str, *, is_complete: bool = False) -> list[int]:
        """Tokenizes a rendered prompt, in which control tokens count.

        Adds BOS and similar tokens, unless the text `is_complete` or begins with BOS.
        """
        return list(self.backend.encode(text, add_special_tokens=not is_complete and not self._has_bos(text)).ids)

    def encode_pieces(self, pieces: Sequence[TextPiece]) -> list[int]:
        """Tokenizes the joined text of all pieces, with control tokens from the trusted pieces only.

        Raises InvalidParameterError if a user's text cannot be encoded without a control token's id.
        """
        has_bos = bool(pieces) and pieces[0].is_trusted and self._has_bos(pieces[0].text)
        return self._aliased.encode(pieces, add_special_tokens=not has_bos)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Returns the text of ids from the vocabulary; incomplete characters become U+FFFD."""
        return str(self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def unknown_ids(self, token_ids: Sequence[int]) -> frozenset[int]:
        """Returns those of the ids that are not in the vocabulary."""
        return frozenset(token_ids) - self._ids

    def _has_bos(self, text: str) -> bool:
        return bool(self.bos_token) and text.startswith(str(self.bos_token))


def load_pretrained(folder: pathlib.Path) -> Any:
    """Loads the folder's fast tokenizer with transformers, without running code from the folder.

    Raises ModelFolderError if there is none.
    """
    from transformers import AutoTokenizer

    try:
        pretrained = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelFolderError(f"the tokenizer of {folder.name} cannot be loaded: {type(error).__name__}") from error
    if not pretrained.is_fast:
        raise ModelFolderError(f"{folder.name} has no fast tokenizer (tokenizer.json)")
    return pretrained


class _AliasedTokenizer:
    """A copy of a tokenizer in which control tokens have secret names."""

    def __init__(self, state: dict[str, Any]) -> None:
        """`state` is the tokenizer's JSON; it is not changed."""
        added = state["added_tokens"]
        self._tokenizer = Tokenizer.from_str(json.dumps({**state, "added_tokens": []}))
        nonce = str(secrets.randbelow(9 * 10 ** (_NONCE_DIGITS - 1)) + 10 ** (_NONCE_DIGITS - 1))
        self._alias_of: dict[str, str] = {}
        self._id_of_name: dict[str, int] = {}
        self._control_content: dict[int, str] = {}
        for index, token in enumerate(added):
            name = f"{nonce}{index:06d}" if _is_control(token) else str(token["content"])
            self._add(token, name)
        longest_first = sorted(self._alias_of, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        # The unknown token may stand for an unknown character in any text, so it is allowed in users' text.
        for unknown_id in _unknown_ids(state):
            self._control_content.pop(unknown_id, None)

    def encode(self, pieces: Sequence[TextPiece], *, add_special_tokens: bool) -> list[int]:
        """Returns ids in the original tokenizer's numbering."""
        text = "".join(self._with_aliases(piece.text) if piece.is_trusted else piece.text for piece in pieces)
        return self._original_ids(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def _add(self, token: dict[str, Any], name: str) -> None:
        flags = {flag: token[flag] for flag in ("lstrip", "rstrip", "normalized", "special")}
        is_control = name != token["content"]
        self._tokenizer.add_tokens(
            [AddedToken(name, single_word=False if is_control else token["single_word"], **flags)]
        )
        self._id_of_name[name] = token["id"]
        if is_control:
            self._alias_of[token["content"]] = name
            self._control_content[token["id"]] = token["content"]

    def _with_aliases(self, text: str) -> str:
        return self._control_pattern.sub(lambda match: self._alias_of[match[0]], text)

    def _original_ids(self, encoding: Encoding) -> list[int]:
        """Maps an encoding of the copy to original ids by token text: the copy's ids of added tokens are arbitrary."""
        ids: list[int] = []
        rows = zip(encoding.ids, encoding.tokens, encoding.special_tokens_mask, strict=True)
        for token_id, token, is_post_processed in rows:
            original_id = self._id_of_name.get(token)
            if original_id is None:
                # A control token that strips its surroundings includes their white space, and a normalised token
                # includes the normaliser's sign for a space.
                original_id = self._id_of_name.get(token.strip().strip("▁"))
            if original_id is not None:
                ids.append(original_id)
            elif token_id in self._control_content and not is_post_processed:
                ids.extend(self._spelled_out(token_id))
            else:
                ids.append(token_id)
        return ids

    def _spelled_out(self, token_id: int) -> list[int]:
        """Returns the ids of a control token's characters, for vocabularies with its text as an ordinary token."""
        content = self._control_content[token_id]
        ids = [found for char in content for found in self._tokenizer.encode(char, add_special_tokens=False).ids]
        if not self._control_content.keys().isdisjoint(ids):
            raise InvalidParameterError("chat.messages", f"{content!r} cannot be plain text for this model's tokenizer")
        return ids


def _is_control(token: dict[str, Any]) -> bool:
    """Whether an added token is a control token: all are, except ordinary ones of white space only."""
    return bool(token["special"]) or not str(token["content"]).replace("▁", " ").isspace()


def _unknown_ids(state: dict[str, Any]) -> list[int]:
    """Returns the id of the unknown token, as a list of one or none."""
    model = state["model"]
    if model.get("unk_id") is not None:
        return [model["unk_id"]]
    vocabulary = model.get("vocab")
    unknown = model.get("unk_token")
    return [vocabulary[unknown]] if isinstance(vocabulary, dict) and unknown in vocabulary else []
