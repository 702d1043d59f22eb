"""The fields of requests: each is honoured, a label without effect on the answer, or refused. None is ignored."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from lookonce.errors import InvalidParameterError

Rule: TypeAlias = Literal["honoured", "label", "refused"]
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class Field:
    """The treatment of one field. The tables of fields are also the conformance table of the documentation."""

    rule: Rule
    # Text for the documentation.
    note: str = ""
    # Values that a refused field may have, since they ask for nothing. None is always one.
    neutral: tuple[object, ...] = ()


HONOURED = Field("honoured")
LABEL = Field("label", "Names the caller or the conversation; has no effect on the answer.")

# Sampling and more that OpenAI does not have, under the names of the SDK's options.
EXTENSIONS: Mapping[str, Field] = {
    "top_k": Field("honoured", "Extension: samples from this many most likely tokens."),
    "min_p": Field("honoured", "Extension: drops tokens below this share of the most likely one's probability."),
    "repetition_penalty": Field("honoured", "Extension: penalty factor for tokens of the prompt and the answer."),
    "min_tokens": Field("honoured", "Extension: smallest length of the answer, tokens."),
    "stop_token_ids": Field("honoured", "Extension: tokens that end the answer."),
    "ignore_eos": Field("honoured", "Extension: the model's end token does not end the answer."),
    "regex": Field("honoured", "The answer matches this regular expression."),
    "grammar": Field("honoured", "The answer follows this grammar, in Lark's notation."),
    "choice": Field("honoured", "The answer is one of these texts."),
    "priority": Field("honoured", "Extension: a lower number runs earlier."),
    "cache_salt": Field("honoured", "Extension: only requests with an equal salt share cached prompts."),
    "bypass_prefix_cache": Field("honoured", "Extension: neither reads nor writes cached prompts."),
}


class Fields:
    """The fields of one JSON object, read with their types. Every error names the field."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        """`where` is the place of the object in the request."""
        self._values = values
        self.where = where

    @classmethod
    def checked(cls, values: Mapping[str, Any], table: Mapping[str, Field]) -> Fields:
        """Returns the fields of a request. Raises InvalidParameterError for those that are unknown or refused."""
        return cls(values).check(table)

    @classmethod
    def of(cls, value: object, where: str) -> Fields:
        """Returns the fields of an object inside of another one. Raises InvalidParameterError for anything else."""
        if not isinstance(value, dict):
            raise InvalidParameterError(where, "must be an object")
        return cls(value, where)

    def inner(self, name: str) -> Fields:
        """Returns the fields of the object that is the value of one of these."""
        return Fields.of(self._values.get(name), self.place(name))

    def place(self, name: str) -> str:
        """Returns the place of a field in the request."""
        return f"{self.where}.{name}" if self.where else name

    def check(self, table: Mapping[str, Field]) -> Fields:
        """Returns these fields. Raises InvalidParameterError for those that are unknown or refused."""
        for name, value in self._values.items():
            field = table.get(name)
            if field is None:
                raise self.wrong(str(name)[:100], "is not known")
            is_neutral = value is None or any(value == one and type(value) is type(one) for one in field.neutral)
            if field.rule == "refused" and not is_neutral:
                raise self.wrong(name, f"is not supported. {field.note}".rstrip())
        return self

    def names(self) -> set[str]:
        """Returns the names of the fields that have a value."""
        return {name for name, value in self._values.items() if value is not None}

    def only(self, *names: str) -> Fields:
        """Raises InvalidParameterError if another field has a value."""
        unknown = sorted(self.names() - set(names))
        if unknown:
            raise self.wrong(unknown[0][:100], "is not supported here")
        return self

    def raw(self, name: str) -> Any:
        """Returns a value as it is; None if it is not given."""
        return self._values.get(name)

    def number(self, name: str) -> float | None:
        """Returns a number, whole or not."""
        found: float | None = self._typed(name, "a number", _is_number)
        return found

    def integer(self, name: str) -> int | None:
        """Returns a number that must be whole."""
        found: int | None = self._typed(name, "a whole number", lambda value: isinstance(value, int))
        return found

    def flag(self, name: str) -> bool | None:
        """Returns a value that must be true or false."""
        found: bool | None = self._typed(name, "true or false", lambda value: isinstance(value, bool), takes_bool=True)
        return found

    def text(self, name: str) -> str | None:
        """Returns a value that must be a text."""
        found: str | None = self._typed(name, "a text", lambda value: isinstance(value, str))
        return found

    def texts(self, name: str) -> list[str] | None:
        """Returns a list of texts; a single text is a list of one."""
        value = self._values.get(name)
        if isinstance(value, str):
            return [value]
        found: list[str] | None = self._typed(name, "a text or a list of texts", lambda value: _is_list_of(value, str))
        return found

    def integers(self, name: str) -> list[int] | None:
        """Returns a list of whole numbers."""
        found: list[int] | None = self._typed(name, "a list of whole numbers", lambda value: _is_list_of(value, int))
        return found

    def array(self, name: str) -> list[Any] | None:
        """Returns a list of values of any type."""
        found: list[Any] | None = self._typed(name, "a list", lambda value: isinstance(value, list))
        return found

    def needed(self, name: str, value: ValueT | None) -> ValueT:
        """Returns a value. Raises InvalidParameterError if there is none."""
        if value is None:
            raise self.wrong(name, "is missing")
        return value

    def wrong(self, name: str, description: str) -> InvalidParameterError:
        """Returns the error that names a field whose value is wrong."""
        return InvalidParameterError(self.place(name), description)

    def _typed(self, name: str, kind: str, is_right: Callable[[Any], bool], *, takes_bool: bool = False) -> Any:
        value = self._values.get(name)
        if value is None:
            return None
        if not is_right(value) or (isinstance(value, bool) and not takes_bool):
            raise self.wrong(name, f"must be {kind}")
        return value


def _is_number(value: object) -> bool:
    # Python reads 1e400 as infinity.
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(one, kind) and not isinstance(one, bool) for one in value)
