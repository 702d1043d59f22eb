"""The gRPC calls of DecoderService: message → gate → preparation → engine → answer.

Errors are raised as LookonceErrors; the server's interceptor turns them into statuses. A cancelled call leaves the
`generating` block like any other, which aborts its request in the engine at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import grpc.aio

from decoder_svc import wire_request, wire_response
from decoder_svc.adapter_metrics import AdapterMetrics
from decoder_svc.answer.choices import Choices, generating_choices
from decoder_svc.answer.generated_text import TextIncrement
from decoder_svc.answer.generation import GenerationOptions
from decoder_svc.engine.engine import Engine
from decoder_svc.prompt.preparation import RequestPreparer
from decoder_svc.prompt.preparation_threads import PreparationThreads, caller_of
from decoder_svc.prompt.prompt_spec import num_inline_bytes
from decoder_svc.prompt.sampling_check import NumChoices, check_num_choices
from decoder_svc.prompt.text_tokenizer import TextTokenizer
from decoder_svc.request_gate import Arrival, RequestGate, Ticket
from decoder_svc.rows.encoder_client import EncoderClient
from decoder_svc.scheduling.request_output import FinishReason
from decoder_svc.served_adapters import ServedAdapters
from decoder_svc.tasks import Caller, Embedding, Generating, Scoring, Task
from lookonce.content_key import Tenant
from lookonce.decoder.v1 import decoder_service_pb2, decoder_service_pb2_grpc
from lookonce.errors import AbortedError, ContextTooLongError, InvalidParameterError, LookonceError
from lookonce.identity import CallerRole, Identity, current_identity
from lookonce.server.telemetry import current_request_id, replace_request_id
from lookonce.tenants import Tenants

SERVICE_NAME = "lookonce.decoder.v1.DecoderService"
GENERATE_METHODS = ("Generate", "GenerateStream", "Score", "Embed")
# GetModelInfo waits this long for the encoder's fingerprint, and then answers without it.
_FINGERPRINT_TIMEOUT_S = 1.0

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The part of GetModelInfo's answer that does not come from the engine's limits."""

    # Name that requests may give in `model`.
    name: str
    # Hugging Face model type.
    model_type: str
    # Text that stands for one image in a TextPrompt.
    image_placeholder: str
    vocab_size: int
    # gRPC target of the encoder, to which clients upload images; empty without an encoder.
    encoder_target: str
    max_images_per_prompt: int
    # Most frames of all videos in one prompt, and frames in an entry of the cache; 0: the model takes no videos.
    max_video_frames: int
    frames_per_entry: int
    max_message_bytes: int
    # Whether an image's rows depend on the number of images in the prompt.
    rows_depend_on_image_count: bool
    # Name of the form in which the model calls functions; empty: it knows none.
    tool_format: str
    # Names of arguments that the chat template takes.
    template_arguments: tuple[str, ...]
    # Version of the Python package.
    version: str


