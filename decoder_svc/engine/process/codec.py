"""Messages between the service and its engine process as bytes: MessagePack, with a type for each message.

Image files stay in the service. An image of a request, or a fetch, that came with its file has an empty one here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
from msgspec.msgpack import Decoder, Encoder

from decoder_svc.engine.core import EngineFacts
from decoder_svc.engine.messages import (
    Abort,
    AdapterChanged,
    Answer,
    Answers,
    ChangeAdapter,
    Ended,
    FailedRows,
    Stop,
    ToEngineThread,
    ToEventLoop,
)
from decoder_svc.rows.fetched_rows import FetchedRows
from decoder_svc.scheduling.prompt import Prompt
from decoder_svc.scheduling.request import CacheScope, Request, RequestId
from decoder_svc.scheduling.request_output import FinishReason, RequestOutput
from decoder_svc.scheduling.row_range import RowRange
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.scheduler_output import RowFetch
from lookonce.content_key import ContentKey
from lookonce.embedding_meta import RowDtype
from lookonce.errors import LookonceError
from lookonce.forgotten import Forgotten
from lookonce.image_file import ImageFile

# Stands for the file of an image, which stays in the service.
_FILE: ImageFile = b""


class _Failure(msgspec.Struct, array_like=True):
    """An error: its class and its attributes."""

    kind: str
    attributes: dict[str, Any]


class _NewRequest(msgspec.Struct, tag=True, array_like=True):
    request_id: RequestId
    prompt: Prompt
    params: SamplingParams
    arrival_s: float
    priority: int
    deadline_s: float | None
    cache_scope: CacheScope
    tenant: str


class _Rows(msgspec.Struct, tag=True, array_like=True):
    """The rows of a fetch, whose bytes are the message's payload."""

    key: ContentKey
    rows: RowRange
    dtype: RowDtype
    num_levels: int
    num_encoded_rows: int


class _NoRows(msgspec.Struct, tag=True, array_like=True):
    fetch: RowFetch
    error: _Failure


class _Abort(msgspec.Struct, tag=True, array_like=True):
    request_id: RequestId
    reason: FinishReason


class _Forget(msgspec.Struct, tag=True, array_like=True):
    forgotten: Forgotten


class _ChangeAdapter(msgspec.Struct, tag=True, array_like=True):
    change: ChangeAdapter


class _Stop(msgspec.Struct, tag=True, array_like=True):
    pass


class _Fetch(msgspec.Struct, tag=True, array_like=True):
    fetch: RowFetch


class _Answer(msgspec.Struct, array_like=True):
    """An output of a request, or the error that ends it."""

    request_id: RequestId
    output: RequestOutput | None
    error: _Failure | None


class _Answers(msgspec.Struct, tag=True, array_like=True):
    answers: list[_Answer]


class _AdapterChanged(msgspec.Struct, tag=True, array_like=True):
    number: int
    error: _Failure | None


class _Ended(msgspec.Struct, tag=True, array_like=True):
    error: _Failure
    has_died: bool


class _Ready(msgspec.Struct, tag=True, array_like=True):
    """The first message of an engine process that has loaded its model."""

    facts: EngineFacts


class _Refused(msgspec.Struct, tag=True, array_like=True):
    """The only message of an engine process that cannot start."""

    error: _Failure


_encoder = Encoder()
_to_process: Decoder[_NewRequest | _Rows | _NoRows | _Abort | _Forget | _ChangeAdapter | _Stop] = Decoder(
    _NewRequest | _Rows | _NoRows | _Abort | _Forget | _ChangeAdapter | _Stop
)
_to_service: Decoder[_Answers | _Fetch | _AdapterChanged | _Ended] = Decoder(
    _Answers | _Fetch | _AdapterChanged | _Ended
)
_first_to_service: Decoder[_Ready | _Refused] = Decoder(_Ready | _Refused)


def encode_for_process(message: ToEngineThread) -> tuple[bytes, bytes | bytearray]:
    """Returns frame and payload of a message to the engine process, without image files."""
    payload: bytes | bytearray = b""
    wire: msgspec.Struct
    match message:
        case Request():
            wire = _NewRequest(
                message.request_id,
                _without_files(message.prompt),
                message.params,
                message.arrival_s,
                message.priority,
                message.deadline_s,
                message.cache_scope,
                message.tenant,
            )
        case FetchedRows():
            payload = message.data
            wire = _Rows(message.key, message.rows, message.dtype, message.num_levels, message.num_encoded_rows)
        case FailedRows():
            wire = _NoRows(replace(message.fetch, data=_mark(message.fetch.data)), _failure(message.error))
        case Abort():
            wire = _Abort(message.request_id, message.reason)
        case Forgotten():
            wire = _Forget(message)
        case ChangeAdapter():
            wire = _ChangeAdapter(message)
        case Stop():
            wire = _Stop()
    return _encoder.encode(wire), payload


