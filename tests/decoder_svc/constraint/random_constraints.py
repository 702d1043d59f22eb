"""Random schemas, regular expressions and grammars, each with a program of its own that says whether a text conforms.

    python -m tests.decoder_svc.constraint.random_constraints --schemas 2000 --regexes 500 --grammars 200

Answers are drawn at random among the tokens that the masks allow: a walk finds more than a model that writes what it
has learned.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jsonschema
import numpy as np

from decoder_svc.constraint.grammars import Grammars
from decoder_svc.constraint.refusals import RefusedConstraintError
from decoder_svc.scheduling.sampling_params import Constraint, ConstraintKind
from tests.decoder_svc.constraint.demo_constraints import DEMO_VOCAB, END, PROMPT, WholeAnswer, demo_grammars

_LONGEST_WALK = 250
_ATOMS = (
    *("a", "b", "7", "x", " ", "-", r"\.", r"\(", r"\+", "red", "green", "no"),
    *("[abc]", "[0-9]", "[a-f0-9]", "[^a-y]", r"[0-9\-]", "[a-z][0-9]"),
)
_PARTS = ("part", "other")
_WORDS = ("a", "red", "size", "no 7", "é", 'q"t', "x_y")

# Keywords that restrict values and that llguidance does not know: a schema with one of them must be refused by name.
UNKNOWN_KEYWORDS: dict[str, Any] = {
    "not": {"type": "string"},
    "uniqueItems": True,
    "contains": {"type": "integer"},
    "propertyNames": {"maxLength": 3},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {"required": ["b"]}},
    "if": {"type": "integer"},
    "unevaluatedProperties": False,
    "unevaluatedItems": False,
}


@dataclass(frozen=True, slots=True)
class Case:
    """A constraint, and the check of an answer to it."""

    constraint: Constraint
    conforms: Callable[[str], bool]
    # Part of the reason for which it must be refused; None: it may be served.
    unknown: str | None = None


# Schemas.


def random_schema(rng: random.Random) -> Case:
    """A schema of the shapes that people write; one of eight has a keyword that is not supported."""
    schema = _schema(rng, 3)
    # They may refer to each other inside of objects and lists, so that a value can end.
    parts = {name: {"anyOf": [_schema(rng, 0), rng.choice([_object, _array])(rng, 2)]} for name in _PARTS}
    unknown = None
    if rng.random() < 1 / 8:
        unknown = rng.choice(list(UNKNOWN_KEYWORDS))
        schema = {"type": "object", "properties": {"a": schema, "b": {unknown: UNKNOWN_KEYWORDS[unknown]}},
                  "required": ["a", "b"]}  # fmt: skip
    schema["$defs"] = parts
    return Case(_of_schema(schema), functools.partial(_is_valid, schema), unknown)


def _of_schema(schema: Any) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))


def _is_valid(schema: Any, text: str) -> bool:
    try:
        value = json.loads(text)
        jsonschema.validate(value, schema, cls=jsonschema.Draft202012Validator)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds: list[Callable[[random.Random, int], dict[str, Any]]] = [_simple]
    if depth:
        kinds = [_object, _object, _object, _array, _any_of, _reference, _simple, _simple]
    return rng.choice(kinds)(rng, depth)


def _simple(rng: random.Random, _depth: int) -> dict[str, Any]:
    types = ["string", "integer", "null", "boolean"]
    kind = rng.randrange(5)
    if kind == 0:
        return {"type": rng.sample(types, 2)}
    if kind == 1:
        return {"type": rng.choice(types)}
    return rng.choice([_string, _number, _constant])(rng)


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}


def _reference(rng: random.Random, _depth: int) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{rng.choice(_PARTS)}"}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randint(0, 4))
    schema: dict[str, Any] = {"type": "object", "properties": {name: _schema(rng, depth - 1) for name in names}}
    if rng.random() < 0.8:
        schema["required"] = rng.sample(names, rng.randint(0, len(names)))
    if rng.random() < 0.7:
        schema["additionalProperties"] = rng.choice([False, False, {"type": "integer"}])
    if rng.random() < 0.2:
        schema["title"], schema["description"] = "a title", "words"
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "items": _schema(rng, depth - 1)}
    if rng.random() < 0.3:
        schema["prefixItems"] = [_schema(rng, 0) for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.6:
        schema["minItems"] = rng.randint(0, 2)
    if rng.random() < 0.6:
        schema["maxItems"] = rng.randint(2, 4)
    return schema


def _string(rng: random.Random) -> dict[str, Any]:
    kind = rng.randrange(4)
    if kind == 0:
        least = rng.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 4)}
    if kind == 1:
        return {"type": "string", "pattern": f"^{_expression(rng, 2)}$"}
    if kind == 2:
        return {"type": "string", "format": rng.choice(["date", "time", "date-time", "ipv4", "uuid", "email"])}
    return {"type": "string"}


def _number(rng: random.Random) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": rng.choice(["integer", "number"])}
    least = rng.randint(-20, 20)
    if rng.random() < 0.6:
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = least
    if rng.random() < 0.6:
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = least + rng.randint(3, 300)
    if schema["type"] == "integer" and rng.random() < 0.2:
        schema["multipleOf"] = rng.randint(2, 7)
    return schema


def _constant(rng: random.Random) -> dict[str, Any]:
    values = [*_WORDS, 0, -3, 2.5, True, None, [1, "x"], {"k": 1}]
    return {"const": rng.choice(values)} if rng.random() < 0.4 else {"enum": rng.sample(values, rng.randint(1, 4))}


# Regular expressions.


def random_regex(rng: random.Random) -> Case:
    """An expression in the syntax that Python shares; one of ten has a construct that is not supported."""
    pattern = _expression(rng, 4)
    unknown = None
    if rng.random() < 0.1:
        construct, unknown = rng.choice(
            [("(?=a)", "look-around"), (r"(a)\1", "backreferences"), ("(?<!a)b", "look-around")]
        )
        pattern += construct
    constraint = Constraint(ConstraintKind.REGEX, pattern)
    return Case(constraint, lambda text: re.fullmatch(pattern, text) is not None, unknown)


def _expression(rng: random.Random, depth: int) -> str:
    kind = rng.randrange(8) if depth else 0
    if kind < 3:
        return rng.choice(_ATOMS)
    inner = _expression(rng, depth - 1)
    if kind == 3:
        return f"({inner}|{_expression(rng, depth - 1)})"
    if kind == 4:
        return f"({inner}){rng.choice(['?', '*', '+', '{2}', '{1,3}', '{0,2}'])}"
    if kind == 5:
        return f"(?:{inner})"
    return inner + _expression(rng, depth - 1)


# Grammars.

Node = tuple[Any, ...]


def random_grammar(rng: random.Random) -> Case:
    """A grammar of some rules, which may refer to themselves; one of ten refers to a rule that is not there."""
    names = ["start", *[f"r{number}" for number in range(rng.randint(1, 4))]]
    rules = {name: _rule(rng, names, 3) for name in names}
    # Every rule can end.
    rules = {name: ("or", ("text", rng.choice(["a", "b", "7", "()"])), rule) for name, rule in rules.items()}
    unknown = None
    if rng.random() < 0.1:
        unknown = 'unknown name: "nowhere"'
        rules["start"] = ("or", rules["start"], ("rule", "nowhere"))
    known = {**rules, "nowhere": ("or",)}
    text = "\n".join(f"{name}: {_written(rule)}" for name, rule in rules.items())
    return Case(Constraint(ConstraintKind.GRAMMAR, text), lambda answer: _takes(known, answer), unknown)


def _rule(rng: random.Random, names: list[str], depth: int) -> Node:
    kind = rng.randrange(7) if depth else rng.randrange(3)
    if kind == 0:
        return ("text", rng.choice(["a", "b", "(", ")", ", ", "no", "é", '"', "\n"]))
    if kind == 1:
        return ("one of", rng.choice(["abc", "0123456789", "+-"]))
    if kind == 2:
        return ("rule", rng.choice(names))
    inner = _rule(rng, names, depth - 1)
    if kind == 3:
        return ("or", inner, _rule(rng, names, depth - 1))
    if kind == 4:
        return ("times", inner, *rng.choice([(0, 1), (1, 3), (2, 2), (0, 2)]))
    return ("then", inner, _rule(rng, names, depth - 1))


def _written(node: Node) -> str:
    """A rule in Lark's notation."""
    match node:
        case ("text", text):
            return json.dumps(text, ensure_ascii=False)
        case ("one of", letters):
            return f"/[{re.escape(letters)}]/"
        case ("rule", name):
            return str(name)
        case ("or", one, other):
            return f"({_written(one)} | {_written(other)})"
        case ("times", inner, least, most):
            return f"({_written(inner)}){{{least},{most}}}"
        case ("then", one, other):
            return f"{_written(one)} {_written(other)}"
    raise AssertionError(node)


