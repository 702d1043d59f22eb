"""The curriculum of the language model: kinds of questions, wordings and numbers of pictures by training step.

A model that gets all questions at once learns to find a shape by its colour, and then for thousands of steps does not
learn to find one by its name. Adding one kind of question at a time, in few words first, avoids that (docs/log.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from demo.wordings import QuestionKind


@dataclass(frozen=True, slots=True)
class BatchShape:
    """A batch of conversations that all show the same number of pictures."""

    num_pictures: int
    num_chats: int
    num_questions: int
    weight: float
    """Relative share of the lesson's steps."""
    is_chat: bool = False
    """True: the questions are turns of one chat. False: they are independent."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """The kinds and wordings of questions during one part of the training."""

    until: float
    """Share of all steps at which the lesson ends."""
    kinds: tuple[QuestionKind, ...]
    """Kinds of questions; a kind that is listed twice is asked twice as often."""
    terse_share: float
    """Share of the conversations that use the shortest wordings."""
    shapes: tuple[BatchShape, ...]


_LONE_PICTURES: Final = (BatchShape(num_pictures=1, num_chats=14, num_questions=6, weight=1.0),)
_ALL_SHAPES: Final = (
    BatchShape(num_pictures=1, num_chats=14, num_questions=6, weight=0.33),
    BatchShape(num_pictures=2, num_chats=10, num_questions=6, weight=0.31),
    BatchShape(num_pictures=3, num_chats=7, num_questions=6, weight=0.11),
    BatchShape(num_pictures=1, num_chats=14, num_questions=5, weight=0.10, is_chat=True),
    BatchShape(num_pictures=2, num_chats=10, num_questions=5, weight=0.10, is_chat=True),
    BatchShape(num_pictures=3, num_chats=7, num_questions=5, weight=0.05, is_chat=True),
)
_PAIRS_AND_LONE_PICTURES: Final = (
    BatchShape(num_pictures=2, num_chats=10, num_questions=6, weight=0.65),
    BatchShape(num_pictures=1, num_chats=14, num_questions=6, weight=0.35),
)
_COLOUR, _SHAPE, _COUNT = QuestionKind.COLOUR, QuestionKind.SHAPE, QuestionKind.COUNT
_POSITION, _DESCRIBE, _WHICH = QuestionKind.POSITION, QuestionKind.DESCRIBE, QuestionKind.WHICH_PICTURE
_ABOUT_ONE: Final = (_COLOUR, _SHAPE, _COUNT, _POSITION, _POSITION, _DESCRIBE, _DESCRIBE)
_COMPARING: Final = (_WHICH, _WHICH, _WHICH, QuestionKind.COUNT_TOGETHER, QuestionKind.MORE_SHAPES)

LESSONS: Final = (
    Lesson(0.05, (_COLOUR,), 1.0, _LONE_PICTURES),
    Lesson(0.10, (_COLOUR, _SHAPE), 1.0, _LONE_PICTURES),
    Lesson(0.15, (_COLOUR, _SHAPE, _POSITION, _POSITION, _DESCRIBE), 0.5, _LONE_PICTURES),
    # Questions for the picture that has a shape, the only comparing kind here, mixed with all earlier kinds.
    Lesson(0.24, (_COLOUR, _SHAPE, _POSITION, _POSITION, _DESCRIBE, _DESCRIBE, _WHICH), 0.5, _PAIRS_AND_LONE_PICTURES),
    Lesson(1.00, _ABOUT_ONE + _COMPARING, 0.1, _ALL_SHAPES),
)

LIST_LESSON: Final = Lesson(1.00, (*_ABOUT_ONE, *(QuestionKind.LIST,) * 2, *_COMPARING), 0.05, _ALL_SHAPES)
"""The last stage: lists as JSON among all that was learnt before."""


def lesson_at(done: float) -> Lesson:
    """Returns the lesson after a share `done`, from 0 to 1, of the training steps."""
    return next(lesson for lesson in LESSONS if done < lesson.until)
