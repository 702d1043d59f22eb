"""Turns random training chats into padded token batches with the answers marked.

Renders the chat template's text itself, piece by piece, to know where the answers lie; `rendered_ids` is checked
against the saved processor by train.py.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from demo.chats import Chat, messages, random_chat
from demo.model import NUM_ROWS
from demo.picture_pool import PicturePool
from demo.tokenizer import BOS, EOS, IMAGE, PICTURE, ROLE_TOKENS
from demo.wordings import Split


@dataclass(frozen=True, slots=True)
class BatchShape:
    """A batch of chats that all show the same number of pictures."""

    num_pictures: int
    num_chats: int
    num_turns: int
    weight: float
    """Relative share of the training steps."""


BATCH_SHAPES: Final = (
    BatchShape(num_pictures=1, num_chats=16, num_turns=8, weight=0.55),
    BatchShape(num_pictures=2, num_chats=10, num_turns=7, weight=0.33),
    BatchShape(num_pictures=3, num_chats=7, num_turns=6, weight=0.12),
)


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """One training step's input."""

    input_ids: Tensor
    """int64 [num_chats, num_tokens], padded on the right."""
    is_answer: Tensor
    """bool [num_chats, num_tokens]: tokens to be predicted, the end of each answer included."""
    pixel_values: Tensor
    """float32 [num_pictures in all chats, 3, 96, 96], in the order of their placeholders."""


class BatchSource:
    """Draws random training batches from a pool of pictures; deterministic by seed and worker."""

    def __init__(self, pool: PicturePool, tokenizer: PreTrainedTokenizerFast, seed: int, rank: int) -> None:
        self._pool = pool
        self._tokenizer = tokenizer
        # The workers' batches have equal shapes, so that none waits long for another.
        self._shape_rng = random.Random(f"shape:{seed}")
        self._rng = random.Random(f"chats:{seed}:{rank}")

    def next_batch(self) -> TokenBatch:
        """The next batch, of a random shape."""
        rng = self._rng
        shape = self._shape_rng.choices(BATCH_SHAPES, weights=[each.weight for each in BATCH_SHAPES])[0]
        chats: list[Chat] = []
        pictures: list[int] = []
        for _ in range(shape.num_chats):
            indices = [rng.randrange(len(self._pool.scenes)) for _ in range(shape.num_pictures)]
            pictures += indices
            scenes = [self._pool.scenes[index] for index in indices]
            chats.append(random_chat(scenes, shape.num_turns, Split.TRAINING, rng))
        rendered = render_chats(chats, self._tokenizer)
        num_tokens = max(len(ids) for ids, _ in rendered)
        input_ids = torch.full((len(chats), num_tokens), self._tokenizer.convert_tokens_to_ids("<pad>"))
        is_answer = torch.zeros(len(chats), num_tokens, dtype=torch.bool)
        for index, (ids, answer_flags) in enumerate(rendered):
            input_ids[index, : len(ids)] = torch.tensor(ids)
            is_answer[index, : len(ids)] = torch.tensor(answer_flags)
        return TokenBatch(input_ids, is_answer, self._pool.normalised(pictures))


def render_chats(chats: list[Chat], tokenizer: PreTrainedTokenizerFast) -> list[tuple[list[int], list[bool]]]:
    """Token ids of each finished chat, and which of them the model shall predict."""
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
    """The chat's text cut where the template puts special tokens: (text, whether it is an answer)."""
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
