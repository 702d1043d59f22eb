"""Builds the decoder's parts in the order of their dependencies, and closes them in the opposite order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from decoder_svc.adapter_metrics import AdapterMetrics
from decoder_svc.admin_servicer import ADMIN_SERVICE_NAME, DecoderAdminServicer
from decoder_svc.assembly import begin_engine_process, build_engine
from decoder_svc.constraint.constraint_checker import ConstraintChecker
from decoder_svc.constraint.folder_vocabulary import tokenizer_vocabulary
from decoder_svc.constraint.frames import Vocabulary
from decoder_svc.device_choice import DeviceChoice, choose_device
from decoder_svc.engine.engine import Engine
from decoder_svc.engine.figures import EngineLimits
from decoder_svc.metrics import DecoderMetrics
from decoder_svc.prompt.chat_template import ChatTemplate
from decoder_svc.prompt.chat_tools import ChatTools
from decoder_svc.prompt.family import DecoderFamily, load_family
from decoder_svc.prompt.image_resolver import ImageResolver
from decoder_svc.prompt.preparation import RequestPreparer
from decoder_svc.prompt.preparation_threads import PreparationThreads
from decoder_svc.prompt.prompt_builder import PromptBuilder, PromptLimits
from decoder_svc.prompt.sampling_check import SamplingLimits
from decoder_svc.prompt.text_tokenizer import TextTokenizer
from decoder_svc.prompt.video_frames import VideoSplitter
from decoder_svc.request_gate import RequestGate
from decoder_svc.rows.encoder_channel import ChannelSettings, watched_credentials, watched_token
from decoder_svc.rows.encoder_client import EncoderClient
from decoder_svc.rows.encoder_info import ExpectedRows
from decoder_svc.rows.fetch_metrics import FetchMetrics
from decoder_svc.rows.own_fingerprints import OwnFingerprints
from decoder_svc.served_adapters import ServedAdapters
from decoder_svc.servicer import GENERATE_METHODS, SERVICE_NAME, DecoderServicer, ServedModel
from decoder_svc.settings import DecoderSettings
from lookonce import __version__
from lookonce.decoder.v1.decoder_service_pb2_grpc import (
    add_DecoderAdminServiceServicer_to_server,
    add_DecoderServiceServicer_to_server,
)
from lookonce.embedding_meta import RowDtype
from lookonce.errors import FingerprintMismatchError, LookonceError
from lookonce.logs import get_logger
from lookonce.media.image_header import ImageLimits
from lookonce.model.folder_fingerprint import folder_fingerprint
from lookonce.model.generation_defaults import GenerationDefaults, load_defaults
from lookonce.model.kernels.kernel_report import report_kernels
from lookonce.model.model_folder import ModelFolder
from lookonce.model.pretrained_tokenizer import load_pretrained
from lookonce.server.admission.image_shares import ImageShares
from lookonce.server.admission.quotas import Quotas
from lookonce.server.service_entry import ServiceEntry
from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.forget_channel import ForgetListener
from lookonce.store.metrics import StoreCollector
from lookonce.store.sealing import load_sealer
from lookonce.tenants import Tenants, load_tenants

_log = get_logger(__name__)

# Largest ratio of an image's sides, the encoder's default. The encoder decides; the check here only saves it a call.
_MAX_IMAGE_ASPECT = 200.0
# Pause between two looks for an encoder after the start, and after _MAX_SEARCH_S, seconds.
_LOOK_S = 0.1
_LATER_LOOK_S = 2.0
# Encoder and decoder are often started together; so long does the decoder wait for its encoder before it is ready.
_MAX_SEARCH_S = 3.0


@dataclass(frozen=True, slots=True)
class LoadedText:
    """All of a model folder except its weights."""

    folder: ModelFolder
    tokenizer: TextTokenizer
    # None when the model takes no chat prompts.
    template: ChatTemplate | None
    family: DecoderFamily
    # Sampling values for requests that set none.
    defaults: GenerationDefaults
    # Elements per hidden state of the language model.
    hidden_size: int
    # Rows of its token embedding table.
    vocab_size: int

    @property
    def takes_videos(self) -> bool:
        """Whether chat prompts may have videos."""
        return self.template is not None and self.template.takes_videos


class EncoderSearch:
    """Looks for an encoder of the decoder's own model, from the start until one is found."""

    def __init__(
        self,
        encoder: EncoderClient,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._encoder = encoder
        self._clock = clock
        self._sleep = sleep
        # Whether one was found, or has been looked for long enough.
        self._is_over = False

    @property
    def is_fine(self) -> bool:
        """Whether the search is over, and what it found is not an encoder of another model."""
        return self._is_over and not self._encoder.has_only_strangers

    async def run(self) -> None:
        """Asks until an encoder of the decoder's own model answers. Logs each reason why those that answer are not."""
        enough_s = self._clock() + _MAX_SEARCH_S
        logged = ""
        while True:
            try:
                await self._encoder.info()
            except FingerprintMismatchError as error:
                if error.message != logged:
                    logged = error.message
                    _log.warning("no encoder of this decoder's model answers", reason=logged)
            except LookonceError:
                # The client logs encoders that cannot be reached.
                pass
            else:
                self._is_over = True
                return
            self._is_over = self._clock() > enough_s
            await self._sleep(_LATER_LOOK_S if self._is_over else _LOOK_S)


@dataclass(frozen=True, slots=True)
class DecoderService:
    """A running decoder without its gRPC server."""

    engine: Engine
    servicer: DecoderServicer
    adapters: ServedAdapters
    # None when this decoder uses no shared cache.
    store: EmbeddingStore | None
    # None when this decoder answers text only.
    search: EncoderSearch | None
    # Longest time of calls without a deadline, seconds, by the method's name.
    default_timeouts_s: Mapping[str, float]

    def is_ready(self) -> bool:
        """Whether requests should be sent here.

        They should not while every encoder that answers has another model than this decoder. If no encoder answers, the
        decoder is ready after some seconds, since it can answer text and cached images.
        """
        return self.engine.is_healthy and (self.search is None or self.search.is_fine)

    def entry(self) -> ServiceEntry:
        """Returns the entry with which a GrpcService serves this decoder."""
        return ServiceEntry(
            SERVICE_NAME,
            lambda server: add_DecoderServiceServicer_to_server(self.servicer, server),
            default_timeouts_s=self.default_timeouts_s,
            long_methods=frozenset({"Generate", "Score", "Embed"}),
            max_running=self.engine.limits.max_running_requests,
        )

    def admin_entry(self) -> ServiceEntry:
        """Returns the entry of the operators' service, for their own address."""
        servicer = DecoderAdminServicer(self.adapters)
        return ServiceEntry(
            ADMIN_SERVICE_NAME, lambda server: add_DecoderAdminServiceServicer_to_server(servicer, server)
        )


def load_text(settings: DecoderSettings) -> LoadedText:
    """Checks the model folder and loads everything but its weights. Raises ModelFolderError."""
    from transformers import AutoConfig

    folder = ModelFolder.open(settings.model)
    pretrained: Any = load_pretrained(folder.path)
    family = load_family(folder, pretrained)
    config = AutoConfig.from_pretrained(folder.path, trust_remote_code=False, local_files_only=True).get_text_config()
    tokenizer = TextTokenizer(pretrained)
    defaults = load_defaults(folder.path, tokenizer.eos_token_id)
    if tokenizer.unknown_ids(tuple(defaults.eos_token_ids)) == defaults.eos_token_ids:
        _log.warning(
            "the tokenizer has no end token of this folder, so answers end at max_tokens or stop strings only",
            eos_token_id=sorted(defaults.eos_token_ids),
        )
    return LoadedText(
        folder=folder,
        tokenizer=tokenizer,
        template=None
        if family.finish_text is not None
        else ChatTemplate.load(folder.path, pretrained, family.placeholder, family.video_placeholder),
        family=family,
        defaults=defaults,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
    )


@asynccontextmanager
async def open_service(
    settings: DecoderSettings, registry: CollectorRegistry, quotas: Quotas, encoder: EncoderClient | None = None
) -> AsyncIterator[DecoderService]:
    """Runs a decoder for the duration of the block. Loading the model blocks the event loop.

    `encoder` replaces the encoder that the settings name; the caller closes it. Raises ModelFolderError and
    ConfigurationError when the service must not start.
    """
    device = choose_device(settings)
    async with AsyncExitStack() as stack:
        # It loads the model while this process loads the tokenizer and reads the weights of the vision half.
        process = begin_engine_process(settings, device)
        if process is not None:
            stack.callback(process.close)
        text = load_text(settings)
        store = _open_store(settings, stack)
        tenants = load_tenants(settings.tenant_secret_file)
        encoder = encoder or _open_encoder(settings, device, text, tenants, stack)
        if store is not None:
            registry.register(StoreCollector(store, "decoder"))

        def load_vocabulary() -> Vocabulary:
            return tokenizer_vocabulary(text.tokenizer.backend.to_str(), text.tokenizer.eos_token_id)

        checker = ConstraintChecker(load_vocabulary)
        stack.callback(checker.close)
        engine = build_engine(
            settings, device, text.family, store, encoder, FetchMetrics(registry), load_vocabulary, process
        )
        engine.start()
        stack.push_async_callback(engine.stop)
        heard_removal = _listen_for_forgotten(settings, engine, stack)
        metrics = DecoderMetrics(registry)
        report_kernels(registry, engine.facts.kernel_choices)
        metrics.watch(engine.load, engine.counters, engine.facts)
        model = _served_model(settings, text)
        adapters = ServedAdapters(engine, model.name, settings.adapters_folder)
        threads = PreparationThreads()
        stack.callback(threads.close)
        servicer = DecoderServicer(
            model=model,
            engine=engine,
            preparer=build_preparer(settings, text, engine.limits, encoder, store, threads, checker, heard_removal),
            tokenizer=text.tokenizer,
            encoder=encoder,
            tenants=tenants,
            gate=RequestGate(
                engine.load,
                lambda: engine.is_healthy,
                quotas,
                metrics,
                ImageShares(settings.max_queued_bytes),
                max_running_requests=engine.limits.max_running_requests,
                max_live_requests=settings.max_num_seqs + settings.max_waiting_requests,
            ),
            threads=threads,
            adapters=adapters,
            adapter_metrics=AdapterMetrics(registry, lambda: adapters.names),
            default_timeout_s=settings.default_timeout_s or None,
        )
        search = None
        if encoder is not None:
            search = EncoderSearch(encoder)
            stack.callback(asyncio.create_task(search.run()).cancel)
        timed = GENERATE_METHODS if settings.default_timeout_s else ()
        yield DecoderService(
            engine, servicer, adapters, store, search, dict.fromkeys(timed, settings.default_timeout_s)
        )


def build_preparer(
    settings: DecoderSettings,
    text: LoadedText,
    limits: EngineLimits,
    encoder: EncoderClient | None,
    store: EmbeddingStore | None,
    threads: PreparationThreads,
    checker: ConstraintChecker,
    heard_removal: Callable[[], bytes | None] = lambda: None,
) -> RequestPreparer:
    """Returns the part that turns a parsed request into the prompt and the sampling parameters for the engine."""
    image_limits = ImageLimits(settings.max_image_bytes, settings.max_image_pixels, _MAX_IMAGE_ASPECT)
    prompt_limits = PromptLimits(
        limits.max_context_tokens,
        settings.max_images_per_prompt,
        text.vocab_size,
        settings.max_video_frames_per_prompt,
    )
    sampling_limits = SamplingLimits(
        vocab_size=text.vocab_size,
        max_stop_strings=settings.max_stop_strings,
        max_logprobs=settings.max_logprobs,
        default_max_tokens=settings.default_max_tokens,
    )
    return RequestPreparer(
        PromptBuilder(text.tokenizer, text.template, text.family, prompt_limits),
        ChatTools(text.tokenizer, text.template),
        VideoSplitter(text.family, image_limits),
        ImageResolver(encoder, store, image_limits, threads),
        text.defaults,
        sampling_limits,
        limits.max_context_tokens,
        threads,
        checker,
        heard_removal,
    )


def _listen_for_forgotten(
    settings: DecoderSettings, engine: Engine, stack: AsyncExitStack
) -> Callable[[], bytes | None]:
    """Tells the engine of images that an operator removes from the shared cache.

    Returns a function for the token of the last removal that was heard of, if it is known.
    """
    if settings.redis_url is None:
        return lambda: None
    listener = ForgetListener(settings.redis_url.get_secret_value(), settings.redis_budget_s, engine.forget)
    listener.start()
    stack.push_async_callback(listener.close)
    return lambda: listener.heard_token


def _served_model(settings: DecoderSettings, text: LoadedText) -> ServedModel:
    template = text.template
    return ServedModel(
        name=settings.model_name,
        model_type=text.folder.model_type,
        image_placeholder=text.family.placeholder,
        vocab_size=text.vocab_size,
        encoder_target=settings.encoder_target or "",
        max_images_per_prompt=settings.max_images_per_prompt,
        max_video_frames=settings.max_video_frames_per_prompt if text.takes_videos else 0,
        frames_per_entry=text.family.frames_per_entry if text.takes_videos else 0,
        max_message_bytes=settings.max_message_bytes,
        rows_depend_on_image_count=text.family.depends_on_image_count,
        tool_format="" if template is None or template.tool_format is None else template.tool_format.name,
        template_arguments=() if template is None else tuple(sorted(template.argument_names)),
        version=__version__,
    )


def _open_store(settings: DecoderSettings, stack: AsyncExitStack) -> EmbeddingStore | None:
    if settings.redis_url is None:
        return None
    # The decoder only reads: with this limit no entry is small enough to be written.
    store = EmbeddingStore(
        settings.redis_url.get_secret_value(),
        settings.redis_budget_s,
        settings.ttl_s,
        max_entry_bytes=0,
        sealer=load_sealer(settings.seal_key_file),
    )
    stack.callback(store.close)
    return store


def _open_encoder(
    settings: DecoderSettings, device: DeviceChoice, text: LoadedText, tenants: Tenants, stack: AsyncExitStack
) -> EncoderClient | None:
    if settings.encoder_target is None:
        return None
    credentials = watched_credentials(settings.encoder_tls_ca, settings.encoder_tls_cert, settings.encoder_tls_key)
    channel = ChannelSettings(
        settings.max_message_bytes,
        settings.keepalive_time_s,
        settings.keepalive_timeout_s,
        credentials,
        watched_token(settings.encoder_token_file),
    )
    expected = ExpectedRows(
        text.folder.model_type, text.hidden_size, text.family.num_levels, tenant_tag=tenants.default.tag
    )
    encoder = EncoderClient(settings.encoder_target, expected, channel, _own_fingerprints(device, text))
    stack.push_async_callback(encoder.close)
    return encoder


def _own_fingerprints(device: DeviceChoice, text: LoadedText) -> OwnFingerprints:
    """Reads and hashes the vision half of the decoder's own folder, as its encoder does."""
    dtype = None if device.dtype is None else RowDtype(device.dtype)
    fingerprint, dtype = folder_fingerprint(text.folder, text.family.model, dtype)
    return OwnFingerprints(text.folder.path, fingerprint, dtype)
