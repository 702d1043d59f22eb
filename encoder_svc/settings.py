"""Settings of the encoder service."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from encoder_svc.vision.vision_config import VisionConfig
from lookonce.process.process_clock import TimeLimits
from lookonce.server.settings import MIB, ServiceSettings

# Default of decode_wall_timeout_s, as a multiple of decode_timeout_s.
_WALL_RATIO = 6.0


class EncoderSettings(ServiceSettings):
    """The vision-encoder service: image bytes in, embedding rows in the shared cache."""

    row_format: Literal["native", "int8"] = Field(
        "native",
        description="Element type of stored rows: as the model gives them, or int8 with a scale per row, which halves "
        "memory and traffic of bfloat16 at a relative error of about 0.9 %. Each has its own encoder fingerprint, so "
        "they never mix; decoders follow without a setting.",
    )
    max_batch_items: int = Field(64, ge=1, description="Maximum number of images in one Encode call.")
    max_forward_images: int = Field(8, ge=1, description="Maximum number of images in one forward pass.")
    max_forward_bytes: int | None = Field(
        None,
        ge=1,
        description="Maximum size of the pixels in one forward pass, bytes; a larger image gets a pass of its own. "
        "Default: the device's; 256 MiB on CUDA devices, and 2 MiB on CPUs, where larger passes are not faster and "
        "delay every image in them.",
    )
    max_forward_s: float = Field(
        300.0,
        gt=0,
        description="Duration of a forward pass beyond which the health check says NOT_SERVING, seconds.",
    )
    max_queued_images: int = Field(
        256,
        ge=1,
        description="Maximum number of images that wait for preprocessing or a forward pass; more are refused. Tenants "
        "share these places: when all are taken, a tenant gets one from the tenant with the most, whose newest waiting "
        "image is refused.",
    )
    max_prepared_bytes: int = Field(
        1024 * MIB,
        ge=1,
        description="Memory budget of preprocessed images that wait for a forward pass, bytes. While it is used up, "
        "images wait as files. As many images as there are preprocess_workers may exceed it.",
    )
    preprocess_workers: int = Field(
        2, ge=1, description="Number of threads that preprocess images; each has a process that decodes them."
    )
    decode_timeout_s: float = Field(
        10.0,
        gt=0,
        description="Maximum processor time to decode one image, seconds. An image that needs more is refused, and the "
        "decoding process is killed.",
    )
    decode_wall_timeout_s: float | None = Field(
        None,
        gt=0,
        description="Maximum time on the clock to decode one image, seconds; at least decode_timeout_s. After it the "
        "decoding process, which got too little processor time, is killed, and the caller is asked to try again. "
        "Default: six times decode_timeout_s.",
    )
    max_image_aspect: float = Field(
        200.0, ge=1, le=200, description="Maximum ratio of an image's longer to its shorter side."
    )
    encode_lease_s: float = Field(
        5.0,
        gt=0,
        le=300,
        description="Time to live of the lease that lets one replica encode an image, seconds; the holder renews it. "
        "When a replica dies, its images wait this long. While a replica renews its lease, others wait at most eight "
        "times as long.",
    )
    local_cache_bytes: int = Field(
        256 * MIB, ge=0, description="Size of the cache in this process, for ReadEmbedding and for hot images, bytes."
    )
    max_entry_bytes: int = Field(
        128 * MIB,
        ge=4096,
        description="Maximum size of an embedding in the shared cache, bytes; larger ones are not stored.",
    )

    @property
    def vision(self) -> VisionConfig:
        """The part of the settings that the vision model is loaded with."""
        return VisionConfig(self.model, self.device, self.dtype, self.row_format)

    @property
    def decode_time_limits(self) -> TimeLimits:
        """The limits on the decoding of one image."""
        return TimeLimits(self.decode_timeout_s, self.decode_wall_timeout_s or _WALL_RATIO * self.decode_timeout_s)

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        if self.max_batch_items > self.max_queued_images:
            raise ValueError(
                f"max_batch_items={self.max_batch_items} images in one call can never fit into "
                f"max_queued_images={self.max_queued_images}"
            )
        if self.decode_wall_timeout_s is not None and self.decode_wall_timeout_s < self.decode_timeout_s:
            raise ValueError(
                f"decode_wall_timeout_s={self.decode_wall_timeout_s:g} must be at least "
                f"decode_timeout_s={self.decode_timeout_s:g}"
            )
        if self.redis_url is not None and self.encode_lease_s < self.redis_budget_s:
            raise ValueError(
                f"encode_lease_s={self.encode_lease_s:g} must be at least redis_budget_s={self.redis_budget_s:g}, or a "
                "lease may end while its renewal is on the way"
            )
        if self.redis_url is None and not self.local_cache_bytes:
            raise ValueError("without redis_url rows live in this process only, so local_cache_bytes must not be 0")
        return self
