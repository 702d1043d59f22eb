"""Answers end where `generate` of transformers ends them, and a folder's defaults mean the same as there."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from decoder_svc.prompt.sampling_check import SamplingLimits, SamplingSpec, check_sampling
from decoder_svc.scheduling.request_output import FinishReason
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.speculation import NO_SPECULATION, SpeculationLimits
from lookonce.model.generation_defaults import load_defaults
from tests import tiny_models
from tests.parity import offline

MAX_TOKENS = 6
ENDS = (20, 30)
# Added to the logits of both, so that each token would be one of them.
EAGERNESS = 50.0
# The second one gets drafts of every length, so that some steps would run over the end.
SPECULATIONS = (NO_SPECULATION, SpeculationLimits(4, ngram_min=1, ngram_max=2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("models") / "llava_clip"
    tiny_models.BUILDERS["llava_clip"](folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: pathlib.Path) -> offline.OfflineModel:
    return offline.build(folder, 4, (0,))


@pytest.fixture(scope="module")
def reference(folder: pathlib.Path) -> Any:
    return tiny_models.load_model(folder)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("speculation", SPECULATIONS, ids=("plain", "drafts"))
@pytest.mark.parametrize("min_tokens", range(MAX_TOKENS + 1))
def test_the_end_of_sequence_waits_as_long_as_in_generate(
    model: offline.OfflineModel,
    reference: Any,
    min_tokens: int,
    speculation: SpeculationLimits,
    deterministic: bool,
) -> None:
    session = offline.Session(model, speculation=speculation, deterministic=deterministic)
    reasons = set()
    for question in model.questions:
        with torch.inference_mode():
            output = reference.generate(
                input_ids=torch.tensor([question.prompt.token_ids]),
                attention_mask=torch.ones(1, len(question.prompt.token_ids), dtype=torch.long),
                min_new_tokens=min_tokens,
                max_new_tokens=MAX_TOKENS,
                eos_token_id=sorted(ENDS),
                pad_token_id=min(ENDS),
                sequence_bias={(token_id,): EAGERNESS for token_id in ENDS},
                do_sample=False,
            )
        params = SamplingParams(
            min_tokens=min_tokens,
            max_tokens=MAX_TOKENS,
            stop_token_ids=frozenset(ENDS),
            logit_bias=tuple((token_id, EAGERNESS) for token_id in ENDS),
        )
        answers = session.ask([question.prompt], params=params)
        assert answers.token_ids == [output[0, len(question.prompt.token_ids) :].tolist()]
        reasons.add(answers.requests[0].finish_reason)
    assert reasons == {FinishReason.STOP if min_tokens < MAX_TOKENS else FinishReason.LENGTH}


def test_a_folders_defaults_mean_what_they_mean_in_generate(
    model: offline.OfflineModel, reference: Any, tmp_path: pathlib.Path
) -> None:
    limits = SamplingLimits(reference.config.get_text_config().vocab_size, 8, 8, MAX_TOKENS)
    for question in model.questions:
        # Neither the answer's first token nor its third may be generated, and its second would end the answer.
        first, end, third, *_ = question.expected
        stated = {
            "suppress_tokens": [first, third, limits.vocab_size + 5],
            "eos_token_id": [end],
            "min_new_tokens": 4,
            "repetition_penalty": 1.3,
        }
        (tmp_path / "generation_config.json").write_text(json.dumps(stated))
        with torch.inference_mode():
            output = reference.generate(
                input_ids=torch.tensor([question.prompt.token_ids]),
                attention_mask=torch.ones(1, len(question.prompt.token_ids), dtype=torch.long),
                generation_config=GenerationConfig.from_pretrained(tmp_path),
                max_new_tokens=MAX_TOKENS,
                pad_token_id=end,
            )
        params = check_sampling(SamplingSpec(), load_defaults(tmp_path, None), limits).params
        answers = offline.Session(model).ask([question.prompt], params=params)
        assert answers.token_ids == [output[0, len(question.prompt.token_ids) :].tolist()]
        assert answers.token_ids[0] != question.expected[:MAX_TOKENS]
