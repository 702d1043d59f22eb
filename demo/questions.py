"""Questions about scenes, with the exact answers expected of the demo model.

It knows scenes and wordings, but no tokens, chat templates or models.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from demo.scenes import COLOURS, SCENE_GRID_SIDE, SHAPES, PlacedShape, Scene, png_bytes, position_name, random_scene
from demo.wordings import (
    HELD_OUT_OPENERS,
    TRAINING_CLOSERS,
    TRAINING_OPENERS,
    WORDINGS,
    QuestionKind,
    Split,
    choose,
)

NUMBER_WORDS: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ORDINALS: Final = ("first", "second", "third")
COMPARING_KINDS: Final = frozenset({QuestionKind.WHICH_PICTURE, QuestionKind.COUNT_TOGETHER, QuestionKind.MORE_SHAPES})

DEMO_SCENES: Final = ((10_000_001, 3), (10_000_002, 2), (10_000_003, 3))
"""(seed, number of shapes) of the pictures of the demo session; training never draws them."""

_POSITIONS: Final = [position_name(row, column) for row in range(SCENE_GRID_SIDE) for column in range(SCENE_GRID_SIDE)]
_LISTED_FIELDS: Final = {"shape": list(SHAPES), "colour": list(COLOURS), "position": _POSITIONS}
LIST_SCHEMA: Final[Mapping[str, object]] = {
    "type": "object",
    "properties": {
        "shapes": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {name: {"enum": values} for name, values in _LISTED_FIELDS.items()},
                "required": list(_LISTED_FIELDS),
                "additionalProperties": False,
            },
        }
    },
    "required": ["shapes"],
    "additionalProperties": False,
}
"""JSON schema of the answers to questions of the kind LIST."""

_LONE_PICTURE: Final = ("the picture", "this picture", "the image", "this image", "the drawing")


@dataclass(frozen=True, slots=True)
class Question:
    """One worded question and its answer."""

    kind: QuestionKind
    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class Asked:
    """Values for the slots of a wording, and the answer to the question."""

    answer: str
    slots: dict[str, str]


def ask(kind: QuestionKind, scenes: Sequence[Scene], target: int, split: Split, rng: random.Random) -> Question | None:
    """Returns a question of this kind about `scenes[target]`, or about all scenes for the kinds that compare pictures.

    Returns None if these pictures give no unambiguous answer to a question of this kind. Lists are asked for with a
    single picture only: the model is too small to learn more of them in minutes.
    """
    if kind is QuestionKind.LIST and len(scenes) > 1:
        return None
    asked = compare(kind, scenes, rng) if kind in COMPARING_KINDS else _ABOUT_ONE[kind](scenes[target], rng)
    if asked is None:
        return None
    return Question(kind, word(kind, asked, len(scenes), target, split, rng), asked.answer)


def ask_any(
    scenes: Sequence[Scene], split: Split, rng: random.Random, kinds: Sequence[QuestionKind] = tuple(QuestionKind)
) -> Question:
    """Returns a question of a random kind about a random one of the pictures.

    The kind is drawn from `kinds`, which may list a kind several times; three of five questions over several pictures
    compare them. If the pictures answer none of these kinds unambiguously, the question is to count shapes.
    """
    comparing = len(scenes) > 1 and rng.random() < 0.6
    candidates = [kind for kind in kinds if (kind in COMPARING_KINDS) == comparing]
    target = rng.randrange(len(scenes))
    for kind in (*rng.sample(candidates, len(candidates)), QuestionKind.COUNT):
        question = ask(kind, scenes, target, split, rng)
        if question is not None:
            return question
    raise AssertionError("shapes can always be counted")


def word(kind: QuestionKind, asked: Asked, num_pictures: int, target: int, split: Split, rng: random.Random) -> str:
    """Returns the question in words. With several pictures the wording names the one that is meant."""
    patterns = WORDINGS[kind].of(split)
    if num_pictures > 1 and kind not in COMPARING_KINDS:
        patterns = tuple(pattern for pattern in patterns if "{in" in pattern or "{picture}" in pattern)
    picture = _picture_name(num_pictures, target, rng)
    named = num_pictures > 1 or rng.random() < 0.6
    slots = {
        "in": f" in {picture}" if named else "",
        "picture": picture,
        "choices": _choices(num_pictures, rng),
        "all": _all_pictures(num_pictures, rng),
        **asked.slots,
    }
    text = choose(rng.choice(patterns), rng).format_map(slots)
    text = re.sub(r"\b([Aa]) (?=orange)", r"\1n ", text)
    if split is Split.TERSE:
        return text
    return _finish(text[0].upper() + text[1:], split, rng)


def describe(scene: Scene) -> str:
    """Names all shapes in reading order, for example "a red circle, an orange star and a blue square"."""
    names = [_with_article(placed.name) for placed in scene.shapes]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def list_shapes(scene: Scene) -> str:
    """Returns all shapes in reading order as one line of JSON that LIST_SCHEMA allows."""
    shapes = [{name: getattr(placed, name) for name in _LISTED_FIELDS} for placed in scene.shapes]
    return json.dumps({"shapes": shapes})


def compare(kind: QuestionKind, scenes: Sequence[Scene], rng: random.Random) -> Asked | None:
    """Returns a question of one of the COMPARING_KINDS over all pictures."""
    counts = [len(scene.shapes) for scene in scenes]
    if len(scenes) < 2:
        return None
    if kind is QuestionKind.COUNT_TOGETHER:
        return Asked(NUMBER_WORDS[sum(counts)], {})
    if kind is QuestionKind.MORE_SHAPES:
        best = max(counts)
        return Asked(ORDINALS[counts.index(best)], {}) if counts.count(best) == 1 else None
    named = [{name for placed in scene.shapes for name in (placed.name, placed.shape)} for scene in scenes]
    only_once = sorted(
        (name, index)
        for index, names in enumerate(named)
        for name in names
        if sum(name in other for other in named) == 1
    )
    if not only_once:
        return None
    name, index = rng.choice(only_once)
    return Asked(ORDINALS[index], {"thing": name})


def _colour(scene: Scene, rng: random.Random) -> Asked | None:
    found = [placed for placed in scene.shapes if _count(scene, shape=placed.shape) == 1]
    if not found:
        return None
    placed = rng.choice(found)
    return Asked(placed.colour, {"shape": placed.shape})


def _shape(scene: Scene, rng: random.Random) -> Asked | None:
    found = [placed for placed in scene.shapes if _count(scene, colour=placed.colour) == 1]
    if not found:
        return None
    placed = rng.choice(found)
    return Asked(placed.shape, {"colour": placed.colour})


def _count_all(scene: Scene, rng: random.Random) -> Asked:
    return Asked(NUMBER_WORDS[len(scene.shapes)], {})


def _position(scene: Scene, rng: random.Random) -> Asked | None:
    placed = rng.choice(scene.shapes)
    name = _unique_name(scene, placed, rng)
    return None if name is None else Asked(placed.position, {"thing": name})


def _describe(scene: Scene, rng: random.Random) -> Asked:
    return Asked(describe(scene), {})


def _list(scene: Scene, rng: random.Random) -> Asked:
    return Asked(list_shapes(scene), {})


_ABOUT_ONE: Final[dict[QuestionKind, Callable[[Scene, random.Random], Asked | None]]] = {
    QuestionKind.COLOUR: _colour,
    QuestionKind.SHAPE: _shape,
    QuestionKind.COUNT: _count_all,
    QuestionKind.POSITION: _position,
    QuestionKind.DESCRIBE: _describe,
    QuestionKind.LIST: _list,
}


def _count(scene: Scene, colour: str | None = None, shape: str | None = None) -> int:
    return sum(colour in (None, placed.colour) and shape in (None, placed.shape) for placed in scene.shapes)


def _unique_name(scene: Scene, placed: PlacedShape, rng: random.Random) -> str | None:
    """Returns words that mean this shape and no other in the scene: "red circle", "circle" or "red one"."""
    if _count(scene, colour=placed.colour, shape=placed.shape) > 1:
        return None
    names = [placed.name, placed.name]
    if _count(scene, shape=placed.shape) == 1:
        names.append(placed.shape)
    if _count(scene, colour=placed.colour) == 1:
        names.append(f"{placed.colour} {rng.choice(('shape', 'object', 'thing', 'figure'))}")
    return rng.choice(names)


def _with_article(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _picture_name(num_pictures: int, target: int, rng: random.Random) -> str:
    if num_pictures == 1:
        return rng.choice(_LONE_PICTURE)
    noun = rng.choice(("picture", "picture", "image"))
    number = rng.choice((str(target + 1), NUMBER_WORDS[target + 1]))
    return rng.choice((f"the {ORDINALS[target]} {noun}", f"the {ORDINALS[target]} {noun}", f"{noun} {number}"))


def _choices(num_pictures: int, rng: random.Random) -> str:
    words = [f"the {ordinal}" for ordinal in ORDINALS[: max(2, num_pictures)]]
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _all_pictures(num_pictures: int, rng: random.Random) -> str:
    noun = rng.choice(("pictures", "pictures", "images"))
    both = f"both {noun}" if num_pictures == 2 else f"all {noun}"
    number = NUMBER_WORDS[num_pictures]
    return rng.choice((f"the {number} {noun}", f"the {number} {noun}", both, f"all {number} {noun}", f"the {noun}"))


def _finish(text: str, split: Split, rng: random.Random) -> str:
    """Adds variations of real users: greetings, American spelling, a missing question mark, no capitals."""
    if rng.random() < 0.25:
        opener = rng.choice(TRAINING_OPENERS if split is Split.TRAINING else HELD_OUT_OPENERS)
        text = opener + (text if opener[-2] in ".!:" else text[0].lower() + text[1:])
    if rng.random() < 0.1:
        text += rng.choice(TRAINING_CLOSERS)
    if rng.random() < 0.2:
        text = text.replace("colour", "color").replace("centre", "center")
    if rng.random() < 0.07:
        text = text.rstrip("?.")
    if rng.random() < 0.1:
        text = text.lower()
    return text


@dataclass(frozen=True, slots=True)
class DemoQuestion:
    """One question of the fixed demo session."""

    parts: tuple[str | bytes, ...]
    """The user message in order: a PNG file as bytes, or text as str."""
    expected: str
    json_schema: Mapping[str, object] | None = None
    """Schema that the answer must follow, if any."""


def demo_session() -> list[DemoQuestion]:
    """Returns six fixed questions: two on the first picture, one on the second, two on the third, one on two pictures.

    One of those on the third picture asks for JSON.
    """
    first, second, third = (random_scene(seed, count) for seed, count in DEMO_SCENES)
    one, two, three = png_bytes(first), png_bytes(second), png_bytes(third)
    thing = second.shapes[0]
    return [
        DemoQuestion((one, f"What colour is the {first.shapes[0].shape}?"), first.shapes[0].colour),
        DemoQuestion((one, "How many shapes are there?"), NUMBER_WORDS[len(first.shapes)]),
        DemoQuestion((two, f"Where is the {thing.name}?"), thing.position),
        DemoQuestion((three, "Describe the picture."), describe(third)),
        DemoQuestion(
            (one, two, "How many shapes are there in the two pictures together?"),
            NUMBER_WORDS[len(first.shapes) + len(second.shapes)],
        ),
        DemoQuestion((three, "Describe the picture as JSON."), list_shapes(third), LIST_SCHEMA),
    ]