class DecoderServicer(decoder_service_pb2_grpc.DecoderServiceServicer):
    """The nine calls of the DecoderService contract."""

    def __init__(
        self,
        model: ServedModel,
        engine: Engine,
        preparer: RequestPreparer,
        tokenizer: TextTokenizer,
        encoder: EncoderClient | None,
        tenants: Tenants,
        gate: RequestGate,
        threads: PreparationThreads,
        adapters: ServedAdapters,
        adapter_metrics: AdapterMetrics,
        default_timeout_s: float | None = None,
    ) -> None:
        """`encoder` None: text only. Detokenize runs in `threads`.

        `default_timeout_s` is the time of a generate call without a deadline, after which the server ends it; None: any
        time.
        """
        self._model = model
        self._adapters = adapters
        self._adapter_metrics = adapter_metrics
        self._engine = engine
        self._preparer = preparer
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._tenants = tenants
        self._gate = gate
        self._threads = threads
        self._default_timeout_s = default_timeout_s

    async def Generate(
        self, request: decoder_service_pb2.GenerateRequest, context: Context
    ) -> decoder_service_pb2.GenerateResponse:
        """Returns all answers when they are complete."""
        number, keeps_logprobs = _num_choices(request.params), request.params.sampling.HasField("logprobs")
        submitting = self._submitted(request.params, context)
        # Its images are copied from it, and an answer may take long.
        del request
        async with submitting as (ticket, answers):
            await answers.admission()
            response = decoder_service_pb2.GenerateResponse(request_id=ticket.request_id)
            parts: list[list[TextIncrement]] = [[] for _ in range(ticket.num_choices)]
            for index in range(ticket.num_choices):
                response.choices.add(index=index)
            # Log probabilities are converted per increment: thousands at once would block the event loop.
            async for index, increment in answers.increments():
                choice = response.choices[index]
                parts[index].append(replace(increment, token_ids=(), logprobs=()))
                choice.token_ids.extend(increment.token_ids)
                if keeps_logprobs or number.are_ranked:
                    choice.logprobs.extend(wire_response.token_logprobs(increment.logprobs))
                for prompt in filter(None, (one.prompt for one in increment.logprobs)):
                    caller = caller_of(self._tenant(), ticket.request_id)
                    told = await self._threads.compute_text(caller, len(prompt), wire_response.prompt_logprobs, prompt)
                    response.prompt_logprobs.extend(told)
                if increment.finish_reason is not None:
                    wire_response.complete(choice, parts[index])
                    parts[index].clear()
            if number.are_ranked:
                wire_response.keep_best(response, number.num_returned, keeps_logprobs=keeps_logprobs)
            response.usage.CopyFrom(wire_response.usage(answers.usage))
            response.replica_load.CopyFrom(wire_response.replica_load(self._engine.load()))
            return response

    async def GenerateStream(
        self, request: decoder_service_pb2.GenerateStreamRequest, context: Context
    ) -> AsyncIterator[decoder_service_pb2.GenerateStreamResponse]:
        """Streams Started, one Delta per increment, and Finished for each answer."""
        response = decoder_service_pb2.GenerateStreamResponse
        if _num_choices(request.params).are_ranked:
            raise InvalidParameterError("sampling.best_of", "is not for streams: the best answer is known at the end")
        if request.params.sampling.HasField("prompt_logprobs"):
            raise InvalidParameterError("sampling.prompt_logprobs", "is not for streams; use Generate")
        submitting = self._submitted(request.params, context)
        # Its images are copied from it, and an answer may take long.
        del request
        async with submitting as (ticket, answers):
            usage = wire_response.usage(await answers.admission())
            yield response(started=decoder_service_pb2.StreamStarted(request_id=ticket.request_id, usage=usage))
            num_tokens = [0] * ticket.num_choices
            async for index, increment in answers.increments():
                if increment.text or increment.token_ids or increment.reasoning or increment.calls:
                    yield response(delta=wire_response.delta(increment, index, num_tokens[index]))
                num_tokens[index] += len(increment.token_ids)
                if increment.finish_reason is not None:
                    yield response(
                        finished=decoder_service_pb2.StreamFinished(
                            index=index,
                            finish_reason=wire_response.finish_reason(increment),
                            usage=wire_response.usage(answers.usage),
                            replica_load=wire_response.replica_load(self._engine.load()),
                        )
                    )

    async def Score(
        self, request: decoder_service_pb2.ScoreRequest, context: Context
    ) -> decoder_service_pb2.ScoreResponse:
        """Returns the likelihood of each continuation."""
        scoring = Scoring(
            wire_request.parse_continuations(request), request.logprobs if request.HasField("logprobs") else None
        )
        submitting = self._submitted(request.params, context, scoring)
        del request
        async with submitting as (ticket, answers):
            await answers.admission()
            response = decoder_service_pb2.ScoreResponse(request_id=ticket.request_id)
            for _ in scoring.continuations:
                response.scores.add()
            is_aborted = False
            async for index, increment in answers.increments():
                wire_response.add_to_score(response.scores[index], increment, scoring.num_logprobs)
                is_aborted = is_aborted or increment.finish_reason is FinishReason.ABORT
            if is_aborted:
                raise AbortedError("the request was aborted")
            response.usage.CopyFrom(wire_response.usage(answers.usage))
            response.replica_load.CopyFrom(wire_response.replica_load(self._engine.load()))
            return response

    async def Embed(
        self, request: decoder_service_pb2.EmbedRequest, context: Context
    ) -> decoder_service_pb2.EmbedResponse:
        """Returns the embedding of the prompt."""
        task, keeps_length = Embedding(wire_request.parse_pooling(request)), request.keep_length
        submitting = self._submitted(request.params, context, task)
        del request
        async with submitting as (ticket, answers):
            await answers.admission()
            values: tuple[float, ...] = ()
            async for _, increment in answers.increments():
                if increment.finish_reason is FinishReason.ABORT:
                    raise AbortedError("the request was aborted")
                values = next((one.embedding for one in increment.logprobs if one.embedding), values)
            usage = wire_response.usage(answers.usage)
            # The token with which the embedding came is nobody's.
            usage.completion_tokens = 0
            return decoder_service_pb2.EmbedResponse(
                request_id=ticket.request_id,
                embedding=wire_response.embedding(values, keeps_length=keeps_length),
                usage=usage,
                replica_load=wire_response.replica_load(self._engine.load()),
            )

    async def Tokenize(
        self, request: decoder_service_pb2.TokenizeRequest, context: Context
    ) -> decoder_service_pb2.TokenizeResponse:
        """Returns the prompt's tokens as Generate would see them, also when they do not fit into the context."""
        spec = wire_request.parse_prompt(request, self._engine.limits.max_context_tokens)
        identity = current_identity()
        charge_pixels = partial(self._gate.charge_pixels, identity)
        with self._gate.images_in_progress(identity, num_inline_bytes(spec)):
            prompt = await self._preparer.build_prompt(spec, self._tenant(), _call_id(), charge_pixels)
        images = [wire_response.placeholder_range(item) for item in prompt.images]
        return decoder_service_pb2.TokenizeResponse(token_ids=prompt.token_ids, images=images)

    async def Detokenize(
        self, request: decoder_service_pb2.DetokenizeRequest, context: Context
    ) -> decoder_service_pb2.DetokenizeResponse:
        """Returns the text of token ids, special tokens included."""
        limit = self._engine.limits.max_context_tokens
        if len(request.token_ids) > limit:
            raise ContextTooLongError(f"{len(request.token_ids)} ids were sent, the limit is the context of {limit}")
        token_ids = tuple(request.token_ids)
        unknown_ids = self._tokenizer.unknown_ids(token_ids)
        if unknown_ids:
            raise InvalidParameterError("token_ids", f"{min(unknown_ids)} is not in the vocabulary")
        caller = caller_of(self._tenant(), _call_id())
        if request.separately:
            texts = await self._threads.compute_text(caller, len(token_ids), self._tokenizer.token_texts, token_ids)
            return decoder_service_pb2.DetokenizeResponse(token_texts=texts)
        text = await self._threads.compute_text(
            caller, len(token_ids), self._tokenizer.decode, token_ids, skip_special_tokens=False
        )
        return decoder_service_pb2.DetokenizeResponse(text=text)

    async def GetModelInfo(
        self, request: decoder_service_pb2.GetModelInfoRequest, context: Context
    ) -> decoder_service_pb2.GetModelInfoResponse:
        """Returns limits and names. The fingerprint is empty while the encoder cannot be reached."""
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
            frames_per_entry=model.frames_per_entry,
            rows_depend_on_image_count=model.rows_depend_on_image_count,
            adapters=self._adapters.names,
            tool_format=model.tool_format,
            template_arguments=model.template_arguments,
        )

    async def GetLoad(
        self, request: decoder_service_pb2.GetLoadRequest, context: Context
    ) -> decoder_service_pb2.GetLoadResponse:
        """Returns the engine's current load for routers and autoscalers."""
        return wire_response.load(self._engine.load())

    async def AbortRequest(
        self, request: decoder_service_pb2.AbortRequestRequest, context: Context
    ) -> decoder_service_pb2.AbortRequestResponse:
        """Ends a request of the caller's tenant with the finish reason ABORT. Unknown and ended ids are ignored."""
        identity = current_identity()
        # An operator that names no tenant may end the requests of all tenants.
        tenant = None if identity.role is CallerRole.OPERATOR and not identity.tenant else identity.tenant
        for ticket in self._gate.abort(request.request_id, tenant):
            for engine_id in ticket.engine_ids:
                self._engine.abort(engine_id)
        return decoder_service_pb2.AbortRequestResponse()

    @asynccontextmanager
    async def _submitted(
        self, params: decoder_service_pb2.GenerateParams, context: Context, task: Task | None = None
    ) -> AsyncIterator[tuple[Ticket, Choices]]:
        """Admits, prepares and submits a request, for answers by default.

        Leaving the block aborts it and frees its place.
        """
        arrival_s = time.monotonic()
        own_s = context.time_remaining()
        remaining_s = self._default_timeout_s if own_s is None else own_s
        deadline_s = None if remaining_s is None else arrival_s + remaining_s
        identity, tenant = current_identity(), self._tenant()
        request_id = self._gate.request_id_for(identity, params.request_id, current_request_id())
        # Later log lines, the span, the trailers and calls to the encoder have the same id as the answer.
        replace_request_id(request_id)
        self._check_params(params, identity)
        max_tokens = params.sampling.max_tokens if params.sampling.HasField("max_tokens") else None
        num_choices = _num_choices(params).num_answers if task is None else task.num_answers
        choices_field = "sampling.n" if task is None else "continuations"
        arrival = Arrival(identity, request_id, params.priority, max_tokens, remaining_s, num_choices, choices_field)
        with self._gate.admitted(arrival) as ticket:
            task = task or Generating(wire_request.parse_sampling(params.sampling), _num_choices(params))
            spec = wire_request.parse_prompt(params, self._engine.limits.max_context_tokens)
            scope = wire_request.parse_cache_scope(params, tenant)
            scope = replace(
                scope,
                adapter=ticket.held.enter_context(self._adapters.used(params.adapter, lambda: ticket.num_live > 0)),
                bypass=scope.bypass or task.bypasses_prefix_cache,
            )
            options = GenerationOptions(params.priority, arrival_s, deadline_s, scope, tenant.tag)
            adapter = params.adapter
            # The prompt has copies of the images.
            del params
            ticket.held.enter_context(self._gate.images_in_progress(identity, num_inline_bytes(spec)))
            caller = Caller(tenant, request_id, partial(self._gate.charge_pixels, identity))
            prepared = await task.prepare(self._preparer, spec, caller)
            del spec
            if ticket.is_aborted:
                raise AbortedError("the request was aborted before it began")
            submitting = generating_choices(self._engine, ticket.engine_ids, prepared, options, self._tokenizer)
            async with submitting as answers:
                ticket.streams = tuple(one.stream for one in answers.submitted)
                try:
                    yield ticket, answers
                finally:
                    self._gate.account(ticket, answers.usage)
                    self._adapter_metrics.observe(adapter, answers.usage)
            # A call that failed or was cancelled does not get here: its time says little about complete answers.
            for one in answers.submitted:
                if one.served_s is not None:
                    self._gate.note_served(one.served_s, one.usage.completion_tokens, ticket.identity.tenant)

    def _tenant(self) -> Tenant:
        return self._tenants.named(current_identity().tenant)

    def _check_params(self, params: decoder_service_pb2.GenerateParams, identity: Identity) -> None:
        if params.priority < 0 and identity.is_authenticated and identity.role is CallerRole.CLIENT:
            # It would be served before all requests of other tenants.
            raise InvalidParameterError("priority", "must be at least 0 with a client's token")
        if params.model not in ("", self._model.name):
            raise InvalidParameterError("model", f"this server serves {self._model.name}; leave the field empty")

    async def _fingerprint(self) -> str:
        if self._encoder is None:
            return ""
        try:
            async with asyncio.timeout(_FINGERPRINT_TIMEOUT_S):
                return (await self._encoder.info()).fingerprint
        except (LookonceError, TimeoutError):
            return ""


def _num_choices(params: decoder_service_pb2.GenerateParams) -> NumChoices:
    """Returns how many answers are asked for. Raises InvalidParameterError."""
    sampling = params.sampling
    return check_num_choices(
        sampling.n if sampling.HasField("n") else None, sampling.best_of if sampling.HasField("best_of") else None
    )


def _call_id() -> str:
    """Returns the id of the call that this task serves."""
    request_id = current_request_id()
    assert request_id is not None, "an interceptor gives every call an id"
    return request_id
