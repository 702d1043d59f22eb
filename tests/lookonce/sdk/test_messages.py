"""The choice of images to send as bytes, batches within limits, and the checks of a stream, without any server."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest

from lookonce.decoder.v1 import decoder_service_pb2 as decoder_pb2
from lookonce.decoder_info import ModelInfo
from lookonce.errors import EmbeddingNotCachedError, InternalError, InvalidParameterError
from lookonce.generation import Delta, GenerateOptions, Message
from lookonce.images import ImageRef
from lookonce.sdk.answers import Transcript, generation_of
from lookonce.sdk.decoder_facts import model_info_of
from lookonce.sdk.messages import SMALL_IMAGE_BYTES, PreparedPrompt
from lookonce.videos import Video
from tests.lookonce.sdk.sdk_servers import stream_of

LARGE = [ImageRef.from_bytes(bytes([number]) * (SMALL_IMAGE_BYTES + 1)) for number in range(4)]
SMALL = ImageRef.from_bytes(b"small")
USAGE = decoder_pb2.Usage(prompt_tokens=2)


def _sent_as_bytes(prompt: PreparedPrompt) -> list[bool]:
    (message,) = prompt.params().chat.messages
    return [part.image.HasField("data") for part in message.parts if part.HasField("image")]


def _info(max_message_bytes: int = 64 << 20, **fields: Any) -> ModelInfo:
    return model_info_of(decoder_pb2.GetModelInfoResponse(max_message_bytes=max_message_bytes, **fields))


def _lacks(*indexes: int) -> EmbeddingNotCachedError:
    return EmbeddingNotCachedError("not cached", indexes=indexes)


def test_only_the_missing_images_are_sent_as_bytes_the_second_time() -> None:
    prompt = PreparedPrompt("what", [LARGE[0], SMALL, LARGE[1]], {})
    assert _sent_as_bytes(prompt) == [False, True, False]
    assert prompt.supply(_lacks(2), _info()) == []
    assert _sent_as_bytes(prompt) == [False, True, True]


def test_an_answer_without_positions_means_all_images() -> None:
    prompt = PreparedPrompt("what", LARGE[:2], {})
    assert prompt.supply(_lacks(), _info()) == []
    assert _sent_as_bytes(prompt) == [True, True]


def test_images_over_half_a_message_are_encoded_ahead() -> None:
    prompt = PreparedPrompt("what", LARGE[:2], {})
    assert prompt.supply(_lacks(0, 1), _info(max_message_bytes=3 * SMALL_IMAGE_BYTES)) == LARGE[:2]
    assert _sent_as_bytes(prompt) == [False, False]


def test_images_encoded_ahead_are_encoded_as_in_a_prompt_with_several_images() -> None:
    info = _info(max_message_bytes=SMALL_IMAGE_BYTES, rows_depend_on_image_count=True)
    for images, are_beside_others in ((LARGE[:1], False), (LARGE[:2], True)):
        (ahead, *_) = PreparedPrompt("what", images, {}).supply(_lacks(0), info)
        assert ahead.beside_others is are_beside_others


@pytest.mark.parametrize("index", [0, 1])
def test_a_missing_image_without_bytes_or_an_unknown_position_is_the_servers_error(index: int) -> None:
    error = _lacks(index)
    prompt = PreparedPrompt("what", [ImageRef.from_digest(bytes(32))], {})
    with pytest.raises(EmbeddingNotCachedError) as caught:
        prompt.supply(error, _info())
    assert (caught.value.message, caught.value.indexes) == (error.message, error.indexes)


def test_an_error_that_no_bytes_can_help_does_not_keep_the_prompt_in_memory() -> None:
    prompt = PreparedPrompt("what", [ImageRef.from_digest(bytes(32))], {})
    kept = weakref.ref(prompt)
    gc.disable()
    try:
        with contextlib.suppress(EmbeddingNotCachedError):
            prompt.supply(_lacks(0), _info())
        del prompt
        assert kept() is None
    finally:
        gc.enable()


def test_a_missing_frame_sends_its_whole_video_as_bytes() -> None:
    video = Video.from_frames(LARGE[:3], size=(8, 8))
    prompt = PreparedPrompt([Message("user", [SMALL, video, "what"])], (), {})

    def frames_sent() -> list[bool]:
        return [frame.HasField("data") for frame in prompt.params().chat.messages[0].parts[1].video.frames]

    assert frames_sent() == [False] * 3
    # The server counts the image as 0, the first two frames as 1, and the last one as 2.
    assert prompt.supply(_lacks(2), _info(max_message_bytes=SMALL_IMAGE_BYTES)) == []
    assert frames_sent() == [True] * 3


@pytest.mark.parametrize(("frames_per_entry", "index_of_image"), [(2, 2), (1, 3), (0, 2)])
def test_entries_are_counted_as_the_server_counts_them(frames_per_entry: int, index_of_image: int) -> None:
    """0 stands for a server that is older than the field, and has pairs."""
    video = Video.from_frames(LARGE[:3], size=(8, 8))
    prompt = PreparedPrompt([Message("user", [video, LARGE[3], "what"])], (), {})
    info = _info(frames_per_entry=frames_per_entry)
    assert prompt.missing(_lacks(index_of_image), info) == [LARGE[3].digest]
    assert prompt.missing(_lacks(index_of_image - 1), info) == [image.digest for image in LARGE[:3]]
    with pytest.raises(EmbeddingNotCachedError):
        prompt.missing(_lacks(index_of_image + 1), info)


def test_a_video_without_its_size_is_sent_as_bytes_at_once() -> None:
    prompt = PreparedPrompt([Message("user", [Video.from_frames(LARGE[:2]), "what"])], (), {})
    assert all(frame.HasField("data") for frame in prompt.params().chat.messages[0].parts[0].video.frames)


def test_options_that_are_not_given_stay_unset_and_zero_is_sent() -> None:
    sampling = (
        PreparedPrompt("what", [], {"temperature": 0.0, "stop": "end", "logit_bias": {5: -1.0}}).params().sampling
    )
    assert sampling.HasField("temperature")
    assert not sampling.HasField("top_p")
    assert (list(sampling.stop), dict(sampling.logit_bias)) == (["end"], {5: -1.0})


@pytest.mark.parametrize(
    ("options", "field"), [({"top_k": -1}, "top_k"), ({"seed": "x"}, "seed"), ({"priority": 1.5}, "priority")]
)
def test_values_of_the_wrong_type_name_their_field(options: Any, field: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        PreparedPrompt("what", [], options).params()
    assert caught.value.field == field


def _sampling_of(options: Any) -> decoder_pb2.SamplingParams:
    return PreparedPrompt("what", [], options).params().sampling


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"json_schema": '{"type": "object"}'}, {"json_schema": '{"type": "object"}'}),
        ({"json_schema": {"type": "object"}}, {"json_schema": '{"type": "object"}'}),
        ({"json_object": True}, {"json_object": True}),
        ({"choice": ["yes", "no"]}, {"choice": decoder_pb2.ChoiceConstraint(texts=["yes", "no"])}),
        ({"choice": "yes"}, {"choice": decoder_pb2.ChoiceConstraint(texts=["yes"])}),
        # The server refuses an empty list, which is not the same as no constraint.
        ({"choice": []}, {"choice": decoder_pb2.ChoiceConstraint()}),
        ({"regex": "a*", "grammar": None}, {"regex": "a*"}),
    ],
)
def test_constraints_are_sent_in_their_own_fields(options: Any, expected: dict[str, Any]) -> None:
    sent = _sampling_of(options)
    assert sent == decoder_pb2.SamplingParams(**expected)
    assert sent.WhichOneof("constraint") == next(iter(expected))


def test_two_constraints_exclude_each_other_and_objects_must_be_json() -> None:
    with pytest.raises(InvalidParameterError, match="grammar: cannot be combined with regex"):
        _sampling_of({"regex": "a", "grammar": "b"})
    assert _sampling_of({"regex": "a", "json_object": False}) == decoder_pb2.SamplingParams(regex="a")
    with pytest.raises(InvalidParameterError, match="json_schema: is no JSON"):
        _sampling_of({"json_schema": {"type": {1, 2}}})


def test_an_unknown_option_is_a_type_error() -> None:
    options: Any = {"temprature": 1.0}
    with pytest.raises(TypeError, match="temprature"):
        PreparedPrompt("what", [], options).params()


@pytest.mark.parametrize(
    ("prompt", "field"),
    [([Message("user", "what")], "images"), ([Message("robot", "what")], "role")],  # type: ignore[arg-type]
)
def test_a_chat_with_separate_images_or_an_unknown_role_is_refused(prompt: list[Message], field: str) -> None:
    options: GenerateOptions = {}
    with pytest.raises(InvalidParameterError) as caught:
        PreparedPrompt(prompt, [SMALL] if field == "images" else [], options)
    assert caught.value.field == field


def test_a_transcript_joins_the_pieces_of_a_stream() -> None:
    transcript = Transcript()
    pieces = [transcript.add(event) for event in stream_of(["a", "b"], USAGE)]
    assert pieces == [None, Delta("a"), Delta(" b"), None]
    generation = transcript.generation()
    assert (generation.text, generation.token_ids, generation.finish_reason) == ("a b", (0, 1), "stop")
    assert generation.request_id == "r"


def test_a_stream_must_have_no_gap_and_exactly_one_end() -> None:
    started, first, second, finished = stream_of(["a", "b"], USAGE)
    for events in ([started, second], [started, first, first], [started, first, second, finished, finished]):
        transcript = Transcript()
        for event in events[:-1]:
            transcript.add(event)
        with pytest.raises(InternalError) as caught:
            transcript.add(events[-1])
        assert caught.value.request_id == "r"
    transcript = Transcript()
    transcript.add(first)
    with pytest.raises(InternalError, match="final event"):
        transcript.generation()


def test_an_answer_without_a_choice_names_its_request() -> None:
    with pytest.raises(InternalError, match="no choice") as caught:
        generation_of(decoder_pb2.GenerateResponse(request_id="r"))
    assert caught.value.request_id == "r"
