"""Chats about scenes: several turns of question and answer over one to three pictures, as chat messages.

Training and evaluation use it. It knows the message format, not the tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from demo.questions import Question, ask_any
from demo.scenes import Scene
from demo.wordings import SYSTEM_TEXTS, QuestionKind, Split


class Part(TypedDict, total=False):
    """One part of a message: `{"type": "image"}`, or `{"type": "text", "text": …}`."""

    type: str
    text: str


class Message(TypedDict):
    """One message in the form that chat templates take."""

    role: str
    content: str | list[Part]


@dataclass(frozen=True, slots=True)
class Turn:
    """One user message and the answer to it."""

    num_new_pictures: int
    """Pictures that come with this message."""
    pictures_first: bool
    """False puts the pictures after the text."""
    question: Question


@dataclass(frozen=True, slots=True)
class Chat:
    """The turns of one conversation, with its system text."""

    system: str | None
    scenes: tuple[Scene, ...]
    """All pictures in the order in which the turns show them."""
    turns: tuple[Turn, ...]


def random_chat(
    scenes: Sequence[Scene],
    num_turns: int,
    split: Split,
    rng: random.Random,
    kinds: Sequence[QuestionKind] = tuple(QuestionKind),
) -> Chat:
    """Returns a chat that shows every scene, mostly all in the first turn, and asks `num_turns` questions."""
    spread = len(scenes) > 1 and num_turns > 1 and rng.random() < 0.2
    num_at_first = rng.randrange(1, len(scenes)) if spread else len(scenes)
    rest_turn = rng.randrange(1, num_turns) if spread else None
    turns = []
    num_shown = 0
    for index in range(num_turns):
        num_new = num_at_first if index == 0 else (len(scenes) - num_at_first if index == rest_turn else 0)
        num_shown += num_new
        question = ask_any(scenes[:num_shown], split, rng, kinds)
        turns.append(Turn(num_new, rng.random() < 0.88, question))
    system = rng.choice(SYSTEM_TEXTS) if rng.random() < 0.2 else None
    return Chat(system, tuple(scenes), tuple(turns))


def random_questions(
    scenes: Sequence[Scene],
    num_questions: int,
    split: Split,
    rng: random.Random,
    kinds: Sequence[QuestionKind] = tuple(QuestionKind),
) -> list[Chat]:
    """Returns chats of one turn each with the same system text and the same pictures, and different questions."""
    system = rng.choice(SYSTEM_TEXTS) if rng.random() < 0.2 else None
    return [
        Chat(system, tuple(scenes), (Turn(len(scenes), True, ask_any(scenes, split, rng, kinds)),))
        for _ in range(num_questions)
    ]


def user_message(turn: Turn) -> Message:
    """Returns the user's message of a turn, with its parts in order."""
    pictures: list[Part] = [{"type": "image"} for _ in range(turn.num_new_pictures)]
    text: list[Part] = [{"type": "text", "text": turn.question.text}]
    return {"role": "user", "content": pictures + text if turn.pictures_first else text + pictures}


def messages(chat: Chat, answers: Sequence[str]) -> list[Message]:
    """Returns the chat up to the question after `answers`, which are the assistant's turns so far."""
    said: list[Message] = [] if chat.system is None else [{"role": "system", "content": chat.system}]
    for turn, answer in zip(chat.turns, answers, strict=False):
        said += [user_message(turn), {"role": "assistant", "content": answer}]
    if len(answers) < len(chat.turns):
        said.append(user_message(chat.turns[len(answers)]))
    return said
