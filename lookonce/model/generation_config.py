"""Reads a model folder's generation_config.json, and names what of it the decoder does not serve.

Knows only what can be said without the sampler; `generation_defaults.py` takes over the rest.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from lookonce.model.model_folder import read_json_object

FILE_NAME = "generation_config.json"

# Fields of transformers' GenerationConfig that change answers and that the decoder ignores, with the values that change
# nothing. None and an empty list change nothing for any of them.
_IGNORED: Mapping[str, tuple[Any, ...]] = {
    "max_length": (20,),
    "max_new_tokens": (),
    "min_length": (0,),
    "max_time": (),
    "stop_strings": ("",),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "num_return_sequences": (1,),
    "typical_p": (1,),
    "top_h": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "guidance_scale": (1,),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "no_repeat_ngram_size": (0,),
    "exponential_decay_length_penalty": (),
    "bad_words_ids": (),
    "begin_suppress_tokens": (),
    "sequence_bias": ({},),
    "force_words_ids": (),
    "constraints": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "remove_invalid_values": (False,),
    "token_healing": (False,),
    "watermarking_config": ({},),
}
# A longer value is cut in reports.
_MAX_VALUE_CHARS = 60


def read_generation_config(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the content of the folder's file; empty if there is none. Raises ModelFolderError if it is unreadable."""
    path = folder / FILE_NAME
    return read_json_object(path) if path.is_file() else {}


def ignored_fields(generation: Mapping[str, Any]) -> list[str]:
    """Returns the fields that change answers in transformers and not here, as `name=value`."""
    return [
        f"{name}={_shown(generation[name])}"
        for name, neutral in _IGNORED.items()
        if generation.get(name) not in (None, [], *neutral)
    ]


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}…"
