"""Every message comes out of the codec as it went in, but for the files of images."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from decoder_svc.engine.core import EngineFacts
from decoder_svc.engine.figures import EngineLimits
from decoder_svc.engine.messages import Abort, Answers, Ended, FailedRows, Stop, ToEngineThread, ToEventLoop
from decoder_svc.engine.process.codec import (
    decode_in_process,
    decode_in_service,
    decode_start,
    encode_for_process,
    encode_for_service,
    encode_start,
)
from decoder_svc.rows.fetched_rows import FetchedRows
from decoder_svc.scheduling.prompt import ImageItem, Positions, Prompt, Span
from decoder_svc.scheduling.request import CacheScope, Request, RequestId
from decoder_svc.scheduling.request_output import FinishReason, RequestOutput, RequestUsage, TokenLogprobs
from decoder_svc.scheduling.row_range import RowRange
from decoder_svc.scheduling.sampling_params import Constraint, ConstraintKind, SamplingParams
from decoder_svc.scheduling.scheduler_output import RowFetch
from lookonce import errors
from lookonce.content_key import ContentKey, EncoderFingerprint, ImageDigest, ProcessorOptions
from lookonce.embedding_meta import RowDtype
from lookonce.errors import EmbeddingNotCachedError, LookonceError, OverloadedError, UnavailableError
from lookonce.families.base import Mask
from lookonce.forgotten import EVERYTHING, Forgotten
from lookonce.image_file import FramePair
from lookonce.model.kernels.kernel_choice import KernelChoice

KEY = ContentKey(b"k" * 32, ImageDigest(b"d" * 32), EncoderFingerprint("f" * 64), "tag")
OPTIONS = ProcessorOptions(max_pixels=5000, beside_others=True, frame_size=(28, 56))
IMAGES = (
    ImageItem(KEY, Span(3, 4), 3, OPTIONS, b"a file", row_tokens=(0, 1, 3), time=2),
    ImageItem(KEY, Span(8, 2), 2, ProcessorOptions(), None),
    ImageItem(KEY, Span(11, 2), 2, ProcessorOptions(), FramePair(b"one", None)),
)
PROMPT = Prompt(tuple(range(20)), IMAGES, Positions((tuple(range(20)),) * 3, -4), Mask.IMAGE, b"removal")
PARAMS = SamplingParams(
    temperature=0.5,
    top_p=0.25,
    top_k=7,
    min_p=0.125,
    repetition_penalty=1.5,
    presence_penalty=-1.0,
    frequency_penalty=2.0,
    logit_bias=((5, float("-inf")), (6, 1.5)),
    max_tokens=9,
    min_tokens=2,
    stop_token_ids=frozenset({3, 4}),
    seed=2**64 - 1,
    logprobs=5,
    constraint=Constraint(ConstraintKind.GRAMMAR, 'start: "ä"'),
)
FETCH = RowFetch(KEY, RowRange(2, 5), 9, OPTIONS, b"a file", RequestId("a"), b"removal")
FAILURE = OverloadedError("full", retry_after_s=2.5)


def request_fields(request: Request) -> dict[str, object]:
    return dict(vars(request))


def to_process(message: ToEngineThread) -> ToEngineThread:
    frame, payload = encode_for_process(message)
    return decode_in_process(bytearray(frame), bytearray(payload))


def to_service(message: ToEventLoop) -> ToEventLoop:
    return decode_in_service(bytearray(encode_for_service(message)))


def test_a_request_arrives_as_it_was_without_the_files_of_its_images() -> None:
    scope = CacheScope(b"salt", "adapter", bypass=True)
    sent = Request(RequestId("a"), PROMPT, PARAMS, arrival_s=1.5, priority=-3, deadline_s=2.5, cache_scope=scope)
    arrived = to_process(sent)
    assert isinstance(arrived, Request)
    files = [item.data for item in arrived.prompt.images]
    assert files == [b"", None, b""], "the scheduler asks only whether there is a file"
    bare = dataclasses.replace(
        PROMPT, images=tuple(dataclasses.replace(item, data=data) for item, data in zip(IMAGES, files, strict=True))
    )
    expected = Request(RequestId("a"), bare, PARAMS, arrival_s=1.5, priority=-3, deadline_s=2.5, cache_scope=scope)
    assert request_fields(arrived) == request_fields(expected)


def test_a_plain_request_needs_no_options() -> None:
    sent = Request(RequestId("a"), Prompt((1, 2)), SamplingParams(), arrival_s=0.0)
    assert request_fields(to_process(sent)) == request_fields(sent)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", list(RowDtype))
def test_rows_arrive_with_their_bytes(dtype: RowDtype) -> None:
    sent = FetchedRows(KEY, RowRange(1, 3), bytearray(range(256)) * 40, dtype, 2, 7)
    assert to_process(sent) == sent


@pytest.mark.parametrize(
    "message", [Abort(RequestId("a"), FinishReason.STOP), Stop(), EVERYTHING, Forgotten(frozenset({b"k" * 32}))]
)
def test_short_messages_arrive_as_they_were(message: ToEngineThread) -> None:
    assert to_process(message) == message


def test_a_fetch_says_whether_the_image_came_with_its_file() -> None:
    assert to_service(FETCH) == dataclasses.replace(FETCH, data=b"")
    without = dataclasses.replace(FETCH, data=None)
    assert to_service(without) == without
    failed = to_process(FailedRows(FETCH, FAILURE))
    assert isinstance(failed, FailedRows)
    assert failed.fetch == dataclasses.replace(FETCH, data=b"")
    assert_equal_errors(failed.error, FAILURE)


def assert_equal_errors(found: LookonceError, expected: LookonceError) -> None:
    assert type(found) is type(expected)
    assert vars(found) == vars(expected)
    assert (found.code, found.reason, found.retry_after_s) == (expected.code, expected.reason, expected.retry_after_s)
    assert str(found) == str(expected)


def test_answers_arrive_in_order_with_usage_log_probabilities_and_errors() -> None:
    usage = RequestUsage(10, 1, 2, 3, 4, 5, 6, 7, 1.25, 2.5)
    output = RequestOutput(
        (5, 6), (TokenLogprobs(((5, -0.5), (6, float("-inf")))),), FinishReason.LENGTH, usage, (True, False)
    )
    missing = EmbeddingNotCachedError("not there", indexes=[2, 0])
    found = to_service(Answers(((RequestId("b"), output), (RequestId("a"), missing))))
    assert isinstance(found, Answers)
    (first, second) = found.by_request
    assert first == ("b", output)
    assert second[0] == "a"
    assert isinstance(second[1], EmbeddingNotCachedError)
    assert_equal_errors(second[1], missing)
    assert second[1].indexes == (2, 0)


@pytest.mark.parametrize("has_died", [True, False])
def test_the_end_says_whether_the_engine_failed(has_died: bool) -> None:
    found = to_service(Ended(UnavailableError("gone"), has_died))
    assert isinstance(found, Ended)
    assert found.has_died is has_died
    assert_equal_errors(found.error, UnavailableError("gone"))


def _every_error() -> list[LookonceError]:
    """One error of each class of the tree."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, LookonceError)]
    assert len(kinds) > 20
    return [kind("field", "text") if kind is errors.InvalidParameterError else kind("text") for kind in kinds]


@pytest.mark.parametrize("error", _every_error(), ids=lambda error: type(error).__name__)
def test_every_error_of_the_tree_arrives_as_it_was(error: LookonceError) -> None:
    error.metadata["more"] = "text"
    failed = to_process(FailedRows(FETCH, error))
    assert isinstance(failed, FailedRows)
    assert_equal_errors(failed.error, error)


def test_the_start_brings_facts_or_raises_the_refusal() -> None:
    choice = KernelChoice("linear float32", "native", {"native": 0.5, "pytorch": 1.0})
    facts = EngineFacts(EngineLimits(100, 16, 8, 32, 4, 64, 65, 16, 3), "native", 5000, (choice,))
    assert decode_start(bytearray(encode_start(facts))) == facts
    with pytest.raises(errors.ConfigurationError, match="too small"):
        decode_start(bytearray(encode_start(errors.ConfigurationError("too small"))))


def test_a_frame_of_another_version_is_noticed() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_in_service(bytearray(encode_for_process(Stop())[0]))
    with pytest.raises(msgspec.DecodeError):
        decode_in_process(bytearray(encode_for_service(FETCH)), bytearray())
