"""The order in which the language model learns to answer: which questions, in which words, over how many pictures.

Asked everything at once it learns to find a shape by its colour and then stays for thousands of steps where it cannot
find one by its name; each kind of question taken up in turn, in few words first, has none of that (docs/log.md).
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
    """The questions are turns of one chat; else they are independent."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """What is asked during a part of the steps."""

    until: float
    """Share of all steps at which the lesson ends."""
    kinds: tuple[QuestionKind, ...]
    """What may be asked, what stands there twice twice as often."""
    terse_share: float
    """Share of the conversations in the fewest words."""
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
    # Which picture has it, the only kind that compares here; what was learnt before is not left alone meanwhile.
    Lesson(0.24, (_COLOUR, _SHAPE, _POSITION, _POSITION, _DESCRIBE, _DESCRIBE, _WHICH), 0.5, _PAIRS_AND_LONE_PICTURES),
    Lesson(1.00, _ABOUT_ONE + _COMPARING, 0.1, _ALL_SHAPES),
)


def lesson_at(done: float) -> Lesson:
    """The lesson when `done`, from 0 to 1, of the steps are made."""
    return next(lesson for lesson in LESSONS if done < lesson.until)
