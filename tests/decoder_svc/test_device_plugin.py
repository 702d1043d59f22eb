"""Services on the device of a plug-in that pip installed: they answer as those on the CPU do."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import grpc
import pytest
import torch

from encoder_svc.vision.vision_config import VisionConfig
from encoder_svc.vision.vision_model import VisionModel
from lookonce.content_key import ProcessorOptions
from lookonce.decoder.v1 import decoder_service_pb2 as pb
from lookonce.decoder.v1.decoder_service_pb2_grpc import DecoderServiceStub
from lookonce.devices.base import MIB
from lookonce.errors import ConfigurationError
from tests import image_files, tiny_models
from tests.decoder_svc.decoders import RunningDecoder, params, running_decoder, source
from tests.decoder_svc.encoders import running_encoder
from tests.device_plugins import install_example

MODULES = ("fixed_steps", "fixed_steps.platform", "fixed_steps.runner")
QUESTIONS = (("what is it",), ("what", " near the boat"), ("a", " and ", "b"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder that pip installed the example to."""
    return install_example(tmp_path_factory.mktemp("plug-in"))


@pytest.fixture
def on_path(installed: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process with the example installed."""
    monkeypatch.syspath_prepend(installed)
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


async def answers(decoder: RunningDecoder) -> list[pb.Choice]:
    """Answers to a text prompt, and to prompts with one and two images."""
    found = []
    for number, texts in enumerate(QUESTIONS):
        images = [source(image_files.encoded(image_files.noise(index, 100, 90))) for index in range(number)]
        request = params(*texts, *images, max_tokens=12, ignore_eos=True)
        response = await decoder.stub.Generate(pb.GenerateRequest(params=request), timeout=60)
        found.append(response.choices[0])
    return found


@pytest.mark.usefixtures("on_path")
async def test_a_device_that_computes_no_parts_of_a_model_refuses_to_split_it(
    model_folder: Callable[[str], pathlib.Path],
) -> None:
    with pytest.raises(ConfigurationError, match="not offered on the device fixed yet"):
        async with running_decoder(model_folder("llava_clip"), device="fixed", tensor_parallel_size=2):
            pass


@pytest.mark.usefixtures("on_path")
async def test_a_decoder_on_the_plug_ins_device_answers_as_one_on_the_cpu(
    model_folder: Callable[[str], pathlib.Path],
) -> None:
    folder = model_folder("llava_clip")
    async with running_encoder(folder, device="fixed") as target:
        async with running_decoder(folder, target, device="cpu", dtype="float32") as decoder:
            expected = await answers(decoder)
            assert decoder.service.engine.facts.attention_backend != "fixed-steps"
        async with running_decoder(folder, target, device="fixed", dtype="float32", block_size=None) as decoder:
            assert decoder.service.engine.facts.attention_backend == "fixed-steps"
            assert (await decoder.stub.GetModelInfo(pb.GetModelInfoRequest())).block_size == 8
            found = await answers(decoder)
    assert [list(one.token_ids) for one in found] == [list(one.token_ids) for one in expected]
    assert len({tuple(one.token_ids) for one in found}) == len(QUESTIONS)


@pytest.mark.usefixtures("on_path")
@pytest.mark.parametrize("name", ["llava_clip", "qwen2_vl"])
def test_the_vision_half_runs_on_the_plug_ins_device(name: str, model_folder: Callable[[str], pathlib.Path]) -> None:
    on_plugin, on_cpu = (
        VisionModel.load(VisionConfig(model_folder(name), device, "float32")) for device in ("fixed", "cpu")
    )
    assert (on_plugin.platform.name, on_plugin.platform.max_forward_bytes) == ("fixed", 16 * MIB)
    assert on_plugin.fingerprint == on_cpu.fingerprint, "decoders accept rows of either"
    image = tiny_models.random_image(1, 90, 100)
    rows = [model.forward([model.adapter.pixel_inputs(image, ProcessorOptions())])[0] for model in (on_plugin, on_cpu)]
    torch.testing.assert_close(*rows, rtol=1e-4, atol=1e-4)


def test_a_process_is_started_with_the_plug_ins_device(
    installed: pathlib.Path, model_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    ready_file = tmp_path / "ready.json"
    flags = ("--device", "fixed", "--ready-file", str(ready_file), "--num-kv-blocks", "40")
    command = [sys.executable, "-m", "decoder_svc", "--model", str(model_folder("llava_clip")), *flags]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        while not ready_file.exists():
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            time.sleep(0.05)
        with grpc.insecure_channel(json.loads(ready_file.read_text())["target"]) as channel:
            request = pb.GenerateRequest(params=params("what is it", max_tokens=5, ignore_eos=True))
            answer = DecoderServiceStub(channel).Generate(request, timeout=60)
    finally:
        process.terminate()
        _, log = process.communicate(timeout=60)
    assert answer.usage.completion_tokens == 5
    lines = [json.loads(line) for line in log.splitlines()]
    (chosen,) = [line for line in lines if line["event"] == "device"]
    assert (chosen["name"], chosen["found"]) == ("fixed", f"PyTorch {torch.__version__}")
    assert any("weights take" in line["event"] for line in lines)
