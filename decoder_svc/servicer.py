"""DecoderService: takes calls apart, hands them to preparation and engine, puts answers together.

Errors are raised as LookonceErrors; the server's interceptor turns them into statuses. A cancelled call leaves through
the `generating` block, which frees the request in the engine at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc.aio

from decoder_svc import wire_request, wire_response
from decoder_svc.admission import Admission
from decoder_svc.answer.generation import Generation, GenerationOptions, generating
from decoder_svc.engine.engine_interface import Engine
from decoder_svc.live_requests import LiveRequest, LiveRequests
from decoder_svc.metrics import DecoderMetrics
from decoder_svc.prompt.preparation import RequestPreparer
from decoder_svc.prompt.prompt_spec import num_inline_bytes
from decoder_svc.prompt.text_tokenizer import TextTokenizer
from decoder_svc.rows.encoder_client import EncoderClient
from lookonce.content_key import Tenant
from lookonce.decoder.v1 import decoder_service_pb2, decoder_service_pb2_grpc
from lookonce.errors import AbortedError, ContextTooLongError, InvalidParameterError, LookonceError, UnsupportedError
from lookonce.identity import CallerRole, current_identity
from lookonce.server.quotas import Quotas, Resource
from lookonce.tenants import Tenants

SERVICE_NAME = "lookonce.decoder.v1.DecoderService"
# GetModelInfo answers without the fingerprint rather than wait longer for an encoder.
_FINGERPRINT_TIMEOUT_S = 1.0

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What GetModelInfo says beside the engine's limits."""

    # Name that requests may ask for.
    name: str
    # Hugging Face model type.
    model_type: str
    # Text that stands for one image in a TextPrompt.
    image_placeholder: str
    vocab_size: int
    # gRPC target where images are uploaded; empty without an encoder.
    encoder_target: str
    max_images_per_prompt: int
    # Of all videos of a prompt; 0: the model takes none.
    max_video_frames: int
    max_message_bytes: int
    # Whether an image has other rows where the prompt shows others, too.
    rows_depend_on_image_count: bool
    # Version of the package.
    version: str


