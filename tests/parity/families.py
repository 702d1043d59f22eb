"""A tiny model of every family: our two halves, and the answers of Hugging Face `generate` with the whole model.

Prompts are built as the decoder builds them, rows are made by the encoder's adapter on the vision half, and the
language half runs in the runner; the reference is the family's own processor and model.
"""

from __future__ import annotations

import pathlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import PIL.Image
import torch

from decoder_svc.prompt.prompt_builder import PromptBuilder, PromptLimits, ResolvedImage
from decoder_svc.prompt.prompt_spec import (
    ChatMessage,
    ChatPrompt,
    ChatRole,
    ImagePart,
    InlineImage,
    PromptSpec,
    TextPart,
    TextPrompt,
    TokenPrompt,
)
from decoder_svc.runner.cpu.runner import CPUModelRunner
from decoder_svc.runner.runner_config import RunnerConfig
from decoder_svc.scheduling.prompt import Prompt
from encoder_svc.images.image_inputs import VisionAdapter
from lookonce.content_key import (
    DEFAULT_TENANT,
    ContentKey,
    EncoderFingerprint,
    ProcessorOptions,
    content_key,
    image_digest,
)
from lookonce.families.base import Mask
from lookonce.model.half_model import load_vision_half
from lookonce.model.model_folder import ModelFolder
from tests import tiny_models
from tests.decoder_svc.conftest import loaded
from tests.parity import offline
from tests.parity.offline import Question

BLOCK_SIZE = 8
MAX_NEW_TOKENS = 8
# Length of the long answer that families with a sliding window or recurrent layers are asked for.
NUM_LONG_ANSWER_TOKENS = 64
# The last image is so elongated that every family resizes it to an unusual size.
SIZES = [(80, 60), (56, 140), (112, 112), (300, 40)]
IMAGES_PER_PROMPT = (0, 1, 3)
_NUM_PROMPTS = 9
# The only image of this question is so small that it has one row in families with rows by size.
_ONE_ROW = 4
# transformers 5.23 itself fails on such an image.
_FAIL_ON_ONE_ROW = frozenset({"mistral3", "mistral4"})


@dataclass(frozen=True, slots=True)
class Conformance:
    """One family's model with questions and reference answers."""

    name: str
    offline: offline.OfflineModel
    adapter: VisionAdapter
    # Prompt ids of each question from the family's own processor.
    reference_ids: list[list[int]]
    # A question whose answer is many times longer than the window; None without a window and recurrent layers.
    long_question: Question | None
    builder: PromptBuilder
    # Width and height of each question's images.
    sizes: dict[Prompt, list[tuple[int, int]]]

    def as_tokens(self) -> Iterator[tuple[TokenPrompt, list[ResolvedImage]]]:
        """Yields each question as the Tokenize call would return it, with its images."""
        for question in self.offline.questions:
            sizes = self.sizes[question.prompt]
            items = question.prompt.images
            sources = tuple(InlineImage(b"", item.options) for item in items)
            images = [
                ResolvedImage(item.key, *size, item.options, None) for item, size in zip(items, sizes, strict=True)
            ]
            yield TokenPrompt(question.prompt.token_ids, sources), images


