"""Trains the demo model from scratch into a Hugging Face folder: `python -m demo.train --out models/demo`.

There are three stages: vision_pretraining.py, then chats over one to three pictures with the loss on the answers, then
chats that ask for lists as well. `--continue-from FOLDER` runs only the last one.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import LlavaForConditionalGeneration, LlavaProcessor

from demo.chats import messages, random_chat
from demo.data_parallel import Workers, run_workers
from demo.evaluate import DemoModel, Evaluation, answer_demo_question, evaluate
from demo.lessons import LIST_LESSON, Lesson, lesson_at
from demo.model import MAX_NEW_TOKENS, NUM_ROWS, build_model, build_processor
from demo.picture_pool import PicturePool, draw_pool
from demo.questions import demo_session
from demo.scenes import render
from demo.token_batches import BatchSource, TokenBatch, render_chats
from demo.tokenizer import train_tokenizer
from demo.vision_pretraining import compute_image_rows, pretrain_vision, warm_cosine
from demo.wordings import Split

log = logging.getLogger(__name__)

_NUM_WARMUP_STEPS = 40
_REPORT_SEED = 200
_MAX_PARAMETERS = 2_000_000


@dataclass(frozen=True, slots=True)
class ChatStage:
    """A stage that trains the language model on chats."""

    name: str
    learning_rate: float
    lesson_at: Callable[[float], Lesson]
    """The lesson after a share, from 0 to 1, of the stage's steps."""
    weighs_by_length: bool
    """Whether each token of an answer of n tokens weighs 1 / sqrt(n). A list has thirty times as many tokens as a
    colour; if all weigh the same, the model forgets other answers (docs/log.md)."""


_CHATS = ChatStage("chat", 3e-3, lesson_at, weighs_by_length=False)
_LISTS = ChatStage("list", 1.5e-3, lambda _: LIST_LESSON, weighs_by_length=True)


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """All inputs that determine the result, besides the code."""

    seed: int
    num_workers: int
    """Processes of one thread each; batches and pictures below are per worker."""
    num_pictures: int
    num_vision_steps: int
    vision_batch_size: int
    num_chat_steps: int
    num_list_steps: int
    continue_from: Path | None = None
    """Folder of a model after the first two stages; with it only the third one runs."""


def train(options: TrainingOptions, out_dir: Path) -> float:
    """Trains and saves into `out_dir`. Returns the seconds it took, with start-up, drawing and saving."""
    started_s = time.monotonic()
    run_workers(train_in_worker, options.num_workers, _MAX_PARAMETERS, options, out_dir)
    return time.monotonic() - started_s


def train_in_worker(workers: Workers, options: TrainingOptions, out_dir: Path) -> None:
    """Runs one worker's part of the training. The first worker saves the result."""
    if options.continue_from is None:
        tokenizer = train_tokenizer(options.seed)
        processor = build_processor(tokenizer)
        model = build_model(tokenizer, options.seed)
    else:
        processor = LlavaProcessor.from_pretrained(options.continue_from, local_files_only=True)
        tokenizer = processor.tokenizer
        model = LlavaForConditionalGeneration.from_pretrained(options.continue_from, local_files_only=True)
        model.generation_config.max_new_tokens = MAX_NEW_TOKENS
    pool = draw_pool(options.num_pictures, workers.rank * options.num_pictures)
    if workers.is_first:
        check_inputs_match_processor(processor, pool)
    log.info("%d pictures drawn by each of %d workers", options.num_pictures, workers.num_workers)
    if options.continue_from is None:
        generator = torch.Generator().manual_seed(options.seed * 1000 + workers.rank)
        pretrain_vision(model, tokenizer, pool, options.num_vision_steps, options.vision_batch_size, generator, workers)
    image_rows = compute_image_rows(model, pool)

    def run(stage: ChatStage, num_steps: int, seed: int) -> None:
        source = BatchSource(pool.scenes, image_rows, tokenizer, seed, workers.rank)
        train_on_chats(model, source, stage, num_steps, workers)

    if options.continue_from is None:
        run(_CHATS, options.num_chat_steps, options.seed)
    run(_LISTS, options.num_list_steps, options.seed + 1)
    if workers.is_first:
        model.save_pretrained(out_dir)
        processor.save_pretrained(out_dir)


