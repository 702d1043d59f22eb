"""Settings of the decoder service."""

from __future__ import annotations

import pathlib
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from lookonce.errors import ConfigurationError
from lookonce.model.adapter_folder import named_folders
from lookonce.sdk.connection.target import checked_target
from lookonce.server.settings import EnvironmentSettings, ServiceSettings, check_address


class DecoderSettings(ServiceSettings):
    """The decoder service: takes prompts with images, and generates tokens."""

    encoder_target: str | None = Field(
        None, description="gRPC target of the encoder, for example dns:///encoder:50051. Unset: text prompts only."
    )
    encoder_tls_ca: pathlib.Path | None = Field(
        None, description="PEM certificates of the authorities that sign encoders' certificates. Unset: plaintext."
    )
    encoder_tls_cert: pathlib.Path | None = Field(
        None, description="PEM certificate chain that this decoder shows to encoders."
    )
    encoder_tls_key: pathlib.Path | None = Field(None, description="PEM private key of encoder_tls_cert.")
    encoder_token_file: pathlib.Path | None = Field(
        None,
        description="File with the bearer token that this decoder sends to encoders, of role service. Read again when "
        "it changes.",
    )

    adapters: str = Field(
        "",
        description="LoRA adapters of the language model that requests may name, as NAME=FOLDER, separated by commas. "
        "The folders are those that PEFT saves.",
    )

    adapters_folder: pathlib.Path | None = Field(
        None,
        description="Folder whose subfolders operators may load as LoRA adapters while the decoder runs, by the call "
        "LoadAdapter on admin_listen.",
    )

    block_size: int | None = Field(
        None, ge=1, le=1024, description="Tokens per KV block. Default: the device's; 16 on CPUs and CUDA devices."
    )
    num_kv_blocks: int | None = Field(
        None,
        ge=2,
        le=1 << 40,
        description="KV blocks of the layers with full attention; overrides kv_cache_memory_bytes.",
    )
    kv_cache_memory_bytes: int | None = Field(
        None, ge=1 << 16, le=1 << 60, description="Memory of the KV pool, bytes. Default: set by kv_cache_memory_share."
    )
    kv_cache_memory_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description=(
            "Share of the memory left by the heaviest step that the KV pool takes, but no more than max_num_seqs "
            "requests of max_context_tokens can fill. Raise it if the decoder has a machine or container of its own. "
            "Default: the device's; 0.5 on CPUs and CUDA devices."
        ),
    )
    kv_cache_dtype: Literal["auto", "int8"] = Field(
        "auto",
        description="int8: keys and values are rounded to 8 bits in the KV cache, with a scale for each head and "
        "token: 1.9 times as many tokens fit in it as in bfloat16, and answers change a little. auto: they have the "
        "model's type.",
    )
    max_context_tokens: int | None = Field(
        None, ge=2, description="Longest prompt plus completion, tokens. Default: the model's limit."
    )

    max_num_batched_tokens: int = Field(2048, ge=1, le=1 << 24, description="Most tokens computed in one engine step.")
    max_step_s: float = Field(
        300.0, gt=0, description="Duration of an engine step from which health says NOT_SERVING, seconds."
    )
    max_num_seqs: int = Field(64, ge=1, le=1 << 20, description="Most requests in the running batch.")
    max_waiting_requests: int = Field(1024, ge=1, description="Most requests in the queue; further ones are refused.")
    max_images_per_prompt: int = Field(16, ge=0, description="Most images in one prompt.")
    max_video_frames_per_prompt: int = Field(
        128, ge=0, description="Most frames of all videos in one prompt. 0: no videos."
    )
    encoder_cache_rows: int | None = Field(
        None,
        ge=1,
        description="Embedding rows held on the device. Default: computed from the batch and the largest image.",
    )
    overlap_encode: bool = Field(
        True,
        description="Compute a prompt up to its first image that has not arrived. Off, for measurements: wait until "
        "all requested images have arrived.",
    )
    graphs: bool = Field(
        True,
        description="Record steps of up to 2,048 tokens as graphs at start-up, on devices with graphs (CUDA). Off: "
        "slower steps, less memory, a faster start.",
    )
    quantize: Literal["none", "int8", "int4"] = Field(
        "none",
        description="Rounds the weights of the language model's linear layers while loading, in groups of 128 inputs: "
        "less memory, and on CPUs faster answers where few requests run. int8 changes answers little, int4 "
        "noticeably. The output head gets 8 bits in either case; the embedding table stays as it is.",
    )
    engine: Literal["auto", "thread", "process"] = Field(
        "auto",
        description="Where steps run: in a thread of the service, or in a process of their own, so that gRPC and text "
        "never take the interpreter of the steps. A process costs the memory of a second interpreter with its "
        "libraries. auto: the device's choice, a thread on CPUs and a process with CUDA.",
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="Processes over which the language model is split, each with its part of the weights and of the KV "
        "cache. kv_cache_memory_bytes and num_threads are those of each. On CUDA devices, each needs a GPU of its own, "
        "and steps are not recorded as graphs.",
    )
    rank_listen: str | None = Field(
        None,
        description="host:port at which the decoder waits for the other ranks of a split model, which run on machines "
        "of their own (`lookonce serve rank`). What they exchange is not encrypted: use a private network. Unset: all "
        "ranks are processes of this machine.",
    )
    rank_key_file: pathlib.Path | None = Field(
        None,
        description="File with a key of 64 hex characters, the same for the decoder and its ranks, by which they "
        "recognise each other.",
    )
    prefix_cache: bool = Field(True, description="Share the KV blocks of equal prompt prefixes between requests.")

    speculative_tokens: int = Field(
        0,
        ge=0,
        le=64,
        description="Speculative decoding by prompt lookup: draft tokens per request and step, copied from where its "
        "last tokens occurred before. The answer stays the same. 0: off. Pays if answers repeat and few requests run.",
    )
    speculative_ngram_max: int = Field(4, ge=1, le=32, description="Most last tokens that prompt lookup searches for.")
    speculative_ngram_min: int = Field(
        2, ge=1, le=32, description="Fewest last tokens that prompt lookup must find for a draft."
    )

    default_timeout_s: float = Field(
        600.0,
        ge=0,
        description="Deadline of a Generate, GenerateStream, Score or Embed call that sets none, seconds after its "
        "arrival. A call's own deadline counts instead, however long. 0: no default; such a call may take any time.",
    )
    default_max_tokens: int = Field(
        256, ge=1, description="max_tokens of a request that does not set it, reduced to the room left in the context."
    )
    max_stop_strings: int = Field(16, ge=0, description="Most stop strings in a request.")
    max_logprobs: int = Field(
        20, ge=0, description="Most alternatives per token in the log probabilities that a request asks for."
    )

    @field_validator("encoder_target")
    @classmethod
    def _check_target(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if not value.strip():
            raise ValueError("is empty; name the encoder's address, or leave the setting out: text prompts only")
        try:
            return checked_target(value)
        except ConfigurationError as error:
            raise ValueError(error.message) from None

    @field_validator("rank_listen")
    @classmethod
    def _check_rank_listen(cls, value: str | None) -> str | None:
        return None if value is None else check_address(value)

    @field_validator("adapters_folder")
    @classmethod
    def _check_folder(cls, value: pathlib.Path | None) -> pathlib.Path | None:
        if value is not None and not value.is_dir():
            raise ValueError(f"{value} is no folder")
        return value

    @model_validator(mode="after")
    def _check_adapters(self) -> Self:
        try:
            names = named_folders(self.adapters)
        except ConfigurationError as error:
            raise ValueError(f"adapters: {error.message}") from None
        if self.model_name in names:
            raise ValueError(f"adapters: {self.model_name} is the name of the base model; name the adapter otherwise")
        if self.adapters_folder is not None and self.admin_listen is None:
            raise ValueError("adapters_folder is for the calls on admin_listen; set that as well")
        return self

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        if (self.rank_listen is None) != (self.rank_key_file is None):
            raise ValueError("rank_listen and rank_key_file belong together; set both or neither")
        if self.rank_listen is not None and self.tensor_parallel_size == 1:
            raise ValueError("rank_listen is for the ranks of a split model; set tensor_parallel_size as well")
        return self

    @model_validator(mode="after")
    def _check_encoder(self) -> Self:
        if self.encoder_target is None:
            for name in ("encoder_tls_ca", "encoder_tls_cert", "encoder_tls_key", "encoder_token_file"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is for calls to encoders; set encoder_target as well")
        if (self.encoder_tls_cert is None) != (self.encoder_tls_key is None):
            raise ValueError("encoder_tls_cert and encoder_tls_key belong together; set both or neither")
        if self.encoder_tls_cert is not None and self.encoder_tls_ca is None:
            raise ValueError("encoder_tls_cert needs encoder_tls_ca; without it, calls to encoders are plaintext")
        return self

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        if self.speculative_ngram_min > self.speculative_ngram_max:
            raise ValueError(
                f"speculative_ngram_min={self.speculative_ngram_min} is more than "
                f"speculative_ngram_max={self.speculative_ngram_max}"
            )
        if self.deterministic and self.speculative_tokens:
            raise ValueError(
                "deterministic and speculative_tokens exclude each other: tokens would be computed beside draft tokens"
            )
        return self

    @model_validator(mode="after")
    def _check_requests(self) -> Self:
        if self.max_video_frames_per_prompt == 1:
            raise ValueError("max_video_frames_per_prompt=1 admits no video, which has at least 2 frames; 0: no videos")
        if (
            self.are_given("default_timeout_s", "max_connection_age_grace_s")
            and self.default_timeout_s > self.max_connection_age_grace_s
        ):
            raise ValueError(
                f"default_timeout_s={self.default_timeout_s:g} is longer than "
                f"max_connection_age_grace_s={self.max_connection_age_grace_s:g}, after which the connection of a call "
                "may be cut; lower the former or raise the latter"
            )
        return self


class RankSettings(EnvironmentSettings):
    """A rank of a split model on a machine of its own: computes what the decoder tells it."""

    model: pathlib.Path = Field(description="Folder of the decoder's model on this machine.")
    leader: str = Field(
        description="host:port of the decoder's rank_listen. The rank waits until the decoder is there."
    )
    rank_key_file: pathlib.Path = Field(description="File with the key, the same as the decoder's.")
    num_threads: int | None = Field(
        None, ge=1, le=1024, description="Threads for tensor work. Default: one per CPU of this process."
    )
    log_format: Literal["json", "console"] = Field(
        "json", description="json: one JSON object per line. console: for people."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Lowest level to log.")

    @field_validator("leader")
    @classmethod
    def _check_leader(cls, value: str) -> str:
        if check_address(value).endswith(":0"):
            raise ValueError("must name the decoder's port, which is not 0")
        return value
