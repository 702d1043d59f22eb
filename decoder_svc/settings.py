"""Settings of the decoder service."""

from __future__ import annotations

import pathlib

from pydantic import Field

from lookonce.server.settings import ServiceSettings


class DecoderSettings(ServiceSettings):
    """The decoder service: a prompt and image references in, tokens out."""

    encoder_target: str | None = Field(
        None, description="gRPC target of the encoder, e.g. dns:///encoder:50051. Unset: text only."
    )
    encoder_tls_ca: pathlib.Path | None = Field(
        None, description="PEM certificates of the authorities that sign encoders' certificates. Unset: plaintext."
    )
    encoder_tls_cert: pathlib.Path | None = Field(
        None, description="PEM certificate chain that this decoder shows to encoders which ask for one."
    )
    encoder_tls_key: pathlib.Path | None = Field(None, description="PEM private key of it.")
    encoder_token_file: pathlib.Path | None = Field(
        None,
        description="File with the bearer token that this decoder sends to encoders, of role service; read again when "
        "it changes.",
    )

    block_size: int = Field(16, ge=1, le=1024, description="Tokens per KV block.")
    num_kv_blocks: int | None = Field(
        None,
        ge=2,
        description="KV blocks of the layers that see the whole context; overrides kv_cache_memory_bytes.",
    )
    kv_cache_memory_bytes: int | None = Field(
        None, ge=1 << 16, description="Memory of the KV pool, bytes. Default: by kv_cache_memory_share."
    )
    kv_cache_memory_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description=(
            "Share of the memory left beside the heaviest step that the KV pool takes, at most what max_num_seqs "
            "requests of max_context_tokens fill. Raise it where the decoder has a machine or container of its own."
        ),
    )
    max_context_tokens: int | None = Field(
        None, ge=2, description="Longest prompt plus completion. Default: what the model was built for."
    )

    max_num_batched_tokens: int = Field(2048, ge=1, description="Tokens computed in one engine step.")
    max_step_s: float = Field(
        300.0, gt=0, description="An engine step that takes longer makes health say NOT_SERVING, seconds."
    )
    max_num_seqs: int = Field(64, ge=1, description="Requests in the running batch.")
    max_waiting_requests: int = Field(1024, ge=1, description="Queue length; beyond it requests are refused.")
    max_images_per_prompt: int = Field(16, ge=0, description="Most images in one prompt.")
    max_video_frames_per_prompt: int = Field(
        128, ge=0, description="Most frames of all videos in one prompt; 0: no videos."
    )
    encoder_cache_rows: int | None = Field(
        None,
        ge=1,
        description="Embedding rows held by the decoder. Default: computed from the batch and the largest image.",
    )
    overlap_encode: bool = Field(
        True,
        description="Compute a prompt up to its first image that is not encoded yet. Off: wait until all that were "
        "asked for have arrived; for measurements.",
    )
    graphs: bool = Field(
        True,
        description="Record steps of single tokens as graphs at start-up, on devices that have graphs (CUDA). Off: "
        "slower steps, less memory, a faster start.",
    )
    prefix_cache: bool = Field(True, description="Share the KV blocks of equal prompt beginnings between requests.")

    speculative_tokens: int = Field(
        0,
        ge=0,
        le=64,
        description="Tokens guessed per request and step where its last ones occurred in its prompt or answer before "
        "(prompt lookup); the answer stays the same. 0: off. Pays where answers repeat and few requests run.",
    )
    speculative_ngram_max: int = Field(4, ge=1, le=32, description="Most last tokens that are looked up for a guess.")
    speculative_ngram_min: int = Field(
        2, ge=1, le=32, description="Fewest last tokens that must have occurred before for a guess."
    )

    default_max_tokens: int = Field(256, ge=1, description="max_tokens of a request that does not say.")
    max_stop_strings: int = Field(16, ge=0, description="Most stop strings of a request.")
    max_logprobs: int = Field(20, ge=0, description="Most alternatives per token that a request may ask for.")
