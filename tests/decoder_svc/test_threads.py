"""The engine thread handles no text and no messages, and the event loop runs no step."""

from __future__ import annotations

import asyncio
import pathlib
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from decoder_svc import wire_request, wire_response
from decoder_svc.answer.detokenizer import StopFilter
from decoder_svc.prompt.chat_template import ChatTemplate
from decoder_svc.prompt.text_tokenizer import TextTokenizer
from decoder_svc.runner.base import ModelRunnerBase
from decoder_svc.scheduling.scheduler import Scheduler
from lookonce.decoder.v1 import decoder_service_pb2 as pb
from tests.decoder_svc.decoders import params, running_decoder

ENGINE = "engine"
NUM_TOKENS = 12


class Threads:
    """The names of the threads on which functions ran, by function name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.names: dict[str, set[str]] = defaultdict(set)

    def watch(self, owner: Any, *functions: str) -> None:
        """Notes the thread of every call, and calls the real function."""
        for function in functions:
            self._monkeypatch.setattr(owner, function, self._watched(function, getattr(owner, function)))

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.names[name].add(threading.current_thread().name)
            return function(*arguments, **named)

        return call


async def test_text_and_messages_are_no_work_of_the_engine_thread(
    model_folder: Callable[[str], pathlib.Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = Threads(monkeypatch)
    async with running_decoder(model_folder("llava_clip")) as decoder:
        threads.watch(TextTokenizer, "encode_pieces", "decode")
        threads.watch(ChatTemplate, "render")
        threads.watch(StopFilter, "push")
        threads.watch(wire_request, "parse_prompt", "parse_sampling")
        threads.watch(wire_response, "delta", "usage", "finish_reason")
        threads.watch(Scheduler, "schedule", "update")
        threads.watch(ModelRunnerBase, "execute_model")

        async def streamed(question: str) -> int:
            request = params(question, max_tokens=NUM_TOKENS, ignore_eos=True, stop=["never said ☃"])
            call = decoder.stub.GenerateStream(pb.GenerateStreamRequest(params=request), timeout=60)
            return sum([len(event.delta.token_ids) async for event in call])

        assert await asyncio.gather(*(streamed(f"what is {index}") for index in range(6))) == [NUM_TOKENS] * 6
        request = params("what", max_tokens=NUM_TOKENS, ignore_eos=True)
        await decoder.stub.Generate(pb.GenerateRequest(params=request), timeout=60)

    names = threads.names
    loop = threading.current_thread().name
    for function in ("schedule", "update", "execute_model"):
        assert names[function] == {ENGINE}
    for function in ("push", "decode", "parse_prompt", "parse_sampling", "delta", "usage", "finish_reason"):
        assert names[function] == {loop}
    for function in ("render", "encode_pieces"):
        assert names[function]
        assert all(name.startswith("prompt") for name in names[function])
