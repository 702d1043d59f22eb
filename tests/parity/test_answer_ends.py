"""Answers end where `generate` of transformers ends them, for a model that wants to end at once."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

from decoder_svc.scheduling.request_output import FinishReason
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.speculation import NO_SPECULATION, SpeculationLimits
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
