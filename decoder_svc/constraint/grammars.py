"""Compiles constraints with llguidance, and remembers the latest ones. Runs in the process with llguidance.

llguidance compiles lazily: a matcher checks the grammar at once and builds its automata as tokens come. Its limits
bound the work of each step and the memory of each constraint.
"""

from __future__ import annotations

import json
import pathlib
import re
import resource
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from decoder_svc.constraint.frames import Vocabulary
from decoder_svc.constraint.refusals import RefusedConstraintError, refused
from decoder_svc.constraint.schema.further_names import name_trials
from decoder_svc.constraint.schema.json_schema import parsed_schema
from decoder_svc.constraint.schema.place import place_of
from decoder_svc.scheduling.sampling_params import Constraint, ConstraintKind

# Matchers that are kept for the next request with the same constraint, and the sum of their texts.
_MAX_KEPT = 64
_MAX_KEPT_CHARS = 1024 * 1024
# Growth of the process at which they are dropped.
_MAX_KEPT_BYTES = 512 << 20
# Work for one mask: at most about 15 ms in the lexer and 3 ms in the parser (llguidance's own figures). A state takes
# about 0.7 KB.
_LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    # A text of 4,000 characters whose length is limited takes up to 30,000.
    max_lexer_states=250_000,
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
# Texts that many expressions allow. llguidance looks up their tokens, and tries the others one by one. A mask behind
# `[a-zA-Z ,.]{200,}`, whose state no mask before had, takes 0.06 ms with these and 0.38 ms without (2026-11-26).
_COMMON_TEXTS = ("[a-zA-Z0-9 ,.]{1,30}", "[a-zA-Z ]{1,20}", "[a-z]{1,20}")
# A backslash behind which nothing is escaped.
_LONE_BACKSLASH = re.compile(r"(?<!\\)(?:\\\\)*\\(?:\n|\Z)")
# Options of a rule, such as `max_tokens`, in front of its colon.
_RULE_OPTIONS = re.compile(r"^[ \t]*[?!]?\w+(?:\.-?\d+)?[ \t]*\[", re.MULTILINE)
# The flag by which spaces and comments in an expression do not count.
_FREE_SPACING = re.compile(r"\(\?[a-zA-Z]*x")
# Most tokens about which a constraint may leave no choice at once. llguidance splits such a text anew in each step,
# which takes 3 ms for so many.
_MAX_FORCED_TOKENS = 20_000
# Forced tokens that are computed to see that a constraint can be followed.
_NUM_TRIED = 8


class Grammars:
    """Compiles constraints for one tokenizer. Any thread may use it; llguidance gives up the interpreter meanwhile."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Raises ValueError if llguidance does not know the kind of tokenizer."""
        texts = [*LLTokenizer.general_slices(), *_COMMON_TEXTS]
        self.tokenizer = LLTokenizer(vocabulary.tokenizer_json, eos_token=vocabulary.end_token_id, slices=texts)
        # Tokens that are no text. A grammar can name them by their numbers.
        self.control_token_ids = frozenset(filter(self.tokenizer.is_special_token, range(self.tokenizer.vocab_size)))
        # By constraint, the least recently used one first.
        self._kept: OrderedDict[Constraint, LLMatcher] = OrderedDict()
        self._kept_chars = 0
        self._lock = threading.Lock()
        self._max_memory_bytes = memory_bytes() + _MAX_KEPT_BYTES

    def check(self, constraint: Constraint) -> None:
        """Compiles a constraint and computes a first mask. Raises RefusedConstraintError if that fails.

        Does nothing for one that is kept.
        """
        with self._lock:
            if constraint in self._kept:
                self._kept.move_to_end(constraint)
                return
        matcher = self.matcher(constraint)
        matcher.compute_bitmask()
        forced = matcher.compute_ff_tokens()
        if len(forced) > _MAX_FORCED_TOKENS:
            raise RefusedConstraintError("cannot be served: it leaves no choice about too long a text")
        for token_id in forced[:_NUM_TRIED]:
            matcher.consume_token(token_id)
            matcher.compute_bitmask()
        if matcher.is_error():
            raise refused(matcher.get_error())

    def matcher(self, constraint: Constraint, is_new: bool = False) -> LLMatcher:
        """Returns a matcher in its first state. Raises RefusedConstraintError if there can be none.

        Copies share the states of the automaton that any of them needed, which saves most of the work of a mask, but
        these are bounded. With `is_new`, the matcher shares nothing with earlier ones, and later ones share it.
        """
        with self._lock:
            kept = None if is_new else self._kept.get(constraint)
            if kept is not None:
                self._kept.move_to_end(constraint)
                return kept.deep_copy()
        try:
            matcher = self._compiled(constraint)
        except RefusedConstraintError as error:
            if constraint.kind is ConstraintKind.JSON_SCHEMA:
                raise self._with_place(constraint, str(error)) from None
            if constraint.kind is ConstraintKind.TOOL_CALLS:
                self._check_schemas(constraint)
            raise
        self._keep(constraint, matcher.deep_copy())
        return matcher

    def _compiled(self, constraint: Constraint) -> LLMatcher:
        schemas = _schemas(constraint)
        matcher = LLMatcher(self.tokenizer, _grammar(constraint, schemas), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise refused(matcher.get_error(), is_expression=constraint.kind is ConstraintKind.REGEX)
        for schema in schemas:
            self._check_names(schema)
        return matcher

    def _check_names(self, schema: Mapping[str, Any]) -> None:
        """Raises RefusedConstraintError for an object whose patterns allow no name but those of its properties."""
        for pattern, trial, beginning in name_trials(schema):
            grammar = LLMatcher.grammar_from_json_schema(trial, overrides=_JSON_OPTIONS)
            matcher = LLMatcher(self.tokenizer, grammar, log_level=0, limits=_LIMITS)
            matcher.try_consume_tokens(self.tokenizer.tokenize_bytes(beginning.encode()))
            matcher.compute_bitmask()
            if matcher.is_error():
                reason = (
                    f"patternProperties {pattern!r} beside properties allows no further name, which is not supported"
                )
                raise RefusedConstraintError(f"cannot be served: {reason}")

    def _with_place(self, constraint: Constraint, reason: str) -> RefusedConstraintError:
        def reason_of(part: Any) -> str | None:
            try:
                self._compiled(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(part)))
            except RefusedConstraintError as error:
                return str(error)
            return None

        try:
            place = place_of(json.loads(constraint.text), reason, reason_of)
        except (ValueError, RecursionError):
            return RefusedConstraintError(reason)
        return RefusedConstraintError(f"{reason} (at {place})" if place else reason)

    def _check_schemas(self, constraint: Constraint) -> None:
        """Raises RefusedConstraintError for the schema because of which a grammar of calls is refused."""
        for place, schema in json.loads(constraint.text)["schemas"]:
            alone = Constraint(ConstraintKind.JSON_SCHEMA, schema)
            try:
                self._compiled(alone)
            except RefusedConstraintError as error:
                raise RefusedConstraintError(f"{place}: {self._with_place(alone, str(error))}") from None

    def _keep(self, constraint: Constraint, matcher: LLMatcher) -> None:
        with self._lock:
            if constraint not in self._kept:
                self._kept_chars += len(constraint.text)
            self._kept[constraint] = matcher
            if memory_bytes() > self._max_memory_bytes:
                # The automata have grown. Answers keep theirs until they end.
                self._kept, self._kept_chars = OrderedDict({constraint: matcher}), len(constraint.text)
            while len(self._kept) > _MAX_KEPT or self._kept_chars > _MAX_KEPT_CHARS:
                dropped, _ = self._kept.popitem(last=False)
                self._kept_chars -= len(dropped.text)


