"""The device decides about the runner, and the metrics name its attention backend."""

from __future__ import annotations

import pathlib
import threading

import pytest
import torch
from prometheus_client import CollectorRegistry

from decoder_svc import assembly
from decoder_svc.rows.fetch_metrics import FetchMetrics
from decoder_svc.runner.cpu.runner import CPUModelRunner
from decoder_svc.runner.cuda.runner import GPUModelRunner
from decoder_svc.service import load_text
from decoder_svc.settings import DecoderSettings
from lookonce.errors import ConfigurationError, ModelFolderError
from lookonce.server.settings import parse_settings
from tests import tiny_models
from tests.decoder_svc.decoders import running_decoder


def test_the_device_decides_about_the_runner(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    settings = parse_settings(DecoderSettings, ["--model", str(tmp_path), "--device", "cpu"], "decoder_svc")
    assert assembly._runner_class(settings) is CPUModelRunner
    monkeypatch.setattr(assembly, "chosen_device", lambda _name: torch.device("cuda", 0))
    assert assembly._runner_class(settings) is GPUModelRunner


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
async def test_a_device_that_is_not_there_is_refused(tmp_path: pathlib.Path) -> None:
    folder = tiny_models.build_llava_clip(tmp_path / "llava")
    with pytest.raises(ConfigurationError, match="no CUDA device"):
        async with running_decoder(folder, device="cuda"):
            pass


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
    assembly.build_engine(settings, family, None, None, FetchMetrics(CollectorRegistry()))
    (loader,) = loaders
    assert loader is not threading.current_thread()
    assert not loader.is_alive()


async def test_a_metric_names_the_attention_backend(tmp_path: pathlib.Path) -> None:
    folder = tiny_models.build_llava_clip(tmp_path / "llava")
    async with running_decoder(folder) as decoder:
        (metric,) = [
            metric for metric in decoder.registry.collect() if metric.name == "lookonce_decoder_attention_backend_info"
        ]
        backend = decoder.service.engine.attention_backend
    assert [(sample.labels, sample.value) for sample in metric.samples] == [({"backend": backend}, 1.0)]
    assert backend in {"native", "sdpa", "triton", "flash-attn"}
