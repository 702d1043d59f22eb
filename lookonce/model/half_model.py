"""Loads one half of a Hugging Face vision-language checkpoint: vision tower and projector, or the language model.

A subclass of the architecture's class replaces the unwanted half with empty modules and declares its keys ignorable.
`from_pretrained` then reads only the wanted tensors and still handles legacy keys, sharding and weight tying. Needs
torch, so only the services import this module.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import pathlib
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from lookonce.errors import ModelFolderError
from lookonce.model.empty_weights import without_meta_device
from lookonce.model.faults.build_faults import built_fault
from lookonce.model.faults.weight_faults import is_merge_fault, merge_fault, report_fault
from lookonce.model.lack_of_memory import is_lack_of_memory
from lookonce.model.libraries.rust_panics import RustPanicError, call_rust
from lookonce.model.model_folder import CONFIGURATION_FAULTS, read_json_object, weight_files
from lookonce.model.quantized_folder.quantized_tensors import QuantizedTensors
from lookonce.model.quantized_folder.replacement import replace_by_stored, restore_layers, without_quantization
from lookonce.model.safetensors_header import read_header
from lookonce.model.structure.chosen_experts import choose_experts
from lookonce.model.structure.fixed_embeddings import embedders, fix_embeddings
from lookonce.model.structure.inner_model import inner_model, with_inner_model
from lookonce.model.structure.latent_attention import absorb_latents
from lookonce.model.structure.query_temperature import tune_by_position

_TEXT_CHILDREN = ("language_model", "text_model")
# Encoders of inputs that are not served.
_UNSERVED_CHILDREN = ("audio_tower", "embed_audio")
# Modules of transformers that log while a model is loaded.
_REPORTING = ("modeling_utils", "models.timm_wrapper.modeling_timm_wrapper")
# transformers' own attention, which gets every head's keys and values.
_OWN_ATTENTION = frozenset({"eager", "sdpa"})
# Scales of keys and values, which stay in the model's type.
_CACHE_SCALES = r"\.[kv]_scale$"


class Half(enum.Enum):
    """The two halves of a checkpoint."""

    VISION = "vision"
    TEXT = "text"


def load_vision_half(folder: pathlib.Path, dtype: torch.dtype | None) -> Any:
    """Loads the model with vision tower and projector only; `get_image_features` works.

    Attention is SDPA, or the tower's own where the tower has no SDPA. `dtype` None means the checkpoint's. Raises
    ModelFolderError if a wanted tensor is missing or has another shape.
    """
    return _load(folder, Half.VISION, dtype, {"vision_config": None})


def load_text_half(folder: pathlib.Path, dtype: torch.dtype | None, attention: str, *, keep_codes: bool = False) -> Any:
    """Loads the model with language model and head only; `attention` is a name registered with transformers.

    Modules that embed tokens beside the language model become FixedEmbeddings. Unless `attention` is one of
    transformers' own, latent attention gets its absorbed form, and temperature tuning the positions of tokens.
    `dtype` None means the checkpoint's. With `keep_codes`, linear layers that are stored quantized become
    QuantizedLinear; otherwise they get whole weights. Raises ModelFolderError if a wanted tensor is missing or has
    another shape.
    """
    model = _load(folder, Half.TEXT, dtype, {"text_config": attention, "vision_config": "eager"}, keep_codes)
    if attention not in _OWN_ATTENTION:
        text_model = getattr(model.model, text_child(model))
        absorb_latents(text_model)
        tune_by_position(text_model)
        # Modules that were put in now are in training mode.
        model.eval()
    return model


def detach_from_file(model: Any) -> None:
    """Copies the tensors that a model still holds in its mapped weight file, so that the file can be unmapped.

    Call it after the large weights have been copied elsewhere. A single tensor in the file keeps all of it mapped, and
    the pages that were read stay in memory.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def half_class(base: Any, half: Half, quantized: QuantizedTensors | None = None) -> Any:
    """Returns a subclass of an architecture's `…ForConditionalGeneration` that holds one half.

    It keeps the base class's name, because transformers renames legacy keys by class name and model type. Layers that
    are `quantized` in the folder are StoredLinear.
    """
    # The class lives as long as the model, and must not keep files mapped: the first instance takes the tensors.
    stored = [] if quantized is None else [quantized]

    def __init__(self: Any, config: Any) -> None:
        base.__init__(self, config)
        dropped = _dropped_modules(self, half)
        for parent, name in dropped:
            setattr(parent, name, torch.nn.Module())
        if half is Half.VISION:
            # Nothing is left to be tied: the language model and its head are gone.
            self.all_tied_weights_keys = {}
        choose_experts(self)
        prefixes = {("" if parent is self else "model.") + name for parent, name in dropped}
        # With those that models inside ignore, such as layers that predict further tokens.
        ignored = set(self._keys_to_ignore_on_load_unexpected or ())
        self._keys_to_ignore_on_load_unexpected = ignored | {rf"^{re.escape(prefix)}\." for prefix in prefixes}
        if stored:
            left_out = replace_by_stored(self, stored.pop())
            self._keys_to_ignore_on_load_unexpected |= {_CACHE_SCALES, *left_out}

    def get_init_context(_: Any, *arguments: Any, **keywords: Any) -> list[Any]:
        return without_meta_device(base.get_init_context(*arguments, **keywords))

    attributes: dict[str, Any] = {
        "__init__": __init__,
        "__module__": base.__module__,
        "get_init_context": classmethod(get_init_context),
    }
    return type(base.__name__, (base,), attributes)