def train_on_chats(
    model: LlavaForConditionalGeneration, source: BatchSource, stage: ChatStage, num_steps: int, workers: Workers
) -> None:
    """Runs one stage of chats: trains the language model in place to answer from fixed image rows.

    Muon (Jordan et al. 2024) trains the language model's matrices, AdamW the rest (docs/log.md compares them).
    """
    matrices, rest = grouped_parameters(model.model.language_model)
    rate = stage.learning_rate
    optimizers = [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: warm_cosine(step, _NUM_WARMUP_STEPS, num_steps, 0.02))
        for each in optimizers
    ]
    started_s = time.monotonic()
    num_right = num_asked = 0
    for step in range(num_steps):
        batch = source.next_batch(stage.lesson_at(step / num_steps))
        loss, right, asked = answer_loss(model, batch, stage.weighs_by_length)
        model.zero_grad(set_to_none=True)
        loss.backward()
        workers.average_gradients(model.model.language_model.parameters())
        nn.utils.clip_grad_norm_(model.model.language_model.parameters(), 1.0)
        for each in (*optimizers, *schedules):
            each.step()
        num_right, num_asked = num_right + right, num_asked + asked
        if step % 25 == 24:
            pace_s = (time.monotonic() - started_s) / (step + 1)
            done = f"{stage.name} step {step + 1}/{num_steps}"
            log.info("%s loss %.3f tokens %.4f %.2f s/step", done, loss.item(), num_right / num_asked, pace_s)
            num_right = num_asked = 0


