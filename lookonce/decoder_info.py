"""The SDK's descriptions of a decoder: its model, its load, and a prompt as its tokens. Plain data, no protobuf."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A decoder's model and limits, which stay the same while it runs."""

    # Served name of the model.
    model: str
    # Model type of Hugging Face, for example "llava" or "qwen2_vl".
    model_type: str
    # Version of the server.
    version: str
    # Fingerprint of the encoder whose rows fit this decoder.
    encoder_fingerprint: str
    # gRPC target of the encoder, empty if the decoder announces none.
    encoder_target: str
    # Text that stands for one image in a TextPrompt, for example "<image>".
    image_placeholder: str
    vocab_size: int
    # Largest number of prompt and generated tokens of a request.
    max_context_tokens: int
    # Largest numbers of images and of video frames in one prompt; 0 frames: no videos.
    max_images_per_prompt: int
    max_video_frames: int
    # Rows, that is prompt tokens, of the largest possible image.
    max_rows_per_image: int
    # Largest gRPC message that the server accepts, bytes.
    max_message_bytes: int
    # Whether an image has other rows in a prompt with several images (LLaVA-OneVision).
    rows_depend_on_image_count: bool
    # Largest numbers of tokens in one step and of requests in the running batch.
    max_batched_tokens: int
    max_running_requests: int
    # Rows that encoders compute for one step at most, and rows that fit on the device.
    encoder_compute_budget_rows: int
    encoder_cache_size_rows: int
    # Number of KV blocks, and tokens in each.
    num_kv_blocks: int
    block_size: int
    # Name of the form in which the model writes calls of functions; empty: its chat template knows none.
    tool_format: str = ""
    # Names that `template_arguments` may have.
    template_arguments: tuple[str, ...] = ()
    # Names that `adapter` may have.
    adapters: tuple[str, ...] = ()
    # Video frames in an entry of the encoder cache: 2 for models that encode pairs, 1 for those that encode single
    # frames; 0: no videos, or a server before 2026-11-29, which has pairs if it takes videos.
    frames_per_entry: int = 0


@dataclass(frozen=True, slots=True)
class DecoderLoad:
    """The load of the replica that answered, at the time of the call."""

    # Requests in the running batch, those that wait for admission, and those of them that wait for rows.
    running_requests: int
    waiting_requests: int
    waiting_for_embeddings: int
    # Share of KV blocks in use, 0 to 1.
    kv_cache_usage: float
    # Embedding rows on the device.
    encoder_cache_rows: int


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """The tokens of one image, or of one entry of video frames, in a prompt."""

    # Index of the first token, and the number of tokens.
    offset: int
    length: int
    # SHA-256 of the image's file, or of the pair's two files.
    digest: bytes


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as the model reads it."""

    # Token ids, with one id for each row of an image.
    token_ids: tuple[int, ...]
    # Images in the order of the prompt.
    images: tuple[ImageSpan, ...]
