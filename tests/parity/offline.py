"""Scheduler and runner driven in one thread, without services: rows come straight from the Hugging Face vision half."""

from __future__ import annotations

import pathlib
import random
from dataclasses import dataclass
from typing import Any

import torch

from decoder_svc.encoder_cache_manager import EncoderCacheManager
from decoder_svc.fetched_rows import FetchedRows
from decoder_svc.kv_cache_manager import KVCacheManager
from decoder_svc.models.base import FamilyAdapter
from decoder_svc.models.registry import load_family
from decoder_svc.request import ImageItem, Prompt, Request, RequestId, RowSource, SamplingParams, Span
from decoder_svc.runner.base import RunnerConfig
from decoder_svc.runner.cpu import CPUModelRunner
from decoder_svc.scheduler import Scheduler, SchedulerLimits
from decoder_svc.scheduler_output import SchedulerOutput
from lookonce.content_key import (
    DEFAULT_TENANT,
    ContentKey,
    EncoderFingerprint,
    ProcessorOptions,
    content_key,
    image_digest,
)
from lookonce.embedding_meta import RowDtype
from lookonce.model_folder import ModelFolder
from tests import tiny_models

MAX_NEW_TOKENS = 8
WORDS = "what colour is the small cat near a red boat and why do you see it".split()


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt with its pictures and what Hugging Face `generate` answers."""

    prompt: Prompt
    expected: list[int]


@dataclass(frozen=True, slots=True)
class OfflineModel:
    """One tiny model: our runner, and the rows of every picture that its questions use."""

    runner: CPUModelRunner
    questions: list[Question]
    rows: dict[ContentKey, torch.Tensor]


def build(folder: pathlib.Path, num_prompts: int, images_per_prompt: tuple[int, ...]) -> OfflineModel:
    """Questions with 0, 1, 3, … pictures in turn, answered by Hugging Face `generate` in fp32."""
    processor = tiny_models.load_processor(folder)
    reference = tiny_models.load_model(folder)
    family = load_family(ModelFolder.open(folder), processor.tokenizer)
    rows: dict[ContentKey, torch.Tensor] = {}
    rng = random.Random(7)
    questions = []
    for index in range(num_prompts):
        images = [
            tiny_models.random_image(rng.randrange(12), rng.choice((60, 90, 140)), rng.choice((56, 100)))
            for _ in range(images_per_prompt[index % len(images_per_prompt)])
        ]
        questions.append(_question(processor, reference, family, images, rng, rows))
    runner = CPUModelRunner(RunnerConfig(folder, torch.float32, block_size=8, num_threads=1), family)
    return OfflineModel(runner, questions, rows)


def _question(
    processor: Any,
    reference: Any,
    family: FamilyAdapter,
    images: list[Any],
    rng: random.Random,
    rows: dict[ContentKey, torch.Tensor],
) -> Question:
    parts: list[dict[str, str]] = [{"type": "image"} for _ in images]
    for _ in range(rng.randint(1, 2)):
        words = rng.choices(WORDS, k=rng.randint(3, 12))
        parts.insert(rng.randint(0, len(parts)), {"type": "text", "text": " ".join(words)})
    text = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    inputs = processor(text=text, images=images or None, return_tensors="pt")
    with torch.inference_mode():
        output = reference.generate(
            **inputs, max_new_tokens=MAX_NEW_TOKENS, min_new_tokens=MAX_NEW_TOKENS, do_sample=False
        )
    token_ids = inputs["input_ids"][0].tolist()
    prompt = _prompt(processor, reference, family, token_ids, images, rows)
    return Question(prompt, output[0, len(token_ids) :].tolist())


def _prompt(
    processor: Any,
    reference: Any,
    family: FamilyAdapter,
    token_ids: list[int],
    images: list[Any],
    rows: dict[ContentKey, torch.Tensor],
) -> Prompt:
    items, layouts, offset = [], [], 0
    options = ProcessorOptions()
    for image in images:
        digest = image_digest(image.tobytes() + repr(image.size).encode())
        key = content_key(digest, EncoderFingerprint("test"), options, DEFAULT_TENANT)
        if key not in rows:
            rows[key] = _rows(processor, reference, image)
        layout = family.image_layout(image.width, image.height, options)
        offset = token_ids.index(family.image_token_id, offset)
        items.append(ImageItem(key, Span(offset, len(layout.token_ids)), layout.num_rows, options, None))
        layouts.append(layout)
        offset += len(layout.token_ids)
    return Prompt(tuple(token_ids), tuple(items), family.positions(token_ids, items, layouts))


def _rows(processor: Any, reference: Any, image: Any) -> torch.Tensor:
    inputs = processor.image_processor(images=[image], return_tensors="pt")
    with torch.inference_mode():
        features = reference.get_image_features(**inputs).pooler_output
    return features[0].float().contiguous()


def run(
    model: OfflineModel,
    *,
    max_num_batched_tokens: int,
    num_blocks: int = 2000,
    cache_rows: int = 400,
    rows_arrive_after: int = 0,
) -> tuple[list[list[int]], Scheduler, list[SchedulerOutput]]:
    """All questions at once; returns the answers in order, the scheduler afterwards, and every step."""
    runner = model.runner
    runner.initialize_kv_cache(num_blocks)
    scheduler = Scheduler(
        SchedulerLimits(max_num_batched_tokens, max_num_seqs=32, max_context_tokens=4000),
        KVCacheManager(num_blocks, block_size=8),
        EncoderCacheManager(cache_rows),
    )
    requests = []
    for index, question in enumerate(model.questions):
        params = SamplingParams(max_tokens=MAX_NEW_TOKENS)
        requests.append(Request(RequestId(f"r{index}"), question.prompt, params, arrival_s=float(index)))
        scheduler.add(requests[-1])
    steps: list[SchedulerOutput] = []
    travelling: list[tuple[int, ContentKey]] = []
    while scheduler.has_requests():
        step = scheduler.schedule()
        steps.append(step)
        assert len(steps) < 5000, "the scheduler makes no progress"
        travelling += [(len(steps) + rows_arrive_after, fetch.key) for fetch in step.fetches]
        scheduler.update(step, runner.execute_model(step))
        scheduler.check_integrity()
        for due, key in [arrival for arrival in travelling if arrival[0] <= len(steps)]:
            travelling.remove((due, key))
            if scheduler.rows_arrived(key, RowSource.ENCODED):
                rows = model.rows[key]
                runner.put_rows(
                    FetchedRows(key, bytearray(rows.numpy().tobytes()), len(rows), RowDtype.FLOAT32, RowSource.ENCODED)
                )
    return [request.output_token_ids for request in requests], scheduler, steps
