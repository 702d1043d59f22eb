"""The device decides about settings that nobody gave, and the metrics name its attention backend."""

from __future__ import annotations

import functools
import json
import math
import pathlib
import threading
from typing import Any

import pytest
import torch
import transformers
from prometheus_client import CollectorRegistry

from decoder_svc import assembly
from decoder_svc.constraint.folder_vocabulary import folder_vocabulary
from decoder_svc.device_choice import DeviceChoice, choose_device
from decoder_svc.engine.heartbeat import Heartbeat
from decoder_svc.rows.fetch_metrics import FetchMetrics
from decoder_svc.runner.cpu.runner import CPUModelRunner
from decoder_svc.service import load_text
from decoder_svc.settings import DecoderSettings
from lookonce.devices import registry
from lookonce.devices.base import Availability, DevicePlatform
from lookonce.errors import ConfigurationError, ModelFolderError
from lookonce.server.settings_parser import parse_settings
from tests import tiny_families, tiny_models
from tests.decoder_svc.decoders import running_decoder

PLATFORM = DevicePlatform(
    name="card",
    runner="decoder_svc.runner.cpu.runner:CPUModelRunner",
    availability=lambda: Availability(True, "a card"),
    torch_device=lambda: torch.device("cpu"),
    dtype="bfloat16",
    block_size=32,
    block_size_multiple=32,
    kv_cache_memory_share=0.75,
    engine_process=True,
)