def grouped_parameters(language_model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Returns (matrices inside the layers, all other parameters)."""
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in language_model.named_parameters():
        (matrices if name.startswith("layers.") and parameter.ndim == 2 else rest).append(parameter)
    return matrices, rest


def answer_loss(
    model: LlavaForConditionalGeneration, batch: TokenBatch, weighs_by_length: bool
) -> tuple[torch.Tensor, int, int]:
    """Returns (mean cross entropy of the answer tokens, number of right predictions, number of answer tokens)."""
    hidden = hidden_states(model, batch)
    is_answer = batch.is_answer[:, 1:]
    targets = batch.input_ids[:, 1:][is_answer]
    logits = model.lm_head(hidden[:, :-1][is_answer])
    right = int((logits.argmax(-1) == targets).sum())
    losses = nn.functional.cross_entropy(logits, targets, reduction="none")
    weights = answer_lengths(is_answer).float().rsqrt() if weighs_by_length else torch.ones_like(losses)
    return (losses * weights).sum() / weights.sum(), right, targets.numel()


def answer_lengths(is_answer: torch.Tensor) -> torch.Tensor:
    """Returns for each answer token the number of tokens of its answer: int64 [number of answer tokens].

    Args:
        is_answer: bool [num_chats, num_tokens]; the tokens of an answer stand side by side.
    """
    begins = is_answer & ~nn.functional.pad(is_answer[:, :-1], (1, 0))
    numbers = begins.flatten().cumsum(0)[is_answer.flatten()]
    return numbers.bincount()[numbers]


def hidden_states(model: LlavaForConditionalGeneration, batch: TokenBatch) -> torch.Tensor:
    """Returns the last hidden states [num_chats, num_tokens, hidden_size], with image rows for the placeholders."""
    is_image = (batch.input_ids == model.config.image_token_id)[..., None]
    embeddings = model.get_input_embeddings()(batch.input_ids).masked_scatter(is_image, batch.image_rows)
    hidden: torch.Tensor = model.model.language_model(
        inputs_embeds=embeddings,
        position_ids=batch.position_ids,
        attention_mask=batch.attention_mask,
        use_cache=False,
    ).last_hidden_state
    return hidden


def check_inputs_match_processor(processor: LlavaProcessor, pool: PicturePool, num_chats: int = 24) -> None:
    """Raises ValueError unless training uses exactly the token ids and pixels of the saved processor."""
    rng = random.Random(0)
    for number in range(num_chats):
        indices = [rng.randrange(len(pool.scenes)) for _ in range(number % 3 + 1)]
        chat = random_chat([pool.scenes[index] for index in indices], 4, Split.TRAINING, rng)
        answers = [turn.question.answer for turn in chat.turns]
        prompt = processor.apply_chat_template(messages(chat, answers))
        pictures = [render(scene) for scene in chat.scenes]
        made: Any = processor(text=prompt, images=pictures, return_tensors="pt")
        ids = render_chats([chat], processor.tokenizer)[0][0]
        if made["input_ids"][0].tolist() != ids:
            raise ValueError(f"the rendered ids differ from the processor's for {prompt!r}")
        if ids.count(processor.image_token_id) != NUM_ROWS * len(indices):
            raise ValueError(f"expected {NUM_ROWS} placeholders per picture in {prompt!r}")
        if not np.array_equal(made["pixel_values"].numpy(), pool.normalised(indices).numpy()):
            raise ValueError(f"the pool's pixels differ from the processor's for pictures {indices}")


def report(options: TrainingOptions, out_dir: Path, training_s: float) -> Evaluation:
    """Evaluates the saved folder, writes REPORT.json beside the weights and returns the held-out evaluation.

    The time of a training that this one continues counts as well.
    """
    if options.continue_from is not None:
        training_s += json.loads((Path(options.continue_from) / "REPORT.json").read_text())["training_seconds"]
    demo = DemoModel(out_dir)
    held_out = evaluate(out_dir, num_questions=2000, seed=_REPORT_SEED)
    known_wordings = evaluate(out_dir, num_questions=1000, seed=_REPORT_SEED, split=Split.TRAINING)
    session = [(question.expected, answer_demo_question(demo, question)) for question in demo_session()]
    figures = {
        "held_out_pictures_and_wordings": asdict(held_out),
        "held_out_pictures_training_wordings": asdict(known_wordings),
        "demo_session_right": [expected == answer for expected, answer in session],
        "training_seconds": round(training_s, 1),
        "num_parameters": demo.num_parameters,
        "rows_per_picture": NUM_ROWS,
        "report_seed": _REPORT_SEED,
        "options": asdict(options),
    }
    (out_dir / "REPORT.json").write_text(json.dumps(figures, indent=2) + "\n")
    return held_out


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains, saves, evaluates and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--num-pictures", type=int, default=12_000, help="per worker")
    parser.add_argument("--num-vision-steps", type=int, default=800)
    parser.add_argument("--vision-batch-size", type=int, default=32, help="per worker")
    parser.add_argument("--num-chat-steps", type=int, default=4400)
    parser.add_argument("--num-list-steps", type=int, default=1800)
    parser.add_argument("--continue-from", help="folder of a model after the first two stages: run the third one alone")
    parsed = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    out_dir: Path = parsed.out
    options = TrainingOptions(
        seed=parsed.seed,
        num_workers=parsed.num_workers,
        num_pictures=parsed.num_pictures,
        num_vision_steps=parsed.num_vision_steps,
        vision_batch_size=parsed.vision_batch_size,
        num_chat_steps=parsed.num_chat_steps,
        num_list_steps=parsed.num_list_steps,
        continue_from=parsed.continue_from,
    )
    training_s = train(options, out_dir)
    log.info("trained in %.0f s", training_s)
    held_out = report(options, out_dir, training_s)
    log.info("held-out accuracy %.4f: %s", held_out.accuracy, held_out.by_kind)


if __name__ == "__main__":
    main()
