"""Converts a decoder's descriptions of itself and of prompts from protobuf to plain data. Calls no server."""

from __future__ import annotations

from dataclasses import fields

from lookonce.decoder.v1 import decoder_service_pb2 as decoder_pb2
from lookonce.decoder_info import DecoderLoad, ImageSpan, ModelInfo, TokenizedPrompt


def model_info_of(response: decoder_pb2.GetModelInfoResponse) -> ModelInfo:
    """Returns the model and the limits. A field that an older server does not send is empty or 0."""
    values = {one.name: getattr(response, one.name) for one in fields(ModelInfo)}
    lists = {name: tuple(getattr(response, name)) for name in ("template_arguments", "adapters")}
    return ModelInfo(**values | lists)


def load_of(response: decoder_pb2.GetLoadResponse) -> DecoderLoad:
    """Returns the load of one replica."""
    return DecoderLoad(**{one.name: getattr(response, one.name) for one in fields(DecoderLoad)})


def tokenized_prompt_of(response: decoder_pb2.TokenizeResponse) -> TokenizedPrompt:
    """Returns a prompt's tokens and the places of its images."""
    spans = (ImageSpan(one.offset, one.length, one.key.digest) for one in response.images)
    return TokenizedPrompt(tuple(response.token_ids), tuple(spans))