def decode_in_process(frame: bytearray, payload: bytearray) -> ToEngineThread:
    """Returns a message to the engine process. Raises msgspec.DecodeError for a frame of another version."""
    wire = _to_process.decode(frame)
    message: ToEngineThread
    match wire:
        case _NewRequest():
            message = Request(
                wire.request_id,
                wire.prompt,
                wire.params,
                arrival_s=wire.arrival_s,
                priority=wire.priority,
                deadline_s=wire.deadline_s,
                cache_scope=wire.cache_scope,
                tenant=wire.tenant,
            )
        case _Rows():
            message = FetchedRows(wire.key, wire.rows, payload, wire.dtype, wire.num_levels, wire.num_encoded_rows)
        case _NoRows():
            message = FailedRows(wire.fetch, _error(wire.error))
        case _Abort():
            message = Abort(wire.request_id, wire.reason)
        case _Forget():
            message = wire.forgotten
        case _ChangeAdapter():
            message = wire.change
        case _Stop():
            message = Stop()
    return message


def encode_for_service(message: ToEventLoop) -> bytes:
    """Returns the frame of a message to the service, without image files."""
    wire: msgspec.Struct
    match message:
        case Answers():
            wire = _Answers([_wire_answer(request_id, answer) for request_id, answer in message.by_request])
        case RowFetch():
            wire = _Fetch(replace(message, data=_mark(message.data)))
        case AdapterChanged():
            wire = _AdapterChanged(message.number, None if message.error is None else _failure(message.error))
        case Ended():
            wire = _Ended(_failure(message.error), message.has_died)
    return _encoder.encode(wire)


def decode_in_service(frame: bytearray) -> ToEventLoop:
    """Returns a message to the service. Raises msgspec.DecodeError for a frame of another version."""
    wire = _to_service.decode(frame)
    match wire:
        case _Answers():
            return Answers(tuple((one.request_id, _answer(one)) for one in wire.answers))
        case _Fetch():
            return wire.fetch
        case _AdapterChanged():
            return AdapterChanged(wire.number, None if wire.error is None else _error(wire.error))
        case _Ended():
            return Ended(_error(wire.error), wire.has_died)


def encode_start(outcome: EngineFacts | LookonceError) -> bytes:
    """Returns the frame that says that the engine is ready, or why it cannot start."""
    if isinstance(outcome, LookonceError):
        return _encoder.encode(_Refused(_failure(outcome)))
    return _encoder.encode(_Ready(outcome))


def decode_start(frame: bytearray) -> EngineFacts:
    """Returns the facts of an engine that is ready. Raises the error for which it cannot start."""
    wire = _first_to_service.decode(frame)
    if isinstance(wire, _Refused):
        raise _error(wire.error)
    return wire.facts


def _wire_answer(request_id: RequestId, answer: Answer) -> _Answer:
    if isinstance(answer, LookonceError):
        return _Answer(request_id, None, _failure(answer))
    return _Answer(request_id, answer, None)


def _answer(wire: _Answer) -> Answer:
    if wire.output is not None:
        return wire.output
    assert wire.error is not None, "an answer is an output or an error"
    return _error(wire.error)


def _without_files(prompt: Prompt) -> Prompt:
    return replace(prompt, images=tuple(replace(item, data=_mark(item.data)) for item in prompt.images))


def _mark(data: ImageFile | None) -> ImageFile | None:
    return None if data is None else _FILE


def _failure(error: LookonceError) -> _Failure:
    return _Failure(type(error).__name__, vars(error))


def _error(failure: _Failure) -> LookonceError:
    kind = _kinds()[failure.kind]
    error = kind.__new__(kind, failure.attributes["message"])
    for name, value in failure.attributes.items():
        # MessagePack has one kind of sequence.
        setattr(error, name, tuple(value) if isinstance(value, list) else value)
    return error


@functools.cache
def _kinds() -> dict[str, type[LookonceError]]:
    return {kind.__name__: kind for kind in _subclasses(LookonceError)}


def _subclasses(kind: type[LookonceError]) -> Iterator[type[LookonceError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _subclasses(each)
