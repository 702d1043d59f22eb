"""Compiles the constraints of requests with llguidance, and remembers the latest ones. Knows no requests.

llguidance compiles lazily: a matcher checks the grammar at once and builds its automata as tokens come. Its limits
bound the work of each step and the memory, so a hostile grammar ends its own request only.
"""

from __future__ import annotations

import json
import pathlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer

from decoder_svc.constraint.json_schema import parsed_schema
from decoder_svc.scheduling.sampling_params import Constraint, ConstraintKind
from lookonce.errors import InvalidParameterError
from lookonce.model.pretrained_tokenizer import load_pretrained

# Matchers that are kept for the next request with the same constraint, and the sum of their texts.
_MAX_KEPT = 64
_MAX_KEPT_CHARS = 1024 * 1024
# Work for one mask: at most about 15 ms in the lexer and 3 ms in the parser (llguidance's own figures). Automata of at
# most 50 MB per constraint.
_LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=25_000,
    max_grammar_size=200_000,
    # Errors would repeat the grammar and the parser's state.
    verbose_errors=False,
)
# One way to write each value: as many tokens as possible are forced, and no answer ends in endless white space.
# A TypedDict of llguidance that exists for type checkers alone.
_JSON_OPTIONS: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    # A keyword that is not supported is an error, whatever the schema says, and `oneOf` is not taken for `anyOf`.
    "lenient": False,
    "coerce_one_of": False,
    # Each text has one way to be written, so that no name of a property can be written in another one.
    "json_allowed_escapes": '"\\bfnrt',
    "json_allow_general_unicode_escapes": False,
}
_MAX_REASON_CHARS = 300


class Grammars:
    """Compiles constraints for one tokenizer. Any thread may use it; calls may take some tens of milliseconds."""

    def __init__(self, load_tokenizer: Callable[[], LLTokenizer]) -> None:
        """`load_tokenizer` is called once, for the first constraint: it takes up to a second."""
        self._load_tokenizer = load_tokenizer
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        # By constraint, the least recently used one first.
        self._kept: OrderedDict[Constraint, LLMatcher] = OrderedDict()
        self._kept_chars = 0
        self._kept_lock = threading.Lock()

    @property
    def end_token_ids(self) -> list[int]:
        """The tokens that matchers take for the end of an answer."""
        return self._loaded_tokenizer().eos_tokens

    def check(self, constraint: Constraint) -> None:
        """Raises InvalidParameterError with the reason if the constraint cannot be compiled."""
        self.matcher(constraint)

    def matcher(self, constraint: Constraint) -> LLMatcher:
        """Returns a matcher in its first state. Raises InvalidParameterError with the reason if there can be none."""
        with self._kept_lock:
            kept = self._kept.get(constraint)
            if kept is not None:
                self._kept.move_to_end(constraint)
                return kept.deep_copy()
        matcher = self._compiled(constraint)
        with self._kept_lock:
            if constraint not in self._kept:
                self._kept[constraint] = matcher.deep_copy()
                self._kept_chars += len(constraint.text)
                while len(self._kept) > _MAX_KEPT or self._kept_chars > _MAX_KEPT_CHARS:
                    dropped, _ = self._kept.popitem(last=False)
                    self._kept_chars -= len(dropped.text)
        return matcher

    def _compiled(self, constraint: Constraint) -> LLMatcher:
        grammar = _grammar(constraint)
        matcher = LLMatcher(self._loaded_tokenizer(), grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise _refusal(constraint, matcher.get_error())
        return matcher

    def _loaded_tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = self._load_tokenizer()
            return self._tokenizer


def folder_grammars(folder: pathlib.Path) -> Grammars:
    """Returns the grammars for the tokenizer of a model folder, which is loaded for the first constraint."""
    return Grammars(lambda: from_tokenizer(load_pretrained(folder)))


def _grammar(constraint: Constraint) -> str:
    """Returns llguidance's form of a constraint. Raises InvalidParameterError for a text that is no JSON."""
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            try:
                return LLMatcher.grammar_from_json_schema(_schema(constraint), overrides=_JSON_OPTIONS)
            except ValueError as error:
                raise _refusal(constraint, str(error)) from None
        case ConstraintKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_JSON_OPTIONS)
        case ConstraintKind.CHOICE:
            return LLMatcher.grammar_from_lark(f"start: {' | '.join(map(json.dumps, json.loads(constraint.text)))}")
        case ConstraintKind.REGEX:
            return LLMatcher.grammar_from_regex(constraint.text)
        case ConstraintKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(constraint.text)


def _schema(constraint: Constraint) -> dict[str, Any]:
    """Returns the schema of a constraint. Raises InvalidParameterError for a text that is none."""
    try:
        return parsed_schema(constraint.text)
    except json.JSONDecodeError as error:
        raise InvalidParameterError(_field(constraint), f"is no JSON: {error}") from None
    except RecursionError:
        raise InvalidParameterError(_field(constraint), "is nested too deeply") from None
    except ValueError as error:
        raise _refusal(constraint, str(error)) from None


def _refusal(constraint: Constraint, reason: str) -> InvalidParameterError:
    # The reason quotes the place and its lines. It is about the caller's own text, and goes into one line.
    shown = " ".join(reason.split())
    if len(shown) > _MAX_REASON_CHARS:
        shown = f"{shown[:_MAX_REASON_CHARS]}…"
    return InvalidParameterError(_field(constraint), f"cannot be served: {shown}")


def _field(constraint: Constraint) -> str:
    return f"sampling.{constraint.kind.value}"
