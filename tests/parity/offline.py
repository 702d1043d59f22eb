"""Scheduler and runner driven in one thread, without services. Rows come directly from the Hugging Face vision half."""

from __future__ import annotations

import pathlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from decoder_svc.prompt.family import DecoderFamily, load_family
from decoder_svc.rows.fetched_rows import FetchedRows
from decoder_svc.runner.base import ModelRunnerBase
from decoder_svc.runner.cpu.runner import CPUModelRunner
from decoder_svc.runner.row_cache import RowCache
from decoder_svc.runner.runner_config import RunnerConfig
from decoder_svc.scheduling.encoder_cache_manager import EncoderCacheManager
from decoder_svc.scheduling.kv_cache.kv_cache_manager import KVCacheManager
from decoder_svc.scheduling.kv_cache.kv_pool_size import sliding_group_size
from decoder_svc.scheduling.kv_cache.state_group import StateGroupSize
from decoder_svc.scheduling.prompt import ImageItem, Prompt, Span
from decoder_svc.scheduling.request import Request, RequestId
from decoder_svc.scheduling.request_output import TokenLogprobs
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.scheduler import Scheduler
from decoder_svc.scheduling.scheduler_limits import SchedulerLimits
from decoder_svc.scheduling.scheduler_output import RowFetch, SchedulerOutput
from decoder_svc.scheduling.speculation import NO_SPECULATION, SpeculationLimits
from lookonce.content_key import (
    DEFAULT_TENANT,
    ContentKey,
    EncoderFingerprint,
    ProcessorOptions,
    content_key,
    image_digest,
)
from lookonce.embedding_meta import EmbeddingMeta, RowDtype
from lookonce.model.model_folder import ModelFolder
from lookonce.store.embedding_store import EmbeddingStore
from tests import tiny_models
from tests.lookonce.store.entries import write