def parsed(*arguments: str) -> DecoderSettings:
    """Settings for the device `card`, parsed from command-line flags."""
    return parse_settings(DecoderSettings, ["--model", "somewhere", "--device", "card", *arguments], "decoder_svc")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the device `card` in every registry that is made."""
    monkeypatch.setattr(registry, "_BUILT_IN", (*registry._BUILT_IN, PLATFORM))


@pytest.mark.usefixtures("card")
def test_settings_that_nobody_gave_are_the_devices() -> None:
    assert choose_device(parsed()) == DeviceChoice(PLATFORM, "bfloat16", 32, 0.75, True)
    given = parsed("--dtype", "float32", "--block-size", "64", "--kv-cache-memory-share", "0.25", "--engine", "thread")
    assert choose_device(given) == DeviceChoice(PLATFORM, "float32", 64, 0.25, False)
    on_cpus = choose_device(parsed("--device", "cpu"))
    assert (on_cpus.dtype, on_cpus.block_size, on_cpus.kv_cache_memory_share) == (None, 16, 0.5)
    assert not on_cpus.engine_process


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--block-size", "48"), "--block-size: is 48; the device card needs a multiple of 32"),
        (("--deterministic", "--max-num-batched-tokens", "16"), "max_num_batched_tokens=16 .* block_size=32"),
        (("--device", "npu"), "--device: no device npu is registered; use one of auto, cpu, cuda, card"),
    ],
)
def test_settings_that_do_not_fit_the_device_are_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        choose_device(parsed(*arguments))


@pytest.mark.usefixtures("card")
def test_the_engine_is_built_with_the_devices_settings(tmp_path: pathlib.Path) -> None:
    folder = tiny_models.build_llava_clip(tmp_path / "llava")
    settings = parsed("--model", str(folder), "--num-kv-blocks", "8", "--num-threads", "1")
    family = load_text(settings).family
    device = choose_device(settings)
    core = assembly.load_core(
        settings, device, family, Heartbeat(math.inf), functools.partial(folder_vocabulary, folder)
    )
    assert core.facts.limits.block_size == 32
    runner = core._step_loop._runner
    assert runner.config.dtype is runner.model.dtype is torch.bfloat16


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
async def test_a_device_that_is_not_there_is_refused(tmp_path: pathlib.Path) -> None:
    folder = tiny_models.build_llava_clip(tmp_path / "llava")
    with pytest.raises(ConfigurationError, match="no CUDA device"):
        async with running_decoder(folder, device="cuda"):
            pass


def test_a_request_is_no_longer_than_the_positions_of_its_text_model(caplog: pytest.LogCaptureFixture) -> None:
    text = transformers.Llama4TextConfig(attention_chunk_size=10, max_position_embeddings=100, floor_scale=50)
    settings = functools.partial(parse_settings, DecoderSettings, program="decoder_svc")
    assert assembly._context_tokens(settings(["--model", "somewhere"]), text) == 100
    assert assembly._context_tokens(settings(["--model", "somewhere", "--max-context-tokens", "50"]), text) == 50
    assert not caplog.text
    assert assembly._context_tokens(settings(["--model", "somewhere", "--max-context-tokens", "200"]), text) == 100
    assert "max_context_tokens is 200, and the model has 100 positions" in caplog.text


def test_a_default_out_of_its_range_is_refused_before_the_weights_are_read(tmp_path: pathlib.Path) -> None:
    folder = tiny_models.build_llava_clip(tmp_path / "llava")
    (folder / "generation_config.json").write_text('{"repetition_penalty": 0}')
    settings = parse_settings(DecoderSettings, ["--model", str(folder)], "decoder_svc")
    with pytest.raises(ModelFolderError, match=r"repetition_penalty must be in \(0, 10\], got 0"):
        load_text(settings)


def test_loading_leaves_no_threads_but_the_engine_s(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    loaders = []
    capture = CPUModelRunner.capture_model

    def noting(runner: CPUModelRunner) -> None:
        loaders.append(threading.current_thread())
        capture(runner)

    monkeypatch.setattr(CPUModelRunner, "capture_model", noting)
    folder = tiny_models.build_llava_clip(tmp_path / "llava")
    settings = parse_settings(DecoderSettings, ["--model", str(folder), "--num-kv-blocks", "8"], "decoder_svc")
    family = load_text(settings).family
    assembly.build_engine(
        settings,
        choose_device(settings),
        family,
        None,
        None,
        FetchMetrics(CollectorRegistry()),
        functools.partial(folder_vocabulary, folder),
        process=None,
    )
    (loader,) = loaders
    assert loader is not threading.current_thread()
    assert not loader.is_alive()


async def test_a_metric_names_the_attention_backend(tmp_path: pathlib.Path) -> None:
    folder = tiny_models.build_llava_clip(tmp_path / "llava")
    async with running_decoder(folder) as decoder:
        (metric,) = [
            metric for metric in decoder.registry.collect() if metric.name == "lookonce_decoder_attention_backend_info"
        ]
        backend = decoder.service.engine.facts.attention_backend
        weights = decoder.registry.get_sample_value("lookonce_decoder_weight_bytes")
    assert [(sample.labels, sample.value) for sample in metric.samples] == [({"backend": backend}, 1.0)]
    assert backend in {"native", "sdpa", "triton", "flash-attn"}
    assert weights == decoder.service.engine.facts.weight_bytes > 10_000


async def test_a_kv_cache_that_no_memory_can_hold_is_refused(tmp_path: pathlib.Path) -> None:
    folder = tiny_models.build_llava_clip(tmp_path / "llava")
    with pytest.raises(ConfigurationError, match="no memory for a KV cache of 1000000000000 blocks"):
        async with running_decoder(folder, num_kv_blocks=10**12):
            pass


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("top_k_experts", None, "cannot compute a step with config.json: TypeError"),
        ("top_k_experts", 5, "cannot compute a step with config.json: RuntimeError"),
        ("rope_parameters", {"sliding_attention": None, "full_attention": None}, "KeyError"),
        ("pad_token_id", -1, "pad_token_id of its text model is -1"),
    ],
)
async def test_numbers_with_which_the_language_model_cannot_be_computed_are_refused(
    field: str, value: Any, reason: str, tmp_path: pathlib.Path
) -> None:
    """transformers and torch notice them in the first step, if at all."""
    folder = tiny_families.FAMILIES["gemma4_moe"].build(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"][field] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFolderError, match=reason):
        async with running_decoder(folder):
            pass