def _takes(rules: dict[str, Node], text: str) -> bool:
    """Whether the grammar has this text: looks for all ends of all rules at all places until there are no new ones."""
    ends: dict[tuple[str, int], set[int]] = {}

    def of(node: Node, place: int) -> set[int]:
        match node:
            case ("text", literal):
                return {place + len(literal)} if text.startswith(literal, place) else set()
            case ("one of", letters):
                return {place + 1} if place < len(text) and text[place] in letters else set()
            case ("rule", name):
                return set(ends.setdefault((name, place), set()))
            case ("or", *parts):
                return {end for part in parts for end in of(part, place)}
            case ("then", one, other):
                return {end for middle in of(one, place) for end in of(other, middle)}
            case ("times", inner, least, most):
                reached, found = {place}, {place} if least == 0 else set()
                for number in range(1, most + 1):
                    reached = {end for start in reached for end in of(inner, start)}
                    found |= reached if number >= least else set()
                return found
        raise AssertionError(node)

    ends["start", 0] = set()
    while True:
        before = sum(map(len, ends.values())), len(ends)
        for name, place in list(ends):
            ends[name, place] |= of(rules[name], place)
        if (sum(map(len, ends.values())), len(ends)) == before:
            return len(text) in ends["start", 0]


# Walks.


