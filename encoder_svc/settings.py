"""Settings of the encoder service."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from encoder_svc.vision.vision_config import VisionConfig
from lookonce.server.settings import MIB, ServiceSettings


class EncoderSettings(ServiceSettings):
    """The vision-encoder service: image bytes in, embedding rows in the shared cache."""

    row_format: Literal["native", "int8"] = Field(
        "native",
        description="Rows as the model gives them, or int8 with a scale per row: half the memory and traffic of "
        "bfloat16, off by about 0.9 %. Another fingerprint, so both never mix; decoders follow.",
    )
    max_batch_items: int = Field(64, ge=1, description="Most images in one Encode call.")
    max_forward_images: int = Field(8, ge=1, description="Most images in one forward pass.")
    max_forward_bytes: int | None = Field(
        None,
        ge=1,
        description="Most pixel bytes in one forward pass; a single larger image still gets one. Default: 256 MiB, and "
        "2 MiB on CPUs, where larger passes are not faster and every image of a pass waits for its end.",
    )
    max_forward_s: float = Field(
        300.0, gt=0, description="A forward pass that takes longer makes health say NOT_SERVING, seconds."
    )
    max_queued_images: int = Field(256, ge=1, description="Images waiting for preprocessing or a forward pass.")
    max_prepared_bytes: int = Field(
        1024 * MIB,
        ge=1,
        description="Pixel bytes that wait for a forward pass; beyond them images wait as files. It may be passed by "
        "as many images as there are preprocess_workers.",
    )
    preprocess_workers: int = Field(
        2, ge=1, description="Threads that preprocess images, each with a process that decodes them."
    )
    decode_timeout_s: float = Field(
        10.0, gt=0, description="Longest time one image may take to decode, seconds; then its process is killed."
    )
    max_image_aspect: float = Field(200.0, ge=1, le=200, description="Largest ratio of longer to shorter side.")
    encode_lease_s: float = Field(
        5.0,
        gt=0,
        le=300,
        description="Life of the lease by which one replica encodes an image, seconds; it is renewed meanwhile. "
        "So long an image waits when its encoder dies, and at most eight times as long for an encoder that lives.",
    )
    local_cache_bytes: int = Field(
        256 * MIB, ge=0, description="Rows kept in this process for ReadEmbedding and hot images."
    )
    max_entry_bytes: int = Field(
        128 * MIB, ge=4096, description="Largest embedding that is written to the shared cache."
    )

    @property
    def vision(self) -> VisionConfig:
        """The part of the settings that the vision model is loaded with."""
        return VisionConfig(self.model, self.device, self.dtype, self.row_format)

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        if self.max_batch_items > self.max_queued_images:
            raise ValueError(
                f"max_batch_items={self.max_batch_items} images in one call can never fit into "
                f"max_queued_images={self.max_queued_images}"
            )
        if self.redis_url is None and not self.local_cache_bytes:
            raise ValueError("without redis_url rows live in this process only, so local_cache_bytes must not be 0")
        return self
