"""Decoders whose model is split over several processes: answers of all kinds, refusals, and ranks that end."""

from __future__ import annotations

import asyncio
import functools
import json
import pathlib
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf import json_format

from lookonce.decoder.v1 import decoder_service_pb2 as pb
from lookonce.decoder.v1.decoder_service_pb2_grpc import DecoderServiceStub
from lookonce.errors import ConfigurationError
from tests import tiny_models
from tests.conftest import DEMO_MODEL
from tests.decoder_svc.decoders import RunningDecoder, code_of, params, running_decoder
from tests.quantized_folders import FORMS, store_quantized
from tests.warm_processes import WarmProcesses

SPLIT: dict[str, Any] = {"tensor_parallel_size": 2, "dtype": "float32"}
TEXT = "What is in the picture? A green star, and nothing more than that, I am sure. " * 4
TIMEOUT_S = 60


async def answers(decoder: RunningDecoder) -> list[dict[str, Any]]:
    """Returns answers of every kind, without ids and times."""

    async def generated(**sampling: Any) -> dict[str, Any]:
        request = pb.GenerateRequest(params=params(TEXT, **{"max_tokens": 12, "min_tokens": 12, **sampling}))
        return shown(await decoder.stub.Generate(request, timeout=TIMEOUT_S))

    def shown(message: Any) -> dict[str, Any]:
        found: dict[str, Any] = json_format.MessageToDict(message)
        return {name: found[name] for name in ("choices", "promptLogprobs", "embeddings") if name in found}

    found = await asyncio.gather(
        generated(temperature=0.0),
        generated(temperature=0.9, seed=5, n=3),
        generated(temperature=0.0, repetition_penalty=1.3),
        generated(temperature=0.0, regex="(red|blue|green){6}", min_tokens=0, max_tokens=64),
        *(generated(temperature=0.7, seed=number) for number in range(6)),
    )
    return [*found]


def tokens(found: list[dict[str, Any]]) -> list[list[list[int]]]:
    return [[choice["tokenIds"] for choice in one["choices"]] for one in found]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 24, "max_num_seqs": 4},
        {"speculative_tokens": 4, "speculative_ngram_min": 1},
        {"deterministic": True},
        {"kv_cache_memory_bytes": 1 << 20, "num_kv_blocks": None},
    ],
    ids=str,
)
async def test_answers_are_those_of_one_process(settings: dict[str, Any]) -> None:
    async with running_decoder(DEMO_MODEL, dtype="float32", **settings) as decoder:
        expected = await answers(decoder)
    async with running_decoder(DEMO_MODEL, **SPLIT, **settings) as decoder:
        assert tokens(await answers(decoder)) == tokens(expected)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"engine": "thread"}, "needs an engine process"),
        ({"tensor_parallel_size": 3}, "num_attention_heads is 4, which 3 does not divide"),
        # It would take minutes to start so many first.
        ({"tensor_parallel_size": 64}, "num_attention_heads is 4, which 64 does not divide"),
    ],
    ids=str,
)
async def test_what_cannot_be_split_is_refused(
    settings: dict[str, Any], reason: str, model_folder: Callable[[str], pathlib.Path]
) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        async with running_decoder(model_folder("llava_clip"), **{**SPLIT, **settings}):
            pass


@pytest.mark.parametrize("quantize", ["int8", "int4"])
async def test_weights_that_are_rounded_while_loading_are_split(quantize: str) -> None:
    async with running_decoder(DEMO_MODEL, dtype="float32", quantize=quantize) as decoder:
        expected = await answers(decoder)
    async with running_decoder(DEMO_MODEL, **SPLIT, quantize=quantize) as decoder:
        assert tokens(await answers(decoder)) == tokens(expected)


async def test_a_quantized_folder_is_split(tmp_path: pathlib.Path) -> None:
    folder, whole = (tiny_models.build_llava_clip(tmp_path / name) for name in ("stored", "whole"))
    store_quantized(folder, FORMS["awq"], whole)
    async with running_decoder(folder, dtype="float32") as decoder:
        expected = await answers(decoder)
    async with running_decoder(folder, **SPLIT) as decoder:
        assert tokens(await answers(decoder)) == tokens(expected)


@pytest.mark.parametrize("is_busy", [True, False], ids=["in a step", "without work"])
def test_a_rank_that_ends_ends_its_decoder(
    is_busy: bool, tmp_path: pathlib.Path, warm_processes: WarmProcesses
) -> None:
    ready_file, log = tmp_path / "ready.json", tmp_path / "log"
    flags = ["--model", str(DEMO_MODEL), "--ready-file", str(ready_file), "--tensor-parallel-size", "2"]
    sizes = ["--num-threads", "1", "--num-kv-blocks", "2000"]
    process = warm_processes.start("decoder_svc", [*flags, *sizes, "--listen", "127.0.0.1:0"], log)
    try:
        while not ready_file.exists():
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        (engine,) = psutil.Process(process.pid).children()
        ranks = [child for child in engine.children() if "decoder_svc.rank_worker" in child.cmdline()]
        assert len(ranks) == 1
        with (
            grpc.insecure_channel(json.loads(ready_file.read_text())["target"]) as channel,
            ThreadPoolExecutor(4) as threads,
        ):
            stub: DecoderServiceStub = DecoderServiceStub(channel)
            request = pb.GenerateRequest(params=params("red", max_tokens=1500, ignore_eos=True))
            generate = functools.partial(stub.Generate, request, timeout=TIMEOUT_S)
            calls = [threads.submit(code_of, generate) for _ in range(4 if is_busy else 0)]
            while is_busy and stub.GetLoad(pb.GetLoadRequest(), timeout=TIMEOUT_S).running_requests < 4:
                time.sleep(0.01)
            ranks[0].send_signal(signal.SIGKILL)
            assert {call.result() for call in calls} <= {"UNAVAILABLE"}
            assert process.wait(TIMEOUT_S) == 1
    finally:
        process.kill()
        process.wait()
    assert not psutil.pid_exists(engine.pid)


def test_the_ranks_end_with_a_decoder_that_is_killed(tmp_path: pathlib.Path, warm_processes: WarmProcesses) -> None:
    ready_file, log = tmp_path / "ready.json", tmp_path / "log"
    flags = ["--model", str(DEMO_MODEL), "--ready-file", str(ready_file), "--tensor-parallel-size", "2"]
    process = warm_processes.start("decoder_svc", [*flags, "--num-kv-blocks", "200", "--listen", "127.0.0.1:0"], log)
    while not ready_file.exists():
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    assert sum("decoder_svc.rank_worker" in child.cmdline() for child in children) == 1
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=TIMEOUT_S)
    assert not alive