class DecoderServicer(decoder_service_pb2_grpc.DecoderServiceServicer):
    """The seven calls of the contract."""

    def __init__(
        self,
        model: ServedModel,
        engine: Engine,
        preparer: RequestPreparer,
        tokenizer: TextTokenizer,
        encoder: EncoderClient | None,
        tenants: Tenants,
        metrics: DecoderMetrics,
        threads: Executor,
        quotas: Quotas,
        max_live_requests: int,
    ) -> None:
        """`threads` detokenize; more than `max_live_requests` generations at a time are refused."""
        self._model = model
        self._engine = engine
        self._preparer = preparer
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._tenants = tenants
        self._metrics = metrics
        self._threads = threads
        self._quotas = quotas
        self._live = LiveRequests(max_live_requests)
        self._admission = Admission(engine.load, engine.limits.max_running_requests)

    async def Generate(
        self, request: decoder_service_pb2.GenerateRequest, context: Context
    ) -> decoder_service_pb2.GenerateResponse:
        """One answer at the end."""
        async with self._generating(request.params, context) as (live, generation):
            await generation.admission()
            response = decoder_service_pb2.GenerateResponse(request_id=live.request_id)
            choice, texts = response.choices.add(), []
            # Log probabilities become messages as they come: thousands at once would hold up the event loop.
            async for increment in generation.increments():
                texts.append(increment.text)
                choice.token_ids.extend(increment.token_ids)
                choice.logprobs.extend(wire_response.token_logprobs(increment.logprobs))
                if increment.finish_reason is not None:
                    choice.finish_reason = wire_response.finish_reason(increment.finish_reason)
            choice.text = "".join(texts)
            response.usage.CopyFrom(wire_response.usage(generation.usage))
            return response

    async def GenerateStream(
        self, request: decoder_service_pb2.GenerateStreamRequest, context: Context
    ) -> AsyncIterator[decoder_service_pb2.GenerateStreamResponse]:
        """Started, the deltas as they come, Finished."""
        response = decoder_service_pb2.GenerateStreamResponse
        async with self._generating(request.params, context) as (live, generation):
            usage = wire_response.usage(await generation.admission())
            yield response(started=decoder_service_pb2.StreamStarted(request_id=live.request_id, usage=usage))
            token_index = 0
            async for increment in generation.increments():
                if increment.text or increment.token_ids:
                    yield response(delta=wire_response.delta(increment, token_index))
                token_index += len(increment.token_ids)
                if increment.finish_reason is not None:
                    yield response(
                        finished=decoder_service_pb2.StreamFinished(
                            finish_reason=wire_response.finish_reason(increment.finish_reason),
                            usage=wire_response.usage(generation.usage),
                        )
                    )

    async def Tokenize(
        self, request: decoder_service_pb2.TokenizeRequest, context: Context
    ) -> decoder_service_pb2.TokenizeResponse:
        """The prompt's tokens as Generate would see them, whether or not they fit the context."""
        spec = wire_request.parse_prompt(request, self._engine.limits.max_context_tokens)
        self._quotas.charge(current_identity(), Resource.IMAGE_BYTES, num_inline_bytes(spec))
        prompt = await self._preparer.build_prompt(spec, self._tenant())
        images = [wire_response.placeholder_range(item) for item in prompt.images]
        return decoder_service_pb2.TokenizeResponse(token_ids=prompt.token_ids, images=images)

    async def Detokenize(
        self, request: decoder_service_pb2.DetokenizeRequest, context: Context
    ) -> decoder_service_pb2.DetokenizeResponse:
        """The ids' text, special tokens included."""
        limit = self._engine.limits.max_context_tokens
        if len(request.token_ids) > limit:
            raise ContextTooLongError(f"{len(request.token_ids)} ids were sent, the limit is the context of {limit}")
        token_ids = tuple(request.token_ids)
        unknown_ids = self._tokenizer.unknown_ids(token_ids)
        if unknown_ids:
            raise InvalidParameterError("token_ids", f"{min(unknown_ids)} is not in the vocabulary")
        text = await asyncio.get_running_loop().run_in_executor(self._threads, self._decode, token_ids)
        return decoder_service_pb2.DetokenizeResponse(text=text)

    async def GetModelInfo(
        self, request: decoder_service_pb2.GetModelInfoRequest, context: Context
    ) -> decoder_service_pb2.GetModelInfoResponse:
        """Limits and names; the fingerprint is empty while the encoder cannot be reached."""
        model, limits = self._model, self._engine.limits
        return decoder_service_pb2.GetModelInfoResponse(
            model=model.name,
            encoder_fingerprint=await self._fingerprint(),
            max_context_tokens=limits.max_context_tokens,
            block_size=limits.block_size,
            vocab_size=model.vocab_size,
            version=model.version,
            encoder_target=model.encoder_target,
            max_batched_tokens=limits.max_batched_tokens,
            max_running_requests=limits.max_running_requests,
            encoder_compute_budget_rows=limits.encoder_compute_budget_rows,
            encoder_cache_size_rows=limits.encoder_cache_size_rows,
            max_rows_per_image=limits.max_rows_per_image,
            num_kv_blocks=limits.num_kv_blocks,
            max_images_per_prompt=model.max_images_per_prompt,
            max_message_bytes=model.max_message_bytes,
            model_type=model.model_type,
            image_placeholder=model.image_placeholder,
            max_video_frames=model.max_video_frames,
            rows_depend_on_image_count=model.rows_depend_on_image_count,
        )

    async def GetLoad(
        self, request: decoder_service_pb2.GetLoadRequest, context: Context
    ) -> decoder_service_pb2.GetLoadResponse:
        """Figures of this moment."""
        return wire_response.load(self._engine.load())

    async def AbortRequest(
        self, request: decoder_service_pb2.AbortRequestRequest, context: Context
    ) -> decoder_service_pb2.AbortRequestResponse:
        """Ends a request of the caller's tenant with the finish reason ABORT; unknown and ended ones are fine."""
        identity = current_identity()
        # Operators who name no tenant may end anybody's.
        tenant = None if identity.role is CallerRole.OPERATOR and not identity.tenant else identity.tenant
        for live in self._live.abort(request.request_id, tenant):
            self._engine.abort(live.engine_id)
        return decoder_service_pb2.AbortRequestResponse()

    @asynccontextmanager
    async def _generating(
        self, params: decoder_service_pb2.GenerateParams, context: Context
    ) -> AsyncIterator[tuple[LiveRequest, Generation]]:
        arrival_s = time.monotonic()
        remaining_s = context.time_remaining()
        deadline_s = None if remaining_s is None else arrival_s + remaining_s
        self._check_params(params)
        identity, tenant = current_identity(), self._tenant()
        max_tokens = params.sampling.max_tokens if params.sampling.HasField("max_tokens") else None
        with (
            self._live.claimed(params.request_id, identity.tenant) as live,
            self._admission.entered(params.priority, max_tokens, remaining_s) as leave,
        ):
            sampling = wire_request.parse_sampling(params.sampling)
            spec = wire_request.parse_prompt(params, self._engine.limits.max_context_tokens)
            self._quotas.charge(identity, Resource.IMAGE_BYTES, num_inline_bytes(spec))
            prepared = await self._preparer.prepare(spec, sampling, tenant)
            if live.is_aborted:
                raise AbortedError("the request was aborted before it began")
            scope = wire_request.parse_cache_scope(params, tenant)
            options = GenerationOptions(params.priority, arrival_s, deadline_s, scope)
            async with generating(
                self._engine, live.engine_id, prepared, options, self._tokenizer, self._metrics, leave
            ) as generation:
                try:
                    yield live, generation
                finally:
                    usage = generation.usage
                    num_tokens = usage.prompt_tokens + usage.completion_tokens
                    self._quotas.charge(identity, Resource.TOKENS, num_tokens)
            if generation.served_s is not None:
                self._admission.note_served(generation.served_s, generation.usage.completion_tokens)

    def _tenant(self) -> Tenant:
        return self._tenants.named(current_identity().tenant)

    def _check_params(self, params: decoder_service_pb2.GenerateParams) -> None:
        if params.model not in ("", self._model.name):
            raise InvalidParameterError("model", f"this server serves {self._model.name}; leave the field empty")
        if params.adapter:
            raise UnsupportedError("adapter: LoRA adapters are not offered by this server")

    async def _fingerprint(self) -> str:
        if self._encoder is None:
            return ""
        try:
            async with asyncio.timeout(_FINGERPRINT_TIMEOUT_S):
                return (await self._encoder.info()).fingerprint
        except (LookonceError, TimeoutError):
            return ""

    def _decode(self, token_ids: tuple[int, ...]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
