"""Settings of the encoder service."""

from __future__ import annotations

from pydantic import Field

from lookonce.settings import MIB, ServiceSettings


class EncoderSettings(ServiceSettings):
    """The vision-encoder service: image bytes in, embedding rows in the shared cache."""

    max_batch_items: int = Field(64, ge=1, description="Most images in one Encode call.")
    max_forward_images: int = Field(8, ge=1, description="Most images in one forward pass.")
    max_queued_images: int = Field(256, ge=1, description="Images waiting for preprocessing or a forward pass.")
    preprocess_workers: int = Field(2, ge=1, description="Threads that decode and preprocess images.")
    max_image_aspect: float = Field(200.0, ge=1, description="Largest ratio of an image's longer to its shorter side.")
    local_cache_bytes: int = Field(
        256 * MIB, ge=0, description="Rows kept in this process for ReadEmbedding and hot images."
    )
    max_entry_bytes: int = Field(
        128 * MIB, ge=4096, description="Largest embedding that is written to the shared cache."
    )