def few_blocks(prompts: Sequence[Prompt]) -> int:
    """Number of KV blocks with which some of these prompts are preempted when all are asked at once.

    It suffices for about half of the prompts, and each answer needs one more block than its prompt. Prompts that are
    never split begin only if there is room for all their tokens, so it suffices for the longest of them alone.
    """
    sizes = [-(-len(prompt.token_ids) // BLOCK_SIZE) for prompt in prompts]
    return max(max(sizes) + 1, 0 if prompts[0].mask is Mask.PROMPT else sum(sizes) // 2)


def build(family: ModuleType, folder: pathlib.Path, num_prompts: int = _NUM_PROMPTS) -> Conformance:
    """Loads a family's model from its folder, and makes questions and reference answers."""
    maker = _Maker(family, folder)
    rng = random.Random(11)
    questions, reference_ids, sizes_of = [], [], {}
    for index in range(num_prompts):
        num_images = IMAGES_PER_PROMPT[index % len(IMAGES_PER_PROMPT)]
        sizes = [SIZES[(index + number) % len(SIZES)] for number in range(num_images)]
        if index == _ONE_ROW and family.NAME not in _FAIL_ON_ONE_ROW:
            sizes = [(5, 5)]
        images = [tiny_models.random_image(rng.randrange(9), *size) for size in sizes]
        question, ids = maker.question(_parts(images, rng))
        sizes_of[question.prompt] = sizes
        questions.append(question)
        reference_ids.append(ids)
    config = RunnerConfig(folder, torch.float32, block_size=BLOCK_SIZE, num_threads=1)
    runner = CPUModelRunner(config, maker.text.family)
    long_question = None
    if runner.get_kv_cache_spec().window is not None or runner.recurrent is not None:
        parts = _parts([tiny_models.random_image(3, *SIZES[0])], rng)
        long_question, _ = maker.question(parts, NUM_LONG_ANSWER_TOKENS)
    model = offline.OfflineModel(runner, questions, maker.rows, maker.end_token_ids)
    return Conformance(family.NAME, model, maker.adapter, reference_ids, long_question, maker.builder, sizes_of)


def _parts(images: Sequence[PIL.Image.Image], rng: random.Random) -> list[str | PIL.Image.Image]:
    parts: list[str | PIL.Image.Image] = list(images)
    for _ in range(rng.randint(1, 2)):
        parts.insert(rng.randint(0, len(parts)), " ".join(rng.choices(offline.WORDS, k=rng.randint(3, 9))))
    return parts


class _Maker:
    """Builds the same question for the reference and for our runner."""

    def __init__(self, family: ModuleType, folder: pathlib.Path) -> None:
        self.processor: Any = family.load_processor(folder)
        self.reference: Any = tiny_models.load_model(folder)
        self.text = loaded(folder)
        self._fingerprint = EncoderFingerprint(family.NAME)
        self.adapter = VisionAdapter.load(ModelFolder.open(folder))
        self.rows: dict[ContentKey, torch.Tensor] = {}
        ends = self.reference.generation_config.eos_token_id
        self.end_token_ids = frozenset(ends if isinstance(ends, list) else [ends])
        self._vision = load_vision_half(folder, torch.float32)
        limits = PromptLimits(2000, 8, self.text.vocab_size)
        self.builder = PromptBuilder(self.text.tokenizer, self.text.template, self.text.family, limits)

    def question(
        self, parts: Sequence[str | PIL.Image.Image], num_tokens: int = MAX_NEW_TOKENS
    ) -> tuple[offline.Question, list[int]]:
        images = [part for part in parts if not isinstance(part, str)]
        inputs = self._reference_inputs(parts, images)
        ids = inputs["input_ids"][0].tolist()
        with torch.inference_mode():
            output = self.reference.generate(
                **inputs, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False
            )
        options = ProcessorOptions(beside_others=len(images) > 1 and self.text.family.depends_on_image_count)
        prompt = self.builder.build(self._spec(parts, options), [self._resolved(image, options) for image in images])
        return offline.Question(prompt, output[0, len(ids) :].tolist()), ids

    def _reference_inputs(self, parts: Sequence[str | PIL.Image.Image], images: list[PIL.Image.Image]) -> Any:
        if self.text.template is None:
            return self._inputs_without_template(parts, images)
        content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
        rendered = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True
        )
        bos = self.processor.tokenizer.bos_token
        has_bos = bool(bos) and rendered.startswith(bos)
        nested = [images] if images else None
        inputs = self.processor(text=rendered, images=nested, return_tensors="pt", add_special_tokens=not has_bos)
        # Llama 4's processor gives pixels in bfloat16.
        return inputs.to(torch.float32)

    def _inputs_without_template(self, parts: Sequence[str | PIL.Image.Image], images: list[PIL.Image.Image]) -> Any:
        """Returns a prompt's inputs, built here if it has no images: a prefix model's processor demands one."""
        if images:
            return self.processor(text=self._joined(parts), images=[images], return_tensors="pt")
        tokenizer = self.processor.tokenizer
        ids = tokenizer(f"{tokenizer.bos_token}{self._joined(parts)}\n", add_special_tokens=False, return_tensors="pt")
        ids["token_type_ids"] = torch.zeros_like(ids["input_ids"])
        return ids

    def _spec(self, parts: Sequence[str | PIL.Image.Image], options: ProcessorOptions) -> PromptSpec:
        if self.text.template is None:
            num_images = sum(not isinstance(part, str) for part in parts)
            return TextPrompt(self._joined(parts), (InlineImage(b"", options),) * num_images)
        said = [TextPart(part) if isinstance(part, str) else ImagePart(InlineImage(b"", options)) for part in parts]
        return ChatPrompt((ChatMessage(ChatRole.USER, tuple(said)),))

    def _joined(self, parts: Sequence[str | PIL.Image.Image]) -> str:
        """Joins a prompt with all images first, as these models were trained."""
        texts = [part for part in parts if isinstance(part, str)]
        return self.text.family.placeholder * (len(parts) - len(texts)) + " ".join(texts)

    def _resolved(self, image: PIL.Image.Image, options: ProcessorOptions) -> ResolvedImage:
        digest = image_digest(image.tobytes() + repr(image.size).encode())
        key = content_key(digest, self._fingerprint, options, DEFAULT_TENANT)
        if key not in self.rows:
            with torch.inference_mode():
                inputs = self.adapter.pixel_inputs(image, options)
                self.rows[key] = self.adapter.image_rows(self._vision, [inputs])[0].float().contiguous()
        return ResolvedImage(key, image.width, image.height, options, None)
