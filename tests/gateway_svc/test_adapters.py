"""LoRA adapters through the gateway: each is a model of its own."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import grpc.aio
import pytest

from decoder_svc.settings import DecoderSettings
from lookonce import AsyncClient
from lookonce.decoder.v1 import decoder_service_pb2 as pb
from lookonce.decoder.v1.decoder_service_pb2_grpc import DecoderAdminServiceStub
from tests.conftest import DEMO_MODEL
from tests.decoder_svc.decoders import running_decoder
from tests.decoder_svc.encoders import served
from tests.gateway_svc.gateways import Gateway, running_gateway
from tests.lora_folders import lora_folder

# The servers in front of the decoder's services have these settings.
_VALUES: dict[str, Any] = {"model": DEMO_MODEL, "encoder_target": None, "drain_timeout_s": 0.5}
SERVED = DecoderSettings(**_VALUES)
MESSAGES = [{"role": "user", "content": "What is red?"}]


async def chat(gateway: Gateway, model: str) -> tuple[int, str]:
    """Returns the status, and the text or the code of the error."""
    body = {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": 12, "min_tokens": 12}
    status, answer = await gateway.post("/v1/chat/completions", json.dumps(body).encode())
    found = json.loads(answer)
    return status, str(found["choices"][0]["message"]["content"] if status == 200 else found["error"]["code"])


async def test_adapters_are_models(tmp_path: pathlib.Path) -> None:
    for seed, name in enumerate(("one", "two")):
        lora_folder(tmp_path / name, DEMO_MODEL, seed=seed)
    settings: dict[str, Any] = {"dtype": "float32", "adapters": f"one={tmp_path / 'one'}", "adapters_folder": tmp_path}
    settings["admin_listen"] = "127.0.0.1:0"
    async with (
        running_decoder(DEMO_MODEL, **settings) as decoder,
        served(SERVED, decoder.service.entry()) as target,
        served(SERVED, decoder.service.admin_entry()) as admin_target,
        grpc.aio.insecure_channel(admin_target) as channel,
        running_gateway(target) as gateway,
        AsyncClient.connect(target) as client,
    ):
        admin = DecoderAdminServiceStub(channel)
        base, first = (await gateway.client.models.list()).data
        assert (first.id, first.model_dump()["parent"]) == ("one", base.id)
        assert (await gateway.client.models.retrieve("one")).id == "one"

        # Prompts of which nobody has the keys and values yet, and the same again.
        for _ in range(2):
            answers = {}
            for name in (base.id, "one"):
                adapter = None if name == base.id else name
                expected = await client.generate(
                    "What is red?", adapter=adapter, temperature=0, max_tokens=12, min_tokens=12
                )
                status, answers[name] = await chat(gateway, name)
                assert (status, answers[name]) == (200, expected.text)
            assert answers[base.id] != answers["one"]

        echoed = {}
        for name in (base.id, "one"):
            completion = await gateway.client.completions.create(
                model=name, prompt="A red star is in the picture", echo=True, logprobs=1, max_tokens=0
            )
            assert completion.model == name
            logprobs = completion.choices[0].logprobs
            assert logprobs is not None
            assert logprobs.token_logprobs is not None
            echoed[name] = logprobs.token_logprobs[1:]
        assert len(echoed["one"]) > 2
        assert echoed["one"] != echoed[base.id]

        vectors = [
            (await gateway.client.embeddings.create(model=name, input="A red star")).data[0].embedding
            for name in (base.id, "one")
        ]
        assert max(abs(a - b) for a, b in zip(*vectors, strict=True)) > 1e-3

        assert (await chat(gateway, "two"))[0] == 404
        await admin.LoadAdapter(pb.LoadAdapterRequest(name="two"))
        status, second = await chat(gateway, "two")
        assert status == 200
        assert second not in answers.values()
        await admin.UnloadAdapter(pb.UnloadAdapterRequest(name="two"))
        # The gateway still remembers the name.
        body = json.dumps({"model": "two", "input": "a star"}).encode()
        status, text = await gateway.post("/v1/embeddings", body)
        assert (status, json.loads(text)["error"]["param"]) == (404, "model")
        assert await chat(gateway, "two") == (404, "model_not_found")


async def test_decoders_with_different_adapters_are_one_fleet(tmp_path: pathlib.Path) -> None:
    """Each adapter is at one of two decoders."""
    for seed, name in enumerate(("one", "two", "three")):
        lora_folder(tmp_path / name, DEMO_MODEL, seed=seed)
    first: dict[str, Any] = {"dtype": "float32", "adapters": f"one={tmp_path / 'one'}"}
    second: dict[str, Any] = {"dtype": "float32", "adapters": f"two={tmp_path / 'two'}"}
    second |= {"adapters_folder": tmp_path, "admin_listen": "127.0.0.1:0"}
    async with (
        running_decoder(DEMO_MODEL, **first) as left,
        running_decoder(DEMO_MODEL, **second) as right,
        served(SERVED, left.service.entry()) as left_target,
        served(SERVED, right.service.entry()) as right_target,
        served(SERVED, right.service.admin_entry()) as admin_target,
        AsyncClient.connect(left_target) as left_client,
        AsyncClient.connect(right_target) as right_client,
        running_gateway(f"ipv4:{left_target},{right_target}") as gateway,
        grpc.aio.insecure_channel(admin_target) as channel,
    ):
        admin = DecoderAdminServiceStub(channel)
        listed = [model.id for model in (await gateway.client.models.list()).data]
        assert listed[1:] == ["one", "two"]
        expected = {}
        for name, client in (("one", left_client), ("two", right_client)):
            generation = await client.generate(
                "What is red?", adapter=name, temperature=0, max_tokens=12, min_tokens=12
            )
            expected[name] = generation.text
        assert expected["one"] != expected["two"]
        for _ in range(3):
            for name, text in expected.items():
                assert await chat(gateway, name) == (200, text)
                vector = await gateway.client.embeddings.create(model=name, input="A red star")
                assert len(vector.data) == 1
        assert await chat(gateway, "three") == (404, "model_not_found")
        await admin.LoadAdapter(pb.LoadAdapterRequest(name="three"))
        assert (await chat(gateway, "three"))[0] == 200
        assert (await gateway.client.models.retrieve("three")).id == "three"
        await admin.UnloadAdapter(pb.UnloadAdapterRequest(name="three"))
        # The gateway still remembers the name, and no decoder has it.
        assert await chat(gateway, "three") == (404, "model_not_found")


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_an_echo_that_computes_nothing_needs_its_adapter_too(
    tmp_path: pathlib.Path, logprobs: int | None
) -> None:
    lora_folder(tmp_path / "one", DEMO_MODEL, seed=0)
    settings: dict[str, Any] = {"dtype": "float32", "adapters": f"one={tmp_path / 'one'}", "adapters_folder": tmp_path}
    settings["admin_listen"] = "127.0.0.1:0"
    async with (
        running_decoder(DEMO_MODEL, **settings) as decoder,
        served(SERVED, decoder.service.entry()) as target,
        served(SERVED, decoder.service.admin_entry()) as admin_target,
        grpc.aio.insecure_channel(admin_target) as channel,
        running_gateway(target) as gateway,
    ):
        body = json.dumps({"model": "one", "prompt": [5], "echo": True, "max_tokens": 0, "logprobs": logprobs}).encode()
        assert (await gateway.post("/v1/completions", body))[0] == 200
        await DecoderAdminServiceStub(channel).UnloadAdapter(pb.UnloadAdapterRequest(name="one"))
        # The gateway still remembers the name.
        status, text = await gateway.post("/v1/completions", body)
        error = json.loads(text)["error"]
        assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert "'one'" in error["message"]