def memory_bytes() -> int:
    """Returns the resident memory of this process."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _schemas(constraint: Constraint) -> list[dict[str, Any]]:
    """Returns the schemas in a constraint, in llguidance's words. Raises RefusedConstraintError."""
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        try:
            return [parsed_schema(constraint.text)]
        except json.JSONDecodeError as error:
            raise RefusedConstraintError(f"is no JSON: {error}") from None
        except RecursionError:
            raise RefusedConstraintError("is nested too deeply") from None
        except ValueError as error:
            raise refused(str(error)) from None
    if constraint.kind is ConstraintKind.TOOL_CALLS:
        try:
            return [parsed_schema(schema) for _, schema in json.loads(constraint.text)["schemas"]]
        except (ValueError, RecursionError):
            # `_check_schemas` finds the reason and its place.
            raise RefusedConstraintError("a schema cannot be served") from None
    return []


def _grammar(constraint: Constraint, schemas: Sequence[dict[str, Any]]) -> str:
    """Returns llguidance's form of a constraint, which has these schemas. Raises RefusedConstraintError."""
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            (schema,) = schemas
            return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)
        case ConstraintKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_JSON_OPTIONS)
        case ConstraintKind.CHOICE:
            return LLMatcher.grammar_from_lark(f"start: {' | '.join(map(json.dumps, json.loads(constraint.text)))}")
        case ConstraintKind.REGEX:
            return LLMatcher.grammar_from_regex(_checked_regex(constraint.text))
        case ConstraintKind.GRAMMAR:
            if "%json" in constraint.text:
                # Nothing would check such a schema.
                raise RefusedConstraintError("cannot have %json; use json_schema")
            if "%llguidance" in constraint.text or _RULE_OPTIONS.search(constraint.text):
                # Some have no effect, and others end an answer in the midst of a text.
                raise RefusedConstraintError("cannot have %llguidance, and no options in brackets behind a rule's name")
            return LLMatcher.grammar_from_lark(constraint.text)
        case ConstraintKind.TOOL_CALLS:
            return LLMatcher.grammar_from_lark(_grammar_of_calls(constraint.text, schemas))
        case ConstraintKind.FIXED_TOKENS:
            raise AssertionError("given tokens have no grammar")


def _checked_regex(text: str) -> str:
    """Returns a regular expression. Raises RefusedConstraintError for what llguidance would take for something else.

    It drops a backslash at the end, and writes an end of line as an escape, which ends no comment and is no space.
    """
    if _LONE_BACKSLASH.search(text):
        raise RefusedConstraintError("cannot be served: a backslash has no character behind it")
    if "\n" in text and _FREE_SPACING.search(text):
        raise RefusedConstraintError("cannot be served: lines are not supported with the flag x; write one line")
    return text


def named_control_ids(constraint: Constraint) -> frozenset[int]:
    """Returns the control tokens that a constraint names, and that its answer may have."""
    if constraint.kind is not ConstraintKind.TOOL_CALLS:
        return frozenset()
    return frozenset(json.loads(constraint.text)["control_token_ids"])


def _grammar_of_calls(text: str, schemas: Sequence[dict[str, Any]]) -> str:
    """Returns the grammar of an answer with calls, and the schemas in it."""
    rules = [json.loads(text)["grammar"]]
    for index, schema in enumerate(schemas):
        rules.append(f"json_{index}: %json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS})}")
    return "\n".join(rules)
