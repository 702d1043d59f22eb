"""Computes an encoder's fingerprint: a hash of everything that determines an image's rows. Needs torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lookonce.content_key import EncoderFingerprint, ProcessorOptions, encoder_fingerprint
from lookonce.embedding_meta import RowDtype
from lookonce.model.family_model import FamilyModel, processor_backend
from lookonce.model.model_folder import ModelFolder

# Version of the code that makes pixels of files. Raise it when any accepted file gets other pixels: cached rows of the
# older version are then no longer found. 2: greyscale of 16 bits is scaled, and truncated files are refused. 3: a GIF
# is white around its first frame.
_PIXELS_VERSION = 3
# Configuration keys that do not influence rows.
_UNRELATED_KEYS = frozenset({"text_config", "_name_or_path", "transformers_version", "dtype", "torch_dtype"})


def vision_fingerprint(
    folder: ModelFolder, model: Any, family: FamilyModel, row_dtype: RowDtype | None = None
) -> EncoderFingerprint:
    """Hashes the weights, the configuration without the language model's part, the image processor and both dtypes.

    The family's arguments for processor and model are included, so that changing them changes the cache keys. `model`
    is the vision half. `row_dtype` None means that rows are stored in the model's dtype. Reads every weight once.
    """
    processor = family.source.processor
    dtype = dtype_name(model)
    configuration = _canonical_json(_related(model.config.to_dict()))
    settings = {
        "class": type(processor).__name__,
        "backend": processor_backend(processor),
        "settings": _related(json.loads(processor.to_json_string())),
        "arguments": dict(family.data.processor_arguments(family.source, ProcessorOptions())),
        "inputs": family.data.inputs,
        "pixels": _PIXELS_VERSION,
    }
    # Add entries only if the family needs them, so that the keys of other families stay as they are.
    if text_settings := dict(family.data.text_settings(model.config)):
        settings["text"] = text_settings
    if family.video is not None:
        settings["frames"] = dict(family.video.pixels)
    return encoder_fingerprint(
        architecture=f"{folder.architecture} {configuration}",
        tensors=iter_vision_tensors(model),
        processor_config=_canonical_json(settings).encode(),
        dtype=dtype if row_dtype is None or row_dtype.value == dtype else f"{dtype} as {row_dtype.value}",
    )


def iter_vision_tensors(model: Any) -> Iterator[tuple[str, memoryview]]:
    """Yields (name, raw bytes) of every stored parameter and buffer of the vision half, sorted by name."""
    for name, tensor in sorted(model.state_dict().items()):
        yield name, raw_bytes(tensor.contiguous())


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous CPU tensor (little-endian), without a copy."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def dtype_name(model: Any) -> str:
    """Returns the element type of a model's weights, for example `bfloat16`."""
    return str(model.dtype).removeprefix("torch.")


def _related(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration without the keys that cannot change rows, at every depth."""
    return {
        key: _related(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in _UNRELATED_KEYS
    }


def _canonical_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