def text_child(model: Any) -> str:
    """Returns the attribute name of the language model inside the inner model."""
    inner = inner_model(model)
    for name in _TEXT_CHILDREN:
        if hasattr(inner, name):
            return name
    raise ModelFolderError(f"{type(model).__name__} has no separate language model, so it cannot be split into halves")


def _dropped_modules(model: Any, half: Half) -> list[tuple[Any, str]]:
    text, inner = text_child(model), inner_model(model)
    if half is Half.VISION:
        unserved = [(inner, name) for name in _UNSERVED_CHILDREN if hasattr(inner, name)]
        return [(inner, text), (model, "lm_head"), *unserved]
    kept = {text, *embedders(model.config)}
    return [(inner, name) for name, _ in inner.named_children() if name not in kept]


def _refuse_integers(files: Sequence[pathlib.Path], quantized_layers: Collection[str]) -> None:
    """Raises ModelFolderError for weights of integers in layers that are not quantized, which would become floats."""
    for file in files:
        for name, tensor in read_header(file).items():
            layer, _, part = name.rpartition(".")
            if part in ("weight", "bias") and tensor.dtype.startswith(("I", "U")) and layer not in quantized_layers:
                raise ModelFolderError(
                    f"{file.name}: {name} has elements of the type {tensor.dtype}, and config.json does not say how it "
                    "is quantized; download the model again"
                )


@contextlib.contextmanager
def _without_load_report() -> Iterator[None]:
    """Keeps transformers from logging a table of problems, which are raised as one error here.

    A tower of timm would also be reported for keeping its own attention, even where the half has no tower.
    """
    loggers = [logging.getLogger(f"transformers.{name}") for name in _REPORTING]

    # A level of its own would make transformers check, and report, how the model could be divided among devices.
    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    for logger in loggers:
        logger.addFilter(is_error)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_error)


def _load(
    folder: pathlib.Path,
    half: Half,
    dtype: torch.dtype | None,
    attention: dict[str, str | None],
    keep_codes: bool = False,
) -> Any:
    config = without_quantization(transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False))
    files = weight_files(folder)
    quantized = QuantizedTensors.of(read_json_object(folder / "config.json"), files)
    _refuse_integers(files, () if quantized is None else quantized.layers)
    base = getattr(transformers, config.architectures[0], None)
    if base is None:
        raise ModelFolderError(f"transformers does not know the architecture {config.architectures[0]}")
    try:
        with _without_load_report():
            model, report = call_rust(
                half_class(base, half, quantized).from_pretrained,
                folder,
                config=config,
                dtype="auto" if dtype is None else dtype,
                attn_implementation=attention,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                # Mismatches are reported with their names below.
                ignore_mismatched_sizes=True,
            )
    except ModelFolderError:
        raise
    except (RustPanicError, SafetensorError) as error:
        raise ModelFolderError(f"the weights of {folder.name} cannot be read; download them again") from error
    except (MemoryError, *CONFIGURATION_FAULTS) as error:
        if is_lack_of_memory(error):
            num_gb = sum(file.stat().st_size for file in files) / 1e9
            raise ModelFolderError(
                f"there is no memory for the {half.value} half with the sizes in config.json (all weights are "
                f"{num_gb:,.1f} GB); use a machine with more memory, or the config.json that belongs to the weights"
            ) from error
        raise merge_fault(half.value, files) if is_merge_fault(error) else built_fault(half.value, error) from error
    scales = sorted(key for key in report["unexpected_keys"] if key.endswith(("_scale", "_scale_inv")))
    if quantized is not None and scales:
        raise ModelFolderError(
            f"the quantized weight of {scales[0]} is not served: it belongs to no linear layer, but to a tensor with "
            "several, such as all experts; use the unquantized model"
        )
    if (wrong := report_fault(half.value, model, report, files)) is not None:
        raise ModelFolderError(wrong)
    if half is Half.TEXT:
        for name in embedders(config):
            # Each is used once, here, on the host.
            restore_layers(getattr(model.model, name), keep_codes=False)
        fix_embeddings(model)
    restore_layers(model, keep_codes=keep_codes)
    model = with_inner_model(model, None if half is Half.VISION else text_child(model))
    return model.eval().requires_grad_(False)
