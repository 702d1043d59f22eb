"""Answers follow from the scenes, and ambiguous questions are not asked."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest

from demo.questions import (
    COMPARING_KINDS,
    LIST_SCHEMA,
    NUMBER_WORDS,
    ask,
    ask_any,
    demo_session,
    describe,
    list_shapes,
)
from demo.scenes import PlacedShape, Scene, random_scene
from demo.wordings import QuestionKind, Split


def scene_of(*shapes: tuple[str, str, int, int]) -> Scene:
    """Returns a scene with shapes given as (colour, shape, row, column)."""
    placed = tuple(
        PlacedShape(
            shape=shape,
            colour=colour,
            column=column,
            row=row,
            center_x=(column + 0.5) / 3,
            center_y=(row + 0.5) / 3,
            radius=0.4,
            rotation_deg=0.0,
            rgb=(0, 0, 0),
        )
        for colour, shape, row, column in shapes
    )
    return Scene(224, 224, (255, 255, 255), placed)


TWO = scene_of(("red", "circle", 0, 0), ("orange", "square", 2, 1))
PAIR = scene_of(("red", "circle", 0, 0), ("red", "circle", 2, 1))


@pytest.mark.parametrize("split", list(Split))
def test_every_kind_can_be_asked_and_leaves_no_slot_open(split: Split) -> None:
    rng = random.Random(3)
    for kind in QuestionKind:
        scenes = (TWO,) if kind is QuestionKind.LIST else (TWO, scene_of(("blue", "star", 1, 1)))
        for _ in range(40):
            question = ask(kind, scenes, 0, split, rng)
            assert question is not None
            assert not set("[]{}|") & set(question.text)
            assert "a orange" not in question.text


def test_ambiguous_questions_are_not_asked() -> None:
    rng = random.Random(4)
    for kind in (QuestionKind.COLOUR, QuestionKind.SHAPE, QuestionKind.POSITION):
        assert ask(kind, (PAIR,), 0, Split.TRAINING, rng) is None
    assert ask(QuestionKind.MORE_SHAPES, (TWO, PAIR), 0, Split.TRAINING, rng) is None
    for kind in COMPARING_KINDS:
        assert ask(kind, (TWO,), 0, Split.TRAINING, rng) is None


def test_counting_answers() -> None:
    rng = random.Random(5)
    count = ask(QuestionKind.COUNT, (PAIR,), 0, Split.HELD_OUT, rng)
    together = ask(QuestionKind.COUNT_TOGETHER, (PAIR, TWO, TWO), 0, Split.HELD_OUT, rng)
    assert count is not None
    assert count.answer == "two"
    assert together is not None
    assert together.answer == NUMBER_WORDS[6]


def test_which_picture_names_the_only_picture_that_has_it() -> None:
    rng = random.Random(6)
    for _ in range(50):
        question = ask(QuestionKind.WHICH_PICTURE, (TWO, PAIR), 0, Split.TRAINING, rng)
        assert question is not None
        assert question.answer == "first"
        assert "square" in question.text.lower()


def test_several_pictures_are_told_apart_in_the_wording() -> None:
    rng = random.Random(7)
    for _ in range(200):
        question = ask(QuestionKind.COUNT, (TWO, PAIR), 1, Split.HELD_OUT, rng)
        assert question is not None
        assert any(words in question.text.lower() for words in ("second", "picture 2", "two", "image 2"))


def test_description_lists_shapes_in_reading_order() -> None:
    assert describe(TWO) == "a red circle and an orange square"
    three = scene_of(("red", "star", 0, 0), ("blue", "star", 0, 2), ("black", "cross", 1, 0))
    assert describe(three) == "a red star, a blue star and a black cross"


def test_questions_are_deterministic_by_seed() -> None:
    scenes = [random_scene(20_000_000 + index) for index in range(2)]
    one, other = random.Random(8), random.Random(8)
    for _ in range(50):
        assert ask_any(scenes, Split.HELD_OUT, one) == ask_any(scenes, Split.HELD_OUT, other)


def test_lists_are_lines_of_json_that_the_schema_allows() -> None:
    assert list_shapes(TWO) == (
        '{"shapes": [{"shape": "circle", "colour": "red", "position": "top left"},'
        ' {"shape": "square", "colour": "orange", "position": "bottom middle"}]}'
    )
    for seed in range(200):
        jsonschema.validate(json.loads(list_shapes(random_scene(seed))), LIST_SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"shapes": [{"shape": "circle", "colour": "red", "position": "left"}]}, LIST_SCHEMA)


def test_demo_session_shows_three_pictures_in_six_questions() -> None:
    session = demo_session()
    pictures = [[part for part in question.parts if isinstance(part, bytes)] for question in session]
    assert [len(each) for each in pictures] == [1, 1, 1, 1, 2, 1]
    assert pictures[0] == pictures[1]
    assert len({each for question in pictures for each in question}) == 3