# Requests that a session runs at a time unless a test says otherwise.
NUM_SEQS = 32
MAX_NEW_TOKENS = 8
WORDS = "what colour is the small cat near a red boat and why do you see it".split()


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt with its images and the answer of Hugging Face `generate`."""

    prompt: Prompt
    expected: list[int]


@dataclass(frozen=True, slots=True)
class OfflineModel:
    """One tiny model: our runner, and the rows of every image in its questions."""

    runner: ModelRunnerBase
    questions: list[Question]
    rows: dict[ContentKey, torch.Tensor]
    end_token_ids: frozenset[int]

    def with_block_size(self, block_size: int) -> OfflineModel:
        """Returns the same model and questions with another KV block size."""
        runner = self.runner
        return replace(self, runner=type(runner)(replace(runner.config, block_size=block_size), runner.family))


def build(
    folder: pathlib.Path, num_prompts: int, images_per_prompt: tuple[int, ...], block_size: int = 8
) -> OfflineModel:
    """Builds questions with 0, 1, 3, … images in turn, answered by Hugging Face `generate` in float32."""
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
    runner = CPUModelRunner(RunnerConfig(folder, torch.float32, block_size=block_size, num_threads=1), family)
    ends = reference.generation_config.eos_token_id
    return OfflineModel(runner, questions, rows, frozenset(ends if isinstance(ends, list) else [ends]))


def _question(
    processor: Any,
    reference: Any,
    family: DecoderFamily,
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
    family: DecoderFamily,
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
    positions = family.positions(token_ids, [item.span for item in items], layouts)
    return Prompt(tuple(token_ids), tuple(items), positions, family.mask)


def _rows(processor: Any, reference: Any, image: Any) -> torch.Tensor:
    inputs = processor.image_processor(images=[image], return_tensors="pt")
    with torch.inference_mode():
        features = reference.get_image_features(**inputs).pooler_output
    return features[0].float().contiguous()


class Session:
    """One scheduler and one KV pool over the model's runner; caches stay between the runs of a session."""

    def __init__(
        self,
        model: OfflineModel,
        *,
        max_num_batched_tokens: int = 2048,
        num_blocks: int = 2000,
        cache_rows: int = 400,
        rows_arrive_after: int = 0,
        max_num_seqs: int = NUM_SEQS,
        deterministic: bool = False,
        store: EmbeddingStore | None = None,
        speculation: SpeculationLimits = NO_SPECULATION,
        num_snapshots: int = 600,
        snapshot_interval: int = 1,
        num_draft_states: int | None = None,
    ) -> None:
        """With a `store` every row is read from it, and must be in it.

        `num_snapshots`, `snapshot_interval` (in blocks) and `num_draft_states` (None: enough for all drafts) are for
        models with recurrent layers.
        """
        self.model = model
        self._store = store
        block_size = model.runner.config.block_size
        model.runner.config = replace(model.runner.config, deterministic=deterministic)
        window = model.runner.get_kv_cache_spec().window
        sliding = (
            None
            if window is None
            else sliding_group_size(
                window,
                block_size=block_size,
                num_blocks=num_blocks,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
            )
        )
        states = None
        if model.runner.recurrent is not None:
            model.runner.config = replace(model.runner.config, max_num_seqs=max_num_seqs)
            if num_draft_states is None:
                num_draft_states = speculation.max_draft_tokens * max_num_seqs
            states = StateGroupSize(max_num_seqs, num_snapshots, snapshot_interval, num_draft_states)
        model.runner.initialize_kv_cache(
            num_blocks,
            0 if sliding is None else sliding.num_blocks,
            0 if states is None else states.num_copies,
        )
        # The largest image must fit, as in a decoder.
        cache_rows = max([cache_rows, *map(len, model.rows.values())])
        # Sessions share the runner but not their rows.
        model.runner.row_cache = RowCache(model.runner.transfer, model.runner.model.dtype)
        self.scheduler = Scheduler(
            SchedulerLimits(
                max_num_batched_tokens, max_num_seqs, 4000, cache_rows, deterministic, speculation=speculation
            ),
            KVCacheManager(num_blocks, block_size, deterministic=deterministic, sliding=sliding, states=states),
            EncoderCacheManager(cache_rows),
        )
        self.steps: list[SchedulerOutput] = []
        self._rows_arrive_after = rows_arrive_after
        self._num_requests = 0

    def ask(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int = MAX_NEW_TOKENS,
        logprobs: int | None = None,
        params: SamplingParams | None = None,
    ) -> Answers:
        """Answers all prompts concurrently. `params` None: greedy, with `max_tokens` each."""
        # Like the reference: no answer ends before its last token.
        params = params or SamplingParams(
            max_tokens=max_tokens, min_tokens=max_tokens, stop_token_ids=self.model.end_token_ids, logprobs=logprobs
        )
        requests = []
        for prompt in prompts:
            name = RequestId(f"r{self._num_requests}")
            requests.append(Request(name, prompt, params, arrival_s=float(self._num_requests)))
            self._num_requests += 1
            self.scheduler.add(requests[-1])
        found: dict[RequestId, list[TokenLogprobs | None]] = {request.request_id: [] for request in requests}
        travelling: list[tuple[int, RowFetch]] = []
        while self.scheduler.has_requests():
            step = self.scheduler.schedule()
            self.steps.append(step)
            assert len(self.steps) < 20_000, "the scheduler makes no progress"
            travelling += [(len(self.steps) + self._rows_arrive_after, fetch) for fetch in step.fetches]
            sampled = self.model.runner.execute_model(step)
            for token in sampled:
                found[token.request_id].append(token.logprobs)
            self.scheduler.update(step, sampled)
            self.scheduler.check_integrity()
            for arrival in [each for each in travelling if each[0] <= len(self.steps)]:
                travelling.remove(arrival)
                self._arrive(arrival[1])
        return Answers(requests, [request.output_token_ids for request in requests], list(found.values()))

    def _arrive(self, fetch: RowFetch) -> None:
        num_encoded_rows = fetch.num_image_rows if self._store is None else 0
        if self.scheduler.rows_arrived(fetch.key, fetch.rows, num_encoded_rows):
            values = self.model.rows[fetch.key][fetch.rows.start : fetch.rows.stop]
            data = bytearray(values.numpy().tobytes())
            if self._store is not None:
                data = bytearray(len(data))
                miss = self._store.read_rows(fetch.key, fetch.rows.start, fetch.rows.stop, memoryview(data))
                assert miss is None, miss
            self.model.runner.put_rows(FetchedRows(fetch.key, fetch.rows, data, RowDtype.FLOAT32))


def fill_store(store: EmbeddingStore, model: OfflineModel) -> None:
    """Writes the rows of every image in the model's questions to the store."""
    for key, rows in model.rows.items():
        width = model.runner.model.config.get_text_config().hidden_size
        meta = EmbeddingMeta(len(rows), width, rows.shape[1] // width - 1, RowDtype.FLOAT32, 100, 100)
        assert write(store, key, meta, memoryview(rows.numpy()))


@dataclass(frozen=True, slots=True)
class Answers:
    """The results of one run, in the order of the prompts."""

    requests: list[Request]
    token_ids: list[list[int]]
    logprobs: list[list[TokenLogprobs | None]]


def run(
    model: OfflineModel,
    *,
    max_num_batched_tokens: int,
    num_blocks: int = 2000,
    cache_rows: int = 400,
    rows_arrive_after: int = 0,
) -> tuple[list[list[int]], Scheduler, list[SchedulerOutput]]:
    """Answers all questions concurrently; returns the answers in order, the scheduler and all steps."""
    session = Session(
        model,
        max_num_batched_tokens=max_num_batched_tokens,
        num_blocks=num_blocks,
        cache_rows=cache_rows,
        rows_arrive_after=rows_arrive_after,
    )
    answers = session.ask([question.prompt for question in model.questions])
    return answers.token_ids, session.scheduler, session.steps
