"""Starts a decoder for text alone in its own process, and makes prompts for it."""

from __future__ import annotations

import pathlib
import random
from collections.abc import Sequence

import grpc
import psutil

from lookonce.aio import AsyncClient
from lookonce.decoder.v1 import decoder_service_pb2 as decoder_pb2
from lookonce.decoder.v1 import decoder_service_pb2_grpc as decoder_grpc
from lookonce.local.local_stack import LocalStack

_WORDS = "what colour is the small cat near that red boat and why do you see it under a tree".split()
# Words of a prompt, before the template.
_NUM_WORDS = 40


class TextService(LocalStack):
    """One decoder without an encoder."""

    def __init__(self, model: pathlib.Path, flags: Sequence[str]) -> None:
        """Takes the command-line flags of the decoder."""
        super().__init__(model, num_encoders=0, decoder_arguments=flags)

    @property
    def target(self) -> str:
        """Address of the decoder as host:port."""
        return self.decoder_targets[0]

    @property
    def cpu_s(self) -> float:
        """User and system time of the decoder so far, and of its engine process if it has one, seconds."""
        decoder = psutil.Process(self.decoders[0].pid)
        times = [process.cpu_times() for process in (decoder, *decoder.children())]
        return float(sum(each.user + each.system for each in times))

    def token_ids(self, prompts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The prompts as the service tokenizes them, template included."""
        with grpc.insecure_channel(self.target) as channel:
            stub = decoder_grpc.DecoderServiceStub(channel)
            return tuple(tuple(stub.Tokenize(_tokenize(prompt)).token_ids) for prompt in prompts)


async def told_prompts(client: AsyncClient, num_prompts: int, rng: random.Random) -> list[str]:
    """Prompts that the service has seen, so that its prefix cache has all but their ends.

    The first token of each answer is text by itself: where it is half a character, the SDK yields nothing for it.
    """
    found: list[str] = []
    while len(found) < num_prompts:
        prompt = " ".join(rng.choices(_WORDS, k=_NUM_WORDS))
        if (await client.generate(prompt, max_tokens=1, temperature=0.0, ignore_eos=True)).text:
            found.append(prompt)
    return found


def _tokenize(prompt: str) -> decoder_pb2.TokenizeRequest:
    message = decoder_pb2.ChatMessage(role=decoder_pb2.ROLE_USER, parts=[decoder_pb2.ContentPart(text=prompt)])
    return decoder_pb2.TokenizeRequest(chat=decoder_pb2.ChatPrompt(messages=[message]))