def check(grammars: Grammars, case: Case, rng: random.Random) -> str:
    """Returns how one walk ended. Raises AssertionError for an answer that does not conform.

    Also for a constraint that is served although a part of it is not supported, and for a guess that is not taken as
    the mask says.
    """
    try:
        state = WholeAnswer(grammars, case.constraint)
    except RefusedConstraintError as error:
        is_named = case.unknown is not None and case.unknown in str(error)
        return "refused by name" if is_named else f"refused: {error}"
    assert case.unknown is None, f"served, although {case.unknown} is not supported: {case.constraint}"
    guessing = WholeAnswer(grammars, case.constraint)
    ids = list(PROMPT)
    for _ in range(_LONGEST_WALK):
        is_forced = bool(state.forced(ids, 1))
        masks = state.masks(ids, [])
        if state.error is not None:
            return f"ended: {state.error}"
        (mask,) = masks
        choices = np.flatnonzero(np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")).tolist()
        ends = END in choices and (len(choices) == 1 or rng.random() < 0.5)
        next_id = END if ends else rng.choice([token_id for token_id in choices if token_id != END])
        check_guesses(guessing, ids, mask, next_id, is_forced=is_forced, seed=rng.random())
        if ends:
            text = grammars.tokenizer.decode_bytes(ids[len(PROMPT) :]).decode()
            assert case.conforms(text), (case.constraint, text)
            return "conforms"
        ids.append(next_id)
    return "cut"


def check_guesses(
    answer: WholeAnswer, ids: list[int], mask: bytes, next_id: int, *, is_forced: bool, seed: float
) -> None:
    """Asks about random tokens that may not come, among them some that are none, and perhaps about the next one."""
    rng = random.Random(seed)
    others = [*rng.sample(range(DEMO_VOCAB), 4), DEMO_VOCAB, DEMO_VOCAB + 7]
    guess_ids = [token_id for token_id in others if not mask_has(mask, token_id)]
    if rng.random() < 0.7:
        guess_ids.insert(rng.randrange(len(guess_ids) + 1), next_id)
    found = answer.first_of(ids, guess_ids)
    if is_forced or next_id not in guess_ids:
        assert found == mask, "a guess was read that the mask does not allow"
    else:
        assert found == guess_ids.index(next_id), "a guess was not read that the mask allows"


def mask_has(mask: bytes, token_id: int) -> bool:
    """Whether a token is in a mask."""
    return token_id < 8 * len(mask) and bool(mask[token_id // 8] >> token_id % 8 & 1)


KINDS = {"schemas": random_schema, "regexes": random_regex, "grammars": random_grammar}


def cases(kind: str, seeds: range) -> Iterator[tuple[Case, random.Random]]:
    """Yields a random case for each seed, and the random numbers for its walk."""
    for seed in seeds:
        rng = random.Random(f"{kind} {seed}")
        yield KINDS[kind](rng), rng


def main() -> None:
    """Prints how the walks ended, by kind. Ends with an AssertionError at the first answer that does not conform."""
    parser = argparse.ArgumentParser(description=__doc__)
    for kind in KINDS:
        parser.add_argument(f"--{kind}", type=int, default=100)
    parser.add_argument("--walks", type=int, default=3, help="walks for each constraint")
    arguments = parser.parse_args()
    grammars = demo_grammars()
    for kind in KINDS:
        ends: Counter[str] = Counter()
        for case, rng in cases(kind, range(getattr(arguments, kind))):
            for _ in range(arguments.walks):
                ends[check(grammars, case, rng)] += 1
        print(kind, dict(ends.most_common()))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
