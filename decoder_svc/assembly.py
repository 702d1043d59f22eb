"""Builds the engine: runner, memory pools, budgets, fetcher. Logs the resulting limits once."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from decoder_svc.constraint.answer_follower import AnswerFollower
from decoder_svc.constraint.frames import Vocabulary
from decoder_svc.device_choice import DeviceChoice
from decoder_svc.engine.constraint_desk import ConstraintDesk
from decoder_svc.engine.core import EngineCore
from decoder_svc.engine.engine import Engine
from decoder_svc.engine.engine_thread import EngineThread
from decoder_svc.engine.figures import EngineLimits
from decoder_svc.engine.heartbeat import Heartbeat
from decoder_svc.engine.process.engine_process import EngineProcess
from decoder_svc.prompt.family import DecoderFamily
from decoder_svc.rank_start import TORCH_DTYPES, rank_config, started_ranks, threads_of_rank
from decoder_svc.rows.embedding_fetcher import EmbeddingFetcher
from decoder_svc.rows.encoder_client import EncoderClient
from decoder_svc.rows.fetch_metrics import FetchMetrics
from decoder_svc.runner.base import ModelRunnerBase
from decoder_svc.runner.parallel.leader import Leader
from decoder_svc.runner.parallel.other_ranks import OtherRanks
from decoder_svc.runner.row_cache import ROW_DTYPES
from decoder_svc.runner.runner_config import RunnerConfig
from decoder_svc.runner.selection import rank_engine, runner_class
from decoder_svc.runner.worst_case import WorstCase
from decoder_svc.scheduling.encoder_budget import encoder_budget
from decoder_svc.scheduling.encoder_cache_manager import EncoderCacheManager
from decoder_svc.scheduling.kv_cache.kv_cache_manager import KVCacheManager
from decoder_svc.scheduling.kv_cache.kv_group import SlidingGroupSize
from decoder_svc.scheduling.kv_cache.kv_pool_size import (
    BlockBytes,
    KVPoolConfig,
    StateCosts,
    num_kv_blocks,
    sliding_group_size,
    state_group_size,
)
from decoder_svc.scheduling.kv_cache.state_group import StateGroupSize
from decoder_svc.scheduling.scheduler import Scheduler
from decoder_svc.scheduling.scheduler_limits import SchedulerLimits
from decoder_svc.scheduling.speculation import SpeculationLimits
from decoder_svc.settings import DecoderSettings
from lookonce.errors import ConfigurationError, LookonceError, ModelFolderError
from lookonce.families.base import Mask
from lookonce.model.adapter_folder import open_adapters
from lookonce.model.faults.build_faults import step_fault
from lookonce.model.kernels.openmp import run_in_short_lived_thread
from lookonce.model.lack_of_memory import is_lack_of_memory
from lookonce.model.model_folder import CONFIGURATION_FAULTS
from lookonce.store.embedding_store import EmbeddingStore

logger = logging.getLogger(__name__)

# Threads that read embedding rows from the shared cache: a slow read does not hold up the next one, and few threads
# compete with the engine thread for the interpreter.
_NUM_FETCH_THREADS = 2
# Longest time until an image's rows arrive, seconds. It leaves time for an encoder with a backlog and for a retry on
# another replica; calls that cannot wait that long have a deadline of their own.
_ROW_TIMEOUT_S = 60.0
# Longest time that a token waits for others to share a message with, seconds. Tokens wait only while many requests run,
# and never the first or the last one. The bound keeps the delay small for people who read along.
_MAX_STREAM_DELAY_S = 0.15

# Tokens that grammars leave no choice about and that one step computes as drafts, of all requests together. Each has a
# row of logits.
_MAX_FORCED_TOKENS = 32

# Processor time of a step's masks, seconds, above which greedy answers are asked about their likeliest tokens instead.
# Up to there, masks are computed while the engine passes tokens on, on a CPU that is idle then.
_GUESSES_ABOVE_S = 0.0025

# Fewest tokens of a context: one of a prompt and one of an answer.
_LEAST_CONTEXT = 2
_QUANTIZE_BITS = {"none": None, "int8": 8, "int4": 4}


def begin_engine_process(settings: DecoderSettings, device: DeviceChoice) -> EngineProcess | None:
    """Starts the engine's process, which loads the model while the caller goes on; None: the engine is a thread.

    The caller gives it to `build_engine`, and closes it if that fails or is not reached.
    """
    return EngineProcess(settings.given_values(), settings.max_step_s) if device.engine_process else None


def build_engine(
    settings: DecoderSettings,
    device: DeviceChoice,
    family: DecoderFamily,
    store: EmbeddingStore | None,
    encoder: EncoderClient | None,
    fetch_metrics: FetchMetrics,
    load_vocabulary: Callable[[], Vocabulary],
    process: EngineProcess | None,
) -> Engine:
    """Loads the language model and sizes its memory pools, or waits until `process` has. Blocks meanwhile.

    `load_vocabulary` is called for the first constraint of an engine in this process.

    Raises ModelFolderError for weights that do not match the model, and ConfigurationError for a KV pool that cannot
    hold a request and for settings that do not fit the model.
    """
    core: EngineCore
    if process is not None:
        process.wait_until_loaded()
        core = process
    else:
        core = load_core(settings, device, family, Heartbeat(settings.max_step_s), load_vocabulary)
    fetcher = EmbeddingFetcher(
        store,
        encoder,
        num_workers=_NUM_FETCH_THREADS,
        timeout_s=_ROW_TIMEOUT_S,
        ttl_s=settings.ttl_s,
        metrics=fetch_metrics,
    )
    return Engine(core, fetcher, _MAX_STREAM_DELAY_S)


def load_core(
    settings: DecoderSettings,
    device: DeviceChoice,
    family: DecoderFamily,
    heartbeat: Heartbeat,
    load_vocabulary: Callable[[], Vocabulary],
) -> EngineThread:
    """Loads the language model into this process and sizes its memory pools. Raises what `build_engine` raises."""
    _check_mask(settings, family)
    with started_ranks(settings, device) as ranks:
        runner, limits = run_in_short_lived_thread(lambda: _loaded(settings, device, family, ranks))
    logger.info("engine limits: %s", limits)
    scheduler = Scheduler(
        SchedulerLimits(
            limits.max_batched_tokens,
            limits.max_running_requests,
            limits.max_context_tokens,
            limits.encoder_compute_budget_rows,
            deterministic=settings.deterministic,
            min_tokens_before_missing_row=limits.block_size,
            overlap_encode=settings.overlap_encode,
            speculation=SpeculationLimits(
                settings.speculative_tokens,
                settings.speculative_ngram_min,
                settings.speculative_ngram_max,
                max_forced_tokens=0 if settings.deterministic else _MAX_FORCED_TOKENS,
            ),
        ),
        KVCacheManager(
            limits.num_kv_blocks,
            limits.block_size,
            is_shared=settings.prefix_cache,
            deterministic=settings.deterministic,
            sliding=_sliding_group(settings, runner, limits.num_kv_blocks),
            states=None
            if runner.recurrent is None
            else StateGroupSize(
                limits.max_running_requests,
                limits.num_state_snapshots,
                limits.snapshot_interval,
                limits.num_draft_states,
            ),
        ),
        EncoderCacheManager(limits.encoder_cache_size_rows),
    )
    follower = AnswerFollower(
        load_vocabulary,
        runner.model.config.get_text_config().vocab_size,
        guesses_above_s=_GUESSES_ABOVE_S if runner.sampler.is_immediate else math.inf,
    )
    return EngineThread(runner, scheduler, limits, heartbeat, ConstraintDesk(follower))


def _runner_config(settings: DecoderSettings, device: DeviceChoice) -> RunnerConfig:
    return RunnerConfig(
        folder=settings.model,
        dtype=None if device.dtype is None else TORCH_DTYPES[device.dtype],
        block_size=device.block_size,
        num_threads=threads_of_rank(settings),
        deterministic=settings.deterministic,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        use_graphs=settings.graphs,
        quantize_bits=_QUANTIZE_BITS[settings.quantize],
        rounds_kv_cache=settings.kv_cache_dtype == "int8",
        adapters=open_adapters(settings.adapters) if settings.adapters or settings.adapters_folder else None,
    )


def _loaded(
    settings: DecoderSettings, device: DeviceChoice, family: DecoderFamily, others: OtherRanks | None
) -> tuple[ModelRunnerBase, EngineLimits]:
    """Returns a runner with its memory pools, and the resulting limits."""
    config = _runner_config(settings, device)
    ranks = None
    if others is not None:
        shared = rank_config(config, device.platform.name, device.dtype)
        ranks = others.meet(shared, rank_engine(device.platform))
    with _faults_of_configurations():
        runner = runner_class(device.platform)(replace(config, ranks=ranks), family)
    if others is not None and ranks is not None:
        others.wait_until_loaded()
        runner.lead(Leader(ranks, others.connections))
    with _faults_of_configurations():
        limits = _limits(settings, device, runner, family)
    try:
        num_copies = limits.num_state_snapshots + limits.num_draft_states
        runner.initialize_kv_cache(limits.num_kv_blocks, limits.num_sliding_kv_blocks, num_copies)
    except Exception as error:
        if not is_lack_of_memory(error):
            raise
        raise ConfigurationError(
            f"there is no memory for a KV cache of {limits.num_kv_blocks} blocks of {limits.block_size} tokens; set "
            "num_kv_blocks, kv_cache_memory_bytes or kv_cache_memory_share lower"
        ) from error
    runner.capture_model()
    return runner, limits


@contextlib.contextmanager
def _faults_of_configurations() -> Iterator[None]:
    """Raises ModelFolderError for an exception of transformers or torch that a config.json may cause.

    Half of its numbers are used only when the model computes, such as the number of experts of a token.
    """
    try:
        yield
    except LookonceError:
        raise
    except (MemoryError, *CONFIGURATION_FAULTS) as error:
        if is_lack_of_memory(error):
            raise ConfigurationError(
                "there is no memory for the heaviest step of the language model; set max_num_batched_tokens or "
                "max_num_seqs lower, or use the config.json that belongs to the weights"
            ) from error
        logger.debug("the language model cannot compute a step", exc_info=True)
        raise step_fault(error) from error


def _check_mask(settings: DecoderSettings, family: DecoderFamily) -> None:
    """Checks that an image whose tokens see each other fits into a step beside the running requests.

    Raises ConfigurationError.
    """
    if family.mask is Mask.CAUSAL:
        return
    if settings.deterministic:
        raise ConfigurationError(
            f"deterministic is not offered for {family.title}: its images cannot be split over steps"
        )
    needed = family.max_tokens_per_image + settings.max_num_seqs - 1
    if needed > settings.max_num_batched_tokens:
        raise ConfigurationError(
            f"max_num_batched_tokens is {settings.max_num_batched_tokens}; {family.title} needs {needed}: the "
            f"{family.max_tokens_per_image} tokens of an image are computed together, beside one token of each other "
            f"running request (max_num_seqs is {settings.max_num_seqs})"
        )


def _context_tokens(settings: DecoderSettings, text: Any) -> int:
    """Returns the longest prompt plus answer. Raises ModelFolderError if the model has no room for either."""
    longest: int = text.max_position_embeddings
    if longest < _LEAST_CONTEXT:
        raise ModelFolderError(
            f"config.json: max_position_embeddings is {longest}, which leaves no room for a prompt and an answer; use "
            "the config.json that belongs to the weights"
        )
    wanted = settings.max_context_tokens
    if wanted is not None and wanted <= longest:
        return wanted
    if wanted is not None:
        logger.warning("max_context_tokens is %d, and the model has %d positions, which are the limit", wanted, longest)
    return longest


def _limits(
    settings: DecoderSettings, device: DeviceChoice, runner: ModelRunnerBase, family: DecoderFamily
) -> EngineLimits:
    block_size = device.block_size
    rows = encoder_budget(
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_rows_per_image=family.max_rows_per_image,
        max_num_seqs=settings.max_num_seqs,
        max_images_per_prompt=settings.max_images_per_prompt + family.num_entries(settings.max_video_frames_per_prompt),
        block_size=block_size,
        configured_cache_rows=settings.encoder_cache_rows,
    )
    text = runner.model.config.get_text_config()
    context = _context_tokens(settings, text)
    worst = WorstCase(
        num_tokens=settings.max_num_batched_tokens,
        num_requests=settings.max_num_seqs,
        context_tokens=context,
        num_images=rows.num_profiled_images,
        rows_per_image=family.max_rows_per_image,
        row_elements=(1 + family.num_levels) * text.hidden_size,
        row_dtype=ROW_DTYPES[runner.model.dtype],
        num_draft_tokens=max(settings.speculative_tokens, -(-_MAX_FORCED_TOKENS // settings.max_num_seqs)),
    )
    max_useful_blocks = settings.max_num_seqs * -(-context // block_size)
    sliding = _sliding_group(settings, runner, max_useful_blocks)
    spec = runner.get_kv_cache_spec()
    wish = KVPoolConfig(settings.num_kv_blocks, settings.kv_cache_memory_bytes, device.kv_cache_memory_share)
    # The states of running requests are in the memory that the heaviest step takes.
    free_bytes = runner.profile_run(worst)
    states, snapshot_bytes = None, 0
    if runner.recurrent is not None:
        states = state_group_size(
            wish,
            StateCosts(runner.recurrent.state_bytes, spec.block_bytes + spec.sliding_block_bytes, block_size),
            free_bytes=free_bytes,
            max_num_seqs=settings.max_num_seqs,
            max_useful_blocks=max_useful_blocks,
            num_draft_tokens=settings.speculative_tokens,
        )
        snapshot_bytes = states.num_copies * runner.recurrent.state_bytes
    num_blocks = num_kv_blocks(
        wish,
        BlockBytes(
            spec.block_bytes,
            spec.sliding_block_bytes,
            0 if sliding is None else sliding.num_blocks,
            snapshot_bytes,
        ),
        free_bytes=free_bytes,
        max_useful_blocks=max_useful_blocks,
    )
    if num_blocks * block_size < context:
        logger.warning("the KV pool limits requests to %d tokens", num_blocks * block_size)
    return EngineLimits(
        max_context_tokens=min(context, num_blocks * block_size),
        block_size=block_size,
        num_kv_blocks=num_blocks,
        max_batched_tokens=settings.max_num_batched_tokens,
        max_running_requests=settings.max_num_seqs,
        encoder_compute_budget_rows=rows.compute_rows,
        encoder_cache_size_rows=rows.cache_rows,
        max_rows_per_image=family.max_rows_per_image,
        num_sliding_kv_blocks=0 if sliding is None else min(sliding.num_blocks, num_blocks),
        num_state_snapshots=0 if states is None else states.num_snapshots,
        snapshot_interval=0 if states is None else states.interval,
        num_draft_states=0 if states is None else states.num_draft_states,
    )


def _sliding_group(settings: DecoderSettings, runner: ModelRunnerBase, num_blocks: int) -> SlidingGroupSize | None:
    """Returns the size of the sliding-window group beside a full group of `num_blocks` blocks.

    None when no layer has a sliding window.
    """
    window = runner.get_kv_cache_spec().window
    if window is None:
        return None
    return sliding_group_size(
        window,
        block_size=runner.config.block_size,
        num_blocks=num_blocks,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
    )
