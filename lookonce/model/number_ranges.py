"""Ranges of the numbers in config.json and of an image processor. Pure Python; reads no weights.

Both services and `lookonce doctor` check them before anything is built: with some of these numbers transformers or
torch would take all memory, run for hours, or compute NaN. What numbers mean together is checked elsewhere.
"""

from __future__ import annotations

import math
import pathlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lookonce.errors import ModelFolderError

_CONFIG_FILE = "config.json"
# Sizes in config.json and its parts, and their largest values: far above those of any model, and small enough that a
# product of two can be computed and refused.
_LARGEST_SIZE, _MOST_LAYERS, _MOST_LABELS = 1 << 24, 4096, 1 << 16
_SIZES = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size", "head_dim", "embed_dim"), _LARGEST_SIZE),
    **dict.fromkeys(
        ("num_attention_heads", "num_key_value_heads", "num_heads", "num_sliding_attention_heads"), _LARGEST_SIZE
    ),
    **dict.fromkeys(("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"), _LARGEST_SIZE),
    **dict.fromkeys(("global_head_dim", "num_global_key_value_heads", "vocab_size_per_layer_input"), _LARGEST_SIZE),
    **dict.fromkeys(
        ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), _LARGEST_SIZE
    ),
    **dict.fromkeys(("image_size", "patch_size", "max_position_embeddings", "position_embedding_size"), _LARGEST_SIZE),
    # Rows of an image.
    **dict.fromkeys(("image_seq_length", "mm_tokens_per_image", "vision_soft_tokens_per_image"), 1 << 16),
    **dict.fromkeys(("num_channels", "in_channels", "spatial_merge_size", "temporal_patch_size"), _LARGEST_SIZE),
    **dict.fromkeys(("num_hidden_layers", "depth"), _MOST_LAYERS),
    # transformers makes a name for each.
    "num_labels": _MOST_LABELS,
}
# Names of other sizes and numbers of things, of which some may be 0. Those of windows, pixels and ids are not
# among them.
_COUNT = re.compile(
    r"(num|n|max|min)_\w+|\w+_(size|dim|dims|rank|channels|heads|layers|groups?|experts|kernel|latents|depth|stride|topk)"
    r"|mlp_ratio|expand|top_k_experts|topk_group|moe_k|dim"
)
_NO_COUNT = re.compile(r"\w+_(id|ids|index|token|pixels|window|eps)")
# Small numbers that keep divisors from being 0, and probabilities.
_EPSILON = re.compile(r"(\w+_)?(eps|epsilon)")
_PROBABILITY = re.compile(r"(\w+_)?(dropout|pdrop|drop_rate|drop_path_rate|dropout_prob|dropout_rate|jitter_noise)")
# With 0 or less, rotary positions or logits are infinite or NaN.
_POSITIVE = frozenset(
    {"rope_theta", "rope_local_base_freq", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
     "factor", "query_pre_attn_scalar", "logits_scaling", "attn_scale"}
)  # fmt: skip
_SHARES = frozenset({"partial_rotary_factor"})
# Fields that name the token of images; the last one is that of published Nemotron-H Omni folders.
IMAGE_TOKENS = ("image_token_index", "image_token_id", "img_context_token_id")
_TOKENS = (*IMAGE_TOKENS, "video_token_index", "video_token_id")
# Parts of config.json that no half is built from.
_UNREAD = frozenset({"quantization_config", "compression_config", "id2label", "label2id", "task_specific_params"})
# Settings of image processors from which the rows of every image are computed, and the smallest and largest values with
# which that takes no time. Those of published models are far from the largest ones.
_LONGEST_SIDE, _MOST_PIXELS = 8192, {"shortest_edge": 1 << 24, "longest_edge": 1 << 28}
_PROCESSOR_BOUNDS = {
    **dict.fromkeys(("min_tiles", "max_tiles", "min_patches", "max_num_tiles", "patch_expand_factor"), (1, 64)),
    **dict.fromkeys(("max_slice_nums", "dense_max_patches"), (0, 64)),
    **dict.fromkeys(("merge_size", "downsample_factor", "temporal_patch_size"), (1, 64)),
    **dict.fromkeys(("tile_size", "scale_resolution", "encoder_patch_size", "patch_size"), (1, _LONGEST_SIDE)),
    **dict.fromkeys(("min_size", "min_image_size", "max_image_size"), (1, _LONGEST_SIDE)),
    **dict.fromkeys(("min_image_tokens", "max_image_tokens", "max_soft_tokens"), (1, 1 << 16)),
    **dict.fromkeys(("min_num_patches", "max_num_patches"), (0, 1 << 18)),
}
_PROCESSOR_SIZES = ("size", "crop_size", "high_res_size", "max_image_size", "patch_size", "pad_size")


