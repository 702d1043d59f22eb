"""Asks a model its questions in every way in which a step can be cut, and again with what the caches hold."""

from __future__ import annotations

import random
from typing import Any

from decoder_svc.scheduling.speculation import SpeculationLimits
from tests.parity import offline


def check_in_all_ways(model: offline.OfflineModel, rng: random.Random) -> None:
    """Asserts that answers are the references', and that at least half of the prompts are found in the prefix cache.

    `rng` draws the tokens of a step and the drafts.
    """
    prompts = [question.prompt for question in model.questions]
    expected = [question.expected for question in model.questions]
    options: list[dict[str, Any]] = [
        {},
        {"max_num_batched_tokens": rng.randint(5, 40)},
        {"deterministic": True},
        {"speculation": SpeculationLimits(rng.randint(1, 4))},
    ]
    for each in options:
        session = offline.Session(model, **each)
        assert session.ask(prompts).token_ids == expected, each
        again = session.ask(prompts[::-1])
        assert again.token_ids == expected[::-1], each
        assert sum(request.usage.cached_prompt_tokens > 0 for request in again.requests) >= len(prompts) // 2
