"""Tiny models and a running encoder for the encoder's tests."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import grpc.aio
import pytest
import structlog
import torch
import transformers

from encoder_svc.cache.pipeline import EncodePipeline
from encoder_svc.images.image_inputs import PixelInputs
from encoder_svc.service import open_pipeline, service_entry
from encoder_svc.settings import EncoderSettings
from encoder_svc.vision.vision_model import VisionModel
from lookonce.encoder.v1.encoder_service_pb2_grpc import EncoderServiceStub
from lookonce.server.admission.quotas import Quotas
from lookonce.server.serving import GrpcService
from lookonce.server.telemetry import Telemetry
from lookonce.tenants import Tenants
from tests.tiny_families import FAMILIES

if TYPE_CHECKING:
    from lookonce.encoder.v1.encoder_service_pb2_grpc import EncoderServiceAsyncStub

transformers.utils.logging.disable_progress_bar()

_GATE_TIMEOUT_S = 30


def encoder_settings(folder: pathlib.Path, **values: Any) -> EncoderSettings:
    """Settings for a folder; what `values` leaves out is the default."""
    return EncoderSettings(model=folder, **values)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], pathlib.Path]:
    """Builds a model folder once, as in `tiny_folder("llava_clip")`. Never change it; change a copy."""
    base = tmp_path_factory.mktemp("tiny")

    def folder(name: str) -> pathlib.Path:
        path = base / name
        return path if path.exists() else FAMILIES[name].build(path)

    return folder


@pytest.fixture(scope="session")
def vision_model(tiny_folder: Callable[[str], pathlib.Path]) -> Callable[[str], VisionModel]:
    """Loads a vision half once, as in `vision_model("llava_clip")`."""
    loaded: dict[str, VisionModel] = {}

    def model(name: str) -> VisionModel:
        if name not in loaded:
            loaded[name] = VisionModel.load(encoder_settings(tiny_folder(name)).vision)
        return loaded[name]

    return model


@dataclass(frozen=True, slots=True)
class RunningEncoder:
    """A running encoder on loopback, and its parts."""

    stub: EncoderServiceAsyncStub
    pipeline: EncodePipeline
    telemetry: Telemetry
    # The host:port of the service.
    target: str

    def metric(self, name: str, **labels: str) -> float:
        """Current value of a metric, 0 before its first use."""
        return self.telemetry.registry.get_sample_value(name, labels) or 0.0


class StartEncoder(Protocol):
    """Starts an encoder, as in `async with start_encoder("llava_clip", redis_url=…) as encoder`."""

    def __call__(self, name: str, *, channel_options: Any = (), **settings: Any) -> Any: ...


@pytest.fixture
def start_encoder(
    tiny_folder: Callable[[str], pathlib.Path], vision_model: Callable[[str], VisionModel]
) -> StartEncoder:
    """Starts encoders inside the test's event loop; settings are keyword arguments."""

    @asynccontextmanager
    async def start(name: str, *, channel_options: Any = (), **settings: Any) -> AsyncIterator[RunningEncoder]:
        parsed = encoder_settings(tiny_folder(name), drain_timeout_s=1.0, **settings)
        telemetry = Telemetry()
        model = vision_model(name) if parsed.row_format == "native" else VisionModel.load(parsed.vision)
        async with open_pipeline(parsed, model, telemetry.registry) as pipeline:
            service = GrpcService(
                parsed, telemetry, [service_entry(pipeline, Tenants(None), Quotas(None, telemetry.registry), parsed)]
            )
            target = await service.start()
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 64 << 20)]
            # Otherwise gRPC's buffers grow with the measured speed, and may hold all of an answer that nobody reads.
            options += [("grpc.http2.bdp_probe", 0), *channel_options]
            try:
                async with grpc.aio.insecure_channel(target, options=options) as channel:
                    yield RunningEncoder(EncoderServiceStub(channel), pipeline, telemetry, target)
            finally:
                await service.stop()

    return start


class SickModel:
    """Makes the LLaVA model with a CLIP tower fail on black images, or on all; its passes wait at a gate."""

    def __init__(self, image_rows: Callable[[Any, Sequence[PixelInputs]], list[torch.Tensor]]) -> None:
        self._image_rows = image_rows
        self.gate = threading.Event()
        self.gate.set()
        self.fails_on_black = True
        self.fails_on_all = False
        # Images of each pass, and those among them that were black.
        self.passes: list[tuple[int, int]] = []

    def image_rows(self, model: Any, batch: Sequence[PixelInputs]) -> list[torch.Tensor]:
        """Replaces the adapter's method of this name."""
        assert self.gate.wait(_GATE_TIMEOUT_S)
        # Normalised, black is about −1.8 and grey 0.
        num_black = sum(bool((inputs.pixel_values < -1).all()) for inputs in batch)
        self.passes.append((len(batch), num_black))
        if self.fails_on_all or (num_black and self.fails_on_black):
            raise RuntimeError("sick at 0xdeadbeef in torch/sick.py")
        return self._image_rows(model, batch)

    @property
    def num_black(self) -> int:
        """Number of passes that had black images."""
        return sum(num_black > 0 for _, num_black in self.passes)


@pytest.fixture
def sick_model(vision_model: Callable[[str], VisionModel], monkeypatch: pytest.MonkeyPatch) -> Iterator[SickModel]:
    """Makes `vision_model("llava_clip")` sick during the test."""
    adapter = vision_model("llava_clip").adapter
    sick = SickModel(adapter.image_rows)
    monkeypatch.setattr(adapter, "image_rows", sick.image_rows)
    # Rendering tracebacks with all their local variables takes longer than the tests.
    with structlog.testing.capture_logs():
        yield sick
    sick.gate.set()
