"""The options of the SDK are those of the wire contract."""

from __future__ import annotations

from lookonce.decoder.v1 import decoder_service_pb2 as decoder_pb2
from lookonce.generation import GenerateOptions, Usage

# Fields of GenerateParams that the SDK fills from other arguments than options.
FROM_ARGUMENTS = {"text", "chat", "tokens", "sampling"}
# Options that are about chats, so that the contract has them in ChatPrompt.
OF_CHATS = {"tools", "tool_choice", "parallel_tool_calls", "template_arguments"}
# A client is connected to the decoder of one model.
NOT_OFFERED = {"model"}


def test_every_sampling_option_of_the_contract_is_an_option_of_the_sdk() -> None:
    sampling = set(decoder_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
    request = set(decoder_pb2.GenerateParams.DESCRIPTOR.fields_by_name) - FROM_ARGUMENTS
    assert set(GenerateOptions.__annotations__) - {"timeout_s"} == (sampling | request | OF_CHATS) - NOT_OFFERED


def test_usage_has_every_count_of_the_contract_with_times_in_seconds() -> None:
    contract = {
        f"{name}_s" if field.message_type is not None else name
        for name, field in decoder_pb2.Usage.DESCRIPTOR.fields_by_name.items()
    }
    assert set(Usage.__dataclass_fields__) == contract
