"""Fields of generation_config.json that the decoder ignores are named, and no others."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from transformers import GenerationConfig

from lookonce.errors import ModelFolderError
from lookonce.model.generation_config import ignored_fields, read_generation_config

# Fields that the decoder takes over.
SERVED = {
    "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "eos_token_id", "suppress_tokens",
    "min_new_tokens",
}  # fmt: skip
# Fields that change no answer of a decoder-only model: caches, speed, the form of the result.
HARMLESS = {
    "use_cache", "use_mtp", "cache_implementation", "cache_config", "max_cache_len", "renormalize_logits",
    "output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
    "pad_token_id", "bos_token_id", "decoder_start_token_id", "is_assistant", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "prompt_lookup_num_tokens",
    "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind", "target_lookbehind",
    "assistant_ensemble_weight", "speculation_type", "compile_config", "disable_compile",
    "continuous_batching_config", "low_memory", "prefill_chunk_size", "_from_model_config", "transformers_version",
}  # fmt: skip


def test_every_field_of_transformers_is_served_or_named_or_harmless() -> None:
    fields = set(vars(GenerationConfig()))
    named = {field.partition("=")[0] for field in ignored_fields(dict.fromkeys(fields, "unusual"))}
    assert fields - SERVED - HARMLESS == named


def test_the_defaults_of_transformers_are_no_news() -> None:
    assert ignored_fields(GenerationConfig._get_default_generation_params()) == []
    assert ignored_fields(GenerationConfig().to_dict()) == []


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, []),
        ({"bad_words_ids": [], "sequence_bias": {}, "guidance_scale": 1.0, "num_beams": None}, []),
        ({"num_beams": 4, "top_p": 0.5, "typical_p": 0.9}, ["num_beams=4", "typical_p=0.9"]),
        (
            {"bad_words_ids": [[number] for number in range(99)]},
            [f"bad_words_ids={str([[n] for n in range(99)])[:60]}…"],
        ),
    ],
)
def test_ignored_fields_have_their_values(generation: dict[str, Any], expected: list[str]) -> None:
    assert ignored_fields(generation) == expected


def test_a_folder_without_the_file_states_nothing(tmp_path: pathlib.Path) -> None:
    assert read_generation_config(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(ModelFolderError, match=r"generation_config\.json"):
        read_generation_config(tmp_path)
