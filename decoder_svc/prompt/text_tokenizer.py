"""The model folder's tokenizer, made safe against control tokens spelled in users' text.

A control token is an added token of the tokenizer (`<image>`, `<|im_end|>`, …). In text that a user wrote, its spelling
must stay plain text. To ensure that, a second copy of the tokenizer knows every control token by a random alias only.
Control tokens in trusted text are replaced by their aliases, user text stays as it is, and everything is tokenized in
one pass. So no spelling of a control token (split over parts, with Unicode look-alikes that a normaliser folds, …)
reaches its id, and the text around it is tokenized as if the control token did not exist.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer

from decoder_svc.constraint.folder_vocabulary import is_masked
from lookonce.errors import InvalidParameterError, ModelFolderError
from lookonce.logs import get_logger
from lookonce.model.libraries.rust_panics import call_rust

# Digits survive every normaliser and every case filter of a chat template. 10^32 values cannot be guessed.
_NONCE_DIGITS = 32

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A stretch of a prompt's text."""

    text: str
    # True: control tokens spelled in it count (the template's text). False: they are plain text (a user's text).
    is_trusted: bool


class TextTokenizer:
    """Tokenizes and detokenizes; safe to use from several threads at once."""

    def __init__(self, pretrained: Any) -> None:
        """`pretrained` is a fast tokenizer from transformers. Raises ModelFolderError if it cannot be made safe."""
        state = json.loads(pretrained.backend_tokenizer.to_str())
        state["truncation"] = state["padding"] = None
        # The unchanged tokenizer, for trusted text and for decoding.
        self.backend: Tokenizer = Tokenizer.from_str(json.dumps(state))
        self.bos_token: str | None = pretrained.bos_token
        self.eos_token_id: int | None = pretrained.eos_token_id
        self._aliased = _AliasedTokenizer(state)
        # Ids that are omitted from generated text.
        self.special_token_ids = frozenset(token["id"] for token in state["added_tokens"] if token["special"])
        # Control tokens for structured output, by their text; `tokenizer_vocabulary` gives the same ones other names.
        self._masked_ids = {
            str(token["content"]): int(token["id"]) for token in state["added_tokens"] if is_masked(token)
        }
        vocabulary = self.backend.get_vocab()
        self._ids = frozenset(vocabulary.values())
        # Characters of the longest token. Gives a lower bound for the number of tokens of a text.
        self.longest_token_chars = max((len(token) for token in vocabulary), default=1)

    def encode_trusted(self, text: str, *, is_complete: bool = False) -> list[int]:
        """Tokenizes a rendered prompt, in which control tokens count.

        Adds BOS and similar tokens, unless the text `is_complete` or begins with BOS. Raises InvalidParameterError if
        the tokenizer fails on the text.
        """
        has_special_tokens = not is_complete and not self._has_bos(text)
        return list(_encoding(self.backend, text, has_special_tokens, "text.text").ids)

    def encode_pieces(self, pieces: Sequence[TextPiece], *, is_complete: bool = False) -> list[int]:
        """Tokenizes the joined text of all pieces, with control tokens from the trusted pieces only.

        Adds BOS and similar tokens, unless the text `is_complete` or begins with BOS.

        Ordinary text has the ids that transformers gives. Raises InvalidParameterError if a user's text cannot be
        encoded without a control token's id, or the tokenizer fails on it.
        """
        has_bos = bool(pieces) and pieces[0].is_trusted and self._has_bos(pieces[0].text)
        return self._aliased.encode(pieces, add_special_tokens=not has_bos and not is_complete)

    def control_id(self, text: str) -> int | None:
        """Returns the id of a text that is a control token for structured output; None for any other text."""
        return self._masked_ids.get(text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Returns the text of ids from the vocabulary; incomplete characters become U+FFFD.

        Raises RustPanicError if the tokenizer panics.
        """
        return str(call_rust(self.backend.decode, list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the text of each token where it follows another one, control tokens included.

        Decoded alone, the token of a word would lack the space before it in many tokenizers.
        """
        return [self._text_after_another(token_id) for token_id in token_ids]

    def _text_after_another(self, token_id: int) -> str:
        alone, twice = (self.decode([token_id] * count, skip_special_tokens=False) for count in (1, 2))
        return twice.removeprefix(alone) if len(twice) > len(alone) else alone

    def unknown_ids(self, token_ids: Sequence[int]) -> frozenset[int]:
        """Returns those of the ids that are not in the vocabulary."""
        return frozenset(token_ids) - self._ids

    def _has_bos(self, text: str) -> bool:
        return bool(self.bos_token) and text.startswith(str(self.bos_token))


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Plain text or one control token in the text of a prompt."""

    text: str
    # The alias to write in place of `text`; None for plain text.
    alias: str | None = None


class _AliasedTokenizer:
    """A copy of a tokenizer in which control tokens have secret names.

    The copy numbers its tokens on its own and without gaps: the model's tokens first, then the added ones. So the id of
    an added token is never the id of another token, and a table leads back to the original ids.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        """`state` is the tokenizer's JSON; it is not changed. Raises ModelFolderError if a token cannot be copied."""
        model, self._original_ids = _numbered_without_gaps(state["model"])
        self._tokenizer = Tokenizer.from_str(json.dumps({**state, "model": model, "added_tokens": []}))
        controls = [token for token in state["added_tokens"] if _is_control(token)]
        self._control_content = self._contents_in_vocabulary(controls, _unknown_ids(state))
        nonce = str(secrets.randbelow(9 * 10 ** (_NONCE_DIGITS - 1)) + 10 ** (_NONCE_DIGITS - 1))
        self._alias_of = {token["content"]: f"{nonce}{index:06d}" for index, token in enumerate(controls)}
        self._single_words = frozenset(token["content"] for token in controls if token["single_word"])
        self._add(state["added_tokens"])
        self._alias_ids = frozenset(self._tokenizer.token_to_id(alias) for alias in self._alias_of.values())
        self._check_aliases(state)
        longest_first = sorted(self._alias_of, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def encode(self, pieces: Sequence[TextPiece], *, add_special_tokens: bool) -> list[int]:
        """Returns ids in the original tokenizer's numbering."""
        stretches = [stretch for piece in pieces for stretch in self._stretches(piece)]
        while True:
            text = "".join(stretch.alias or stretch.text for stretch in stretches)
            encoding = _encoding(self._tokenizer, text, add_special_tokens, "chat.messages")
            hidden = self._hidden_aliases(stretches, encoding)
            if not hidden:
                return self._in_original_numbering(encoding)
            # The normaliser can hide a control token at some places. There it is plain text, as in the original.
            stretches = [
                replace(stretch, alias=None) if index in hidden else stretch for index, stretch in enumerate(stretches)
            ]

    def _contents_in_vocabulary(self, controls: Sequence[dict[str, Any]], unknown_ids: Sequence[int]) -> dict[int, str]:
        """Returns the control tokens whose text is an ordinary token of the model as well, by the copy's id of that.

        The unknown token may stand for an unknown character in any text, so it is allowed in users' text.
        """
        content_of = {token["id"]: str(token["content"]) for token in controls if token["id"] not in unknown_ids}
        return {
            own_id: content_of[original_id]
            for own_id, original_id in enumerate(self._original_ids)
            if original_id in content_of
        }

    def _add(self, added: Sequence[dict[str, Any]]) -> None:
        """Adds all tokens, control tokens under their aliases, and continues the table of original ids."""
        tokens = []
        for token in added:
            flags = {flag: token[flag] for flag in ("lstrip", "rstrip", "normalized", "special", "single_word")}
            alias = self._alias_of.get(token["content"])
            if alias is not None:
                # An alias ends in digits, so that none would be a single word. `_stretches` looks at the neighbours.
                flags["single_word"] = False
            tokens.append(AddedToken(alias or token["content"], **flags))
        self._tokenizer.add_tokens(tokens)
        for token, copied in zip(added, tokens, strict=True):
            own_id = self._tokenizer.token_to_id(copied.content)
            if own_id == len(self._original_ids):
                self._original_ids.append(token["id"])
            elif own_id is None or self._original_ids[own_id : own_id + 1] != [token["id"]]:
                raise ModelFolderError(f"the tokenizer's added token {token['content']!r} cannot be copied")

    def _check_aliases(self, state: dict[str, Any]) -> None:
        """Raises ModelFolderError if the original tokenizer finds a control token, but the copy not its alias."""
        original = Tokenizer.from_str(json.dumps(state))
        for content, alias in self._alias_of.items():
            is_found = original.token_to_id(content) in original.encode(content, add_special_tokens=False).ids
            found = self._tokenizer.encode(alias, add_special_tokens=False).ids
            if is_found and self._tokenizer.token_to_id(alias) not in found:
                raise ModelFolderError(
                    f"the tokenizer's normalizer changes digits; control token {content!r} cannot be told from text"
                )

    def _stretches(self, piece: TextPiece) -> list[_Stretch]:
        """Cuts a piece into plain text and control tokens."""
        if not piece.is_trusted:
            return [_Stretch(piece.text)]
        stretches: list[_Stretch] = []
        end = 0
        for match in self._control_pattern.finditer(piece.text):
            # Only neighbours in the same piece count: no text of a user switches off a control token of the template.
            if match[0] in self._single_words and _touches_word(match):
                continue
            stretches += (_Stretch(piece.text[end : match.start()]), _Stretch(match[0], self._alias_of[match[0]]))
            end = match.end()
        return [*stretches, _Stretch(piece.text[end:])]

    def _hidden_aliases(self, stretches: Sequence[_Stretch], encoding: Encoding) -> set[int]:
        """Returns the indices of the stretches whose alias the tokenizer did not find."""
        num_aliases = sum(stretch.alias is not None for stretch in stretches)
        found = [
            index
            for index, (token_id, is_post_processed) in enumerate(
                zip(encoding.ids, encoding.special_tokens_mask, strict=True)
            )
            if token_id in self._alias_ids and not is_post_processed
        ]
        if len(found) == num_aliases:
            return set()
        offsets = encoding.offsets
        covered = {position for index in found for position in range(*offsets[index])}
        hidden: set[int] = set()
        start = 0
        for index, stretch in enumerate(stretches):
            if stretch.alias is not None and start not in covered:
                hidden.add(index)
            start += len(stretch.alias or stretch.text)
        if not hidden:
            raise InvalidParameterError("chat.messages", "this model's tokenizer cannot place the control tokens")
        return hidden

    def _in_original_numbering(self, encoding: Encoding) -> list[int]:
        ids: list[int] = []
        for token_id, is_post_processed in zip(encoding.ids, encoding.special_tokens_mask, strict=True):
            if is_post_processed:
                # The post-processor has ids of its own, which are the original ones.
                ids.append(token_id)
            elif token_id in self._control_content:
                ids.extend(self._spelled_out(token_id))
            else:
                ids.append(self._original_ids[token_id])
        return ids

    def _spelled_out(self, token_id: int) -> list[int]:
        """Returns the original ids of a control token's characters, for a control token in the model's vocabulary."""
        content = self._control_content[token_id]
        ids = [found for char in content for found in self._tokenizer.encode(char, add_special_tokens=False).ids]
        if not self._control_content.keys().isdisjoint(ids):
            raise InvalidParameterError("chat.messages", f"{content!r} cannot be plain text for this model's tokenizer")
        return [self._original_ids[found] for found in ids]


def _encoding(tokenizer: Tokenizer, text: str, add_special_tokens: bool, field: str) -> Encoding:
    """Tokenizes a caller's text. Raises InvalidParameterError naming `field` if the tokenizer fails on this text.

    Tokenizers were tried on other texts when they were loaded. Some have no token for some characters, and some have
    tables that end too early, which makes them panic.
    """
    try:
        # `encode` keeps all other threads of the interpreter waiting until it ends, 1 s per megabyte; this does not.
        (encoding,) = call_rust(tokenizer.encode_batch, [text], add_special_tokens=add_special_tokens)
        return encoding
    except MemoryError:
        raise
    except Exception as error:
        # Without the error's text and traceback, which may quote the prompt.
        _log.warning("the tokenizer failed on a text", error=type(error).__name__, num_chars=len(text))
        raise InvalidParameterError(field, "has text that this model's tokenizer cannot encode; change it") from None


def _numbered_without_gaps(model: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Returns a tokenizer's model with ids from 0 on, and the original id of each."""
    vocabulary = model["vocab"]
    if not isinstance(vocabulary, dict):
        # A Unigram model is a list: each token's id is its index.
        return model, list(range(len(vocabulary)))
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    numbered = {token: own_id for own_id, token in enumerate(tokens)}
    return {**model, "vocab": numbered}, [vocabulary[token] for token in tokens]


def _touches_word(match: re.Match[str]) -> bool:
    """Whether a letter, digit or underscore is next to a match."""
    before = match.string[max(match.start() - 1, 0) : match.start()]
    after = match.string[match.end() : match.end() + 1]
    return any(char == "_" or char.isalnum() for char in before + after)


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
