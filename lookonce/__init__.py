"""Lookonce: an image is looked at once.

The public names are loaded on first use, so that importing a module of this package does not import gRPC. Errors are in
`lookonce.errors`, a server for tests in `lookonce.testing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = [
    "AdminClient",
    "AsyncAdminClient",
    "AsyncClient",
    "AsyncTextStream",
    "Choice",
    "Client",
    "DecoderLoad",
    "Delta",
    "Encoding",
    "GenerateOptions",
    "Generation",
    "ImageFetcher",
    "ImageRef",
    "LookonceError",
    "Message",
    "ModelInfo",
    "PromptEmbedding",
    "RequestOptions",
    "Score",
    "Scoring",
    "TextPrompt",
    "TextStream",
    "TokenPrompt",
    "TokenizedPrompt",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "Video",
    "__version__",
]

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lookonce.admin.aio import AsyncAdminClient
    from lookonce.admin.client import AdminClient
    from lookonce.aio import AsyncClient, AsyncTextStream
    from lookonce.client import Client, TextStream
    from lookonce.decoder_info import DecoderLoad, ModelInfo, TokenizedPrompt
    from lookonce.errors import LookonceError
    from lookonce.generation import (
        Choice,
        Delta,
        GenerateOptions,
        Generation,
        Message,
        PromptEmbedding,
        RequestOptions,
        Score,
        Scoring,
        TextPrompt,
        TokenPrompt,
        Tool,
        ToolCall,
        ToolCallDelta,
        Usage,
    )
    from lookonce.images import Encoding, ImageRef
    from lookonce.sdk.image_fetcher import ImageFetcher
    from lookonce.videos import Video
else:
    import importlib

    _MODULES = {
        "AdminClient": "admin.client",
        "AsyncAdminClient": "admin.aio",
        "AsyncClient": "aio",
        "AsyncTextStream": "aio",
        "Choice": "generation",
        "Client": "client",
        "DecoderLoad": "decoder_info",
        "Delta": "generation",
        "Encoding": "images",
        "GenerateOptions": "generation",
        "Generation": "generation",
        "ImageFetcher": "sdk.image_fetcher",
        "ImageRef": "images",
        "LookonceError": "errors",
        "Message": "generation",
        "ModelInfo": "decoder_info",
        "PromptEmbedding": "generation",
        "RequestOptions": "generation",
        "Score": "generation",
        "Scoring": "generation",
        "TextPrompt": "generation",
        "TextStream": "client",
        "TokenPrompt": "generation",
        "TokenizedPrompt": "decoder_info",
        "Tool": "generation",
        "ToolCall": "generation",
        "ToolCallDelta": "generation",
        "Usage": "generation",
        "Video": "videos",
    }

    # Hidden from type checkers, for which any name would exist.
    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module 'lookonce' has no attribute {name!r}")
        return getattr(importlib.import_module(f"lookonce.{_MODULES[name]}"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULES})
