"""Turns random training questions into padded token batches with the answers marked.

Most batches ask several independent questions about the same pictures. Each question attends only to the pictures and
to itself, and its positions start right after the pictures, so it is a conversation of its own and costs only its text.
In a chat of several turns the model could often copy a later answer from an earlier one instead of the picture; that
effect was not measured alone (docs/log.md). The other batches are real chats, so that the model learns those, too.

This module renders the chat template's text itself, piece by piece, to know the position of the answers; train.py
checks `rendered_ids` against the saved processor.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from demo.chats import Chat, messages, random_chat, random_questions
from demo.lessons import BatchShape, Lesson
from demo.model import NUM_ROWS
from demo.scenes import Scene
from demo.tokenizer import BOS, EOS, IMAGE, PICTURE, ROLE_TOKENS
from demo.wordings import Split


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The padded input of one training step."""

    input_ids: Tensor
    """int64 [num_chats, num_tokens], padded on the right."""
    position_ids: Tensor
    """int64 [num_chats, num_tokens]."""
    attention_mask: Tensor
    """bool [num_chats, 1, num_tokens, num_tokens]: true where a token may look."""
    is_answer: Tensor
    """bool [num_chats, num_tokens]: tokens to be predicted, the end of each answer included."""
    image_rows: Tensor
    """float32 [num_pictures in all chats, 36, hidden_size], in the order of their placeholders."""


@dataclass(frozen=True, slots=True)
class RenderedRow:
    """One row of a batch before padding. All lists have one element per token."""

    ids: list[int]
    is_answer: list[bool]
    positions: list[int]
    branches: list[int]
    """0 for what all may see, else the number of the question that the token belongs to."""


class BatchSource:
    """Draws random training batches from a pool of pictures, determined by seed and worker."""

    def __init__(
        self, scenes: list[Scene], image_rows: Tensor, tokenizer: PreTrainedTokenizerFast, seed: int, rank: int
    ) -> None:
        """`image_rows` are the rows of the scenes' pictures, [num_scenes, 36, hidden_size]."""
        self._scenes = scenes
        self._image_rows = image_rows
        self._tokenizer = tokenizer
        # All workers' batches have the same shape, so that no worker waits long for another.
        self._shape_rng = random.Random(f"shape:{seed}")
        self._rng = random.Random(f"chats:{seed}:{rank}")

    def next_batch(self, lesson: Lesson) -> TokenBatch:
        """Returns the next batch of the lesson, with a random shape."""
        shape = self._shape_rng.choices(lesson.shapes, weights=[each.weight for each in lesson.shapes])[0]
        rows: list[RenderedRow] = []
        pictures: list[int] = []
        for _ in range(shape.num_chats):
            indices = [self._rng.randrange(len(self._scenes)) for _ in range(shape.num_pictures)]
            pictures += indices
            rows.append(self._row(lesson, shape, [self._scenes[index] for index in indices]))
        return pad(rows, self._tokenizer.pad_token_id, self._image_rows[pictures])

    def _row(self, lesson: Lesson, shape: BatchShape, scenes: list[Scene]) -> RenderedRow:
        split = Split.TERSE if self._rng.random() < lesson.terse_share else Split.TRAINING
        if shape.is_chat:
            chat = random_chat(scenes, shape.num_questions, split, self._rng, lesson.kinds)
            ids, flags = render_chats([chat], self._tokenizer)[0]
            return RenderedRow(ids, flags, list(range(len(ids))), [0] * len(ids))
        chats = random_questions(scenes, shape.num_questions, split, self._rng, lesson.kinds)
        return branch(render_chats(chats, self._tokenizer), self._tokenizer.convert_tokens_to_ids(IMAGE))


def branch(rendered: list[tuple[list[int], list[bool]]], image_id: int) -> RenderedRow:
    """Joins conversations that are equal up to their last picture into one row of independent branches."""
    first_ids = rendered[0][0]
    num_shared = len(first_ids) - first_ids[::-1].index(image_id)
    shared = first_ids[:num_shared]
    row = RenderedRow(list(shared), [False] * num_shared, list(range(num_shared)), [0] * num_shared)
    for number, (ids, flags) in enumerate(rendered, 1):
        if ids[:num_shared] != shared:
            raise ValueError("the conversations differ before their last picture")
        row.ids.extend(ids[num_shared:])
        row.is_answer.extend(flags[num_shared:])
        row.positions.extend(range(num_shared, len(ids)))
        row.branches.extend([number] * (len(ids) - num_shared))
    return row


def pad(rows: list[RenderedRow], pad_id: int, image_rows: Tensor) -> TokenBatch:
    """Pads rows of different lengths to one batch."""
    num_tokens = max(len(row.ids) for row in rows)
    input_ids = torch.full((len(rows), num_tokens), pad_id)
    position_ids = torch.zeros(len(rows), num_tokens, dtype=torch.long)
    branches = torch.full((len(rows), num_tokens), -1)
    is_answer = torch.zeros(len(rows), num_tokens, dtype=torch.bool)
    for index, row in enumerate(rows):
        length = len(row.ids)
        input_ids[index, :length] = torch.tensor(row.ids)
        position_ids[index, :length] = torch.tensor(row.positions)
        branches[index, :length] = torch.tensor(row.branches)
        is_answer[index, :length] = torch.tensor(row.is_answer)
    may_look = (branches[:, :, None] == branches[:, None, :]) | (branches[:, None, :] == 0)
    may_look &= torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    return TokenBatch(input_ids, position_ids, may_look[:, None], is_answer, image_rows)


def render_chats(chats: list[Chat], tokenizer: PreTrainedTokenizerFast) -> list[tuple[list[int], list[bool]]]:
    """Returns the token ids of each finished chat, and a mask of the tokens that the model has to predict."""
    pieces = [_pieces(chat) for chat in chats]
    flat = [text for chat_pieces in pieces for text, _ in chat_pieces]
    encoded = iter(tokenizer(flat, add_special_tokens=False)["input_ids"])
    image_id = tokenizer.convert_tokens_to_ids(IMAGE)
    rendered = []
    for chat_pieces in pieces:
        ids: list[int] = []
        flags: list[bool] = []
        for _, is_answer in chat_pieces:
            for token_id in next(encoded):
                repeats = NUM_ROWS if token_id == image_id else 1
                ids += [token_id] * repeats
                flags += [is_answer] * repeats
        rendered.append((ids, flags))
    return rendered


def _pieces(chat: Chat) -> list[tuple[str, bool]]:
    """Splits the chat's text at the template's special tokens into (text, whether it is an answer)."""
    pieces: list[tuple[str, bool]] = [(BOS, False)]
    num_seen = 0
    for message in messages(chat, [turn.question.answer for turn in chat.turns]):
        content = message["content"]
        text = ROLE_TOKENS[message["role"]]
        if isinstance(content, str):
            is_answer = message["role"] == "assistant"
            pieces += [(text, False), (content + (EOS if is_answer else ""), is_answer)]
            continue
        for part in content:
            if part["type"] == "image":
                num_seen += 1
                text += f"{PICTURE}{num_seen}{IMAGE}"
            else:
                text += part["text"]
        pieces.append((text, False))
    return pieces