@dataclass(frozen=True, slots=True)
class _Range:
    """The numbers that a field may hold."""

    least: float
    most: float
    is_least_excluded: bool = False

    def has(self, number: float) -> bool:
        """Whether a number is inside. NaN is not."""
        return self.least <= number <= self.most and not (self.is_least_excluded and number == self.least)

    def __str__(self) -> str:
        if self.most == math.inf or self.is_least_excluded:
            bound = f"{'>' if self.is_least_excluded else '≥'} {self.least:,}"
            return bound if self.most == math.inf else f"{bound} and ≤ {self.most:,}"
        return f"from {self.least:,} to {self.most:,}"


def check_config_numbers(path: pathlib.Path, config: Mapping[str, Any]) -> None:
    """Checks the numbers in config.json. `path` is that of its folder.

    Raises ModelFolderError for one that no model has, for a layer of the tower that is not there, and for a text half
    that is null.
    """
    if "text_config" in config and config["text_config"] is None:
        # transformers would build a whole model of its default sizes.
        raise _error(path, "text_config is null")
    for where, name, number in _numbers(config, ""):
        allowed = _range_of(name)
        if allowed is not None and not allowed.has(number):
            raise _error(path, f"{where}{name} must be a number {allowed}, not {number}")
    for name in _TOKENS:
        token_id = config.get(name)
        if isinstance(token_id, int) and not 0 <= token_id < _LARGEST_SIZE:
            raise _error(path, f"{name} must be the id of a token, not {token_id}")
    chosen, vision = config.get("vision_feature_layer"), config.get("vision_config")
    num_layers = vision.get("num_hidden_layers") if isinstance(vision, Mapping) else None
    if isinstance(num_layers, int):
        # The tower's input counts as a layer, too.
        for layer in chosen if isinstance(chosen, list) else [chosen]:
            if isinstance(layer, int) and not -num_layers - 1 <= layer <= num_layers:
                raise _error(path, f"vision_feature_layer is {layer}, and the vision tower has {num_layers} layers")


def _numbers(part: Mapping[str, Any], where: str) -> Iterator[tuple[str, str, float]]:
    """Yields the names of the outer parts, the name of a field and its number, for all fields with a number."""
    for name, value in part.items():
        if isinstance(value, Mapping):
            if name not in _UNREAD:
                yield from _numbers(value, f"{where}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield where, name, value


def is_numeric(name: str) -> bool:
    """Whether a field of config.json with this name holds a number."""
    return _range_of(name) is not None


def _range_of(name: str) -> _Range | None:
    """Returns the range of a field of config.json, None for a field that any number may stand in."""
    if name in _SIZES:
        return _Range(1, _SIZES[name])
    if name in _SHARES:
        return _Range(0, 1, is_least_excluded=True)
    if name in _POSITIVE or _EPSILON.fullmatch(name):
        return _Range(0, math.inf, is_least_excluded=name in _POSITIVE)
    if _PROBABILITY.fullmatch(name):
        return _Range(0, 1)
    is_count = _COUNT.fullmatch(name) and not _NO_COUNT.fullmatch(name)
    return _Range(0, _LARGEST_SIZE) if is_count else None


def check_processor_numbers(path: pathlib.Path, processor: Any, *, most_patches: int, has_pixels: bool) -> None:
    """Checks the numbers of an image processor of transformers. `path` is that of the file that holds them.

    `has_pixels` says whether the edges in `size` bound the pixels of an image, and not its sides. Raises
    ModelFolderError.
    """
    bounds = {name: _Range(*bound) for name, bound in _PROCESSOR_BOUNDS.items()}
    bounds["max_patches"] = _Range(1, most_patches)
    found = [(name, allowed, getattr(processor, name, None)) for name, allowed in bounds.items()]
    for name in _PROCESSOR_SIZES:
        longest = _MOST_PIXELS if has_pixels and name == "size" else {}
        edges = getattr(processor, name, None)
        edges = edges if isinstance(edges, Mapping) else getattr(edges, "__dict__", {})
        found += [
            (f"{name}.{edge}", _Range(1, longest.get(edge, _LONGEST_SIDE)), value) for edge, value in edges.items()
        ]
    for name, allowed, number in found:
        if isinstance(number, int | float) and not isinstance(number, bool) and not allowed.has(number):
            raise ModelFolderError(
                f"{path}: {name} of the image processor must be a number {allowed}, not {number}; download "
                f"{path.name} again"
            )


def _error(path: pathlib.Path, problem: str) -> ModelFolderError:
    return ModelFolderError(f"{path}/{_CONFIG_FILE}: {problem}; download {_CONFIG_FILE} again")
