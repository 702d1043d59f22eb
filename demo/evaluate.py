"""Asks a saved demo model new questions with plain `transformers` generate, and counts the exact answers.

Run as `python -m demo.evaluate models/demo --num-questions 400 --seed 1`.
"""

from __future__ import annotations

import argparse
import io
import json
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoProcessor, LlavaForConditionalGeneration

from demo.chats import Chat, Message, messages, random_chat
from demo.model import MAX_NEW_TOKENS
from demo.questions import DemoQuestion
from demo.scenes import NUM_TRAINING_SEEDS, random_scene, render
from demo.wordings import Split

_BATCH_SIZE = 32
_MAX_TURNS = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """One question to the model, with its answer."""

    kind: str
    num_pictures: int
    turn: int
    text: str
    expected: str
    answer: str
    margin: float
    """Smallest gap between the best and the second best logit over the answer's tokens."""

    @property
    def is_exact(self) -> bool:
        """Whether the answer is the expected one, ignoring surrounding white space."""
        return self.answer == self.expected


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Shares of exact answers, from 0 to 1, over all questions and by several keys."""

    num_questions: int
    accuracy: float
    by_kind: dict[str, float]
    by_num_pictures: dict[str, float]
    by_turn: dict[str, float]
    margin_p05: float
    """5th percentile of the logit margins of all answers."""
    margin_median: float


class DemoModel:
    """A loaded model folder that answers chats. Never uses the network."""

    def __init__(self, model_dir: Path) -> None:
        self._processor: Any = AutoProcessor.from_pretrained(model_dir, local_files_only=True)
        self._model: Any = LlavaForConditionalGeneration.from_pretrained(model_dir, local_files_only=True).eval()

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the whole model; tied weights count once."""
        return sum(parameter.numel() for parameter in self._model.parameters())

    def answer(
        self, chats: Sequence[list[Message]], pictures: Sequence[Sequence[Image.Image]]
    ) -> list[tuple[str, float]]:
        """Returns the greedy (answer, logit margin) of each chat. `pictures[i]` are those of `chats[i]`, in order."""
        prompts = [self._processor.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
        images = [list(each) for each in pictures] if any(pictures) else None
        inputs = self._processor(text=prompts, images=images, padding=True, return_tensors="pt")
        with torch.inference_mode():
            output = self._model.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=MAX_NEW_TOKENS,
                return_dict_in_generate=True,
                output_logits=True,
            )
        generated = output.sequences[:, inputs["input_ids"].shape[1] :]
        best = torch.stack(output.logits, dim=1).topk(2, dim=-1).values
        margins = (best[..., 0] - best[..., 1]).masked_fill(generated == self._processor.tokenizer.pad_token_id, 1e9)
        texts = self._processor.batch_decode(generated, skip_special_tokens=True)
        return [(text.strip(), margin) for text, margin in zip(texts, margins.amin(dim=1).tolist(), strict=True)]


def evaluate(model_dir: Path, num_questions: int, seed: int, split: Split = Split.HELD_OUT) -> Evaluation:
    """Asks `num_questions` questions about pictures that training never drew, by default in wordings it never read."""
    return summarise(ask_all(DemoModel(model_dir), fresh_chats(num_questions, seed, split)))


def fresh_chats(num_questions: int, seed: int, split: Split) -> list[Chat]:
    """Returns chats of one to three turns over one to three held-out pictures; `num_questions` questions in all."""
    rng = random.Random(f"{split}:{seed}")
    chats: list[Chat] = []
    while num_questions > 0:
        num_turns = min(num_questions, rng.randint(1, _MAX_TURNS))
        num_pictures = rng.choices((1, 2, 3), weights=(5, 4, 1))[0]
        scenes = [random_scene(NUM_TRAINING_SEEDS + rng.randrange(2**40)) for _ in range(num_pictures)]
        chats.append(random_chat(scenes, num_turns, split, rng))
        num_questions -= num_turns
    return chats


def ask_all(model: DemoModel, chats: Sequence[Chat]) -> list[Outcome]:
    """Asks all questions of every chat. Later turns see the model's own earlier answers."""
    pictures = [[render(scene) for scene in chat.scenes] for chat in chats]
    answers: list[list[str]] = [[] for _ in chats]
    outcomes: list[Outcome] = []
    for turn_index in range(_MAX_TURNS):
        live = [index for index, chat in enumerate(chats) if len(chat.turns) > turn_index]
        for start in range(0, len(live), _BATCH_SIZE):
            batch = live[start : start + _BATCH_SIZE]
            shown = [sum(turn.num_new_pictures for turn in chats[i].turns[: turn_index + 1]) for i in batch]
            replies = model.answer(
                [messages(chats[i], answers[i]) for i in batch],
                [pictures[i][:count] for i, count in zip(batch, shown, strict=True)],
            )
            for i, count, (text, margin) in zip(batch, shown, replies, strict=True):
                question = chats[i].turns[turn_index].question
                answers[i].append(text)
                outcomes.append(
                    Outcome(question.kind.value, count, turn_index + 1, question.text, question.answer, text, margin)
                )
    return outcomes


def answer_demo_question(model: DemoModel, question: DemoQuestion) -> str:
    """Returns the model's answer to one question of the fixed demo session."""
    pictures = [Image.open(io.BytesIO(part)) for part in question.parts if isinstance(part, bytes)]
    message: Message = {
        "role": "user",
        "content": [
            {"type": "image"} if isinstance(part, bytes) else {"type": "text", "text": part} for part in question.parts
        ],
    }
    return model.answer([[message]], [pictures])[0][0]


def summarise(outcomes: Sequence[Outcome]) -> Evaluation:
    """Computes the shares of exact answers over the outcomes."""
    margins = sorted(outcome.margin for outcome in outcomes)
    return Evaluation(
        num_questions=len(outcomes),
        accuracy=_share(outcome.is_exact for outcome in outcomes),
        by_kind=_accuracy_by((outcome.kind, outcome) for outcome in outcomes),
        by_num_pictures=_accuracy_by((str(outcome.num_pictures), outcome) for outcome in outcomes),
        by_turn=_accuracy_by((str(outcome.turn), outcome) for outcome in outcomes),
        margin_p05=round(margins[len(margins) // 20], 3),
        margin_median=round(margins[len(margins) // 2], 3),
    )


def _accuracy_by(keyed: Iterable[tuple[str, Outcome]]) -> dict[str, float]:
    groups: dict[str, list[bool]] = defaultdict(list)
    for key, outcome in keyed:
        groups[key].append(outcome.is_exact)
    return {key: _share(group) for key, group in sorted(groups.items())}


def _share(hits: Iterable[bool]) -> float:
    counted = list(hits)
    return round(sum(counted) / len(counted), 4)


def main() -> None:
    """Prints the wrong answers, and the evaluation as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--num-questions", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--split", type=Split, choices=list(Split), default=Split.HELD_OUT)
    options = parser.parse_args()
    outcomes = ask_all(DemoModel(options.model_dir), fresh_chats(options.num_questions, options.seed, options.split))
    for outcome in outcomes:
        if not outcome.is_exact:
            print(f"{outcome.kind}: {outcome.text!r} expected {outcome.expected!r}, got {outcome.answer!r}")
    print(json.dumps(asdict(summarise(outcomes)), indent=2))


if __name__ == "__main__":
    main()
