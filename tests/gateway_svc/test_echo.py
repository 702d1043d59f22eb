"""Completions that repeat their prompt with the likelihood of its tokens, and completions of token ids."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from tests.conftest import DEMO_MODEL
from tests.gateway_svc.gateways import Gateway, running_decoder, running_gateway

TEXT = "<bos>What is in the picture? A red star, and nothing more."


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with running_decoder(DEMO_MODEL) as target, running_gateway(target) as running:
        yield running


@pytest.fixture
async def model(gateway: Gateway) -> str:
    return (await gateway.client.models.list()).data[0].id


@pytest.fixture(scope="module")
def ids() -> list[int]:
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_MODEL)
    found: list[int] = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    return found


def reference(ids: list[int]) -> tuple[list[float], list[bool]]:
    """Returns the log probability of each token but the first, and whether it is the likeliest one."""
    model = AutoModelForImageTextToText.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    chosen = torch.tensor(ids[1:])
    return (
        logits.double().log_softmax(-1).gather(1, chosen[:, None])[:, 0].tolist(),
        (logits.argmax(-1) == chosen).tolist(),
    )


async def test_a_prompt_has_the_likelihoods_of_transformers(gateway: Gateway, model: str, ids: list[int]) -> None:
    expected, are_likeliest = reference(ids)
    for prompt in (TEXT, ids):
        given: Any = prompt
        completion = await gateway.client.completions.create(
            model=model, prompt=given, echo=True, logprobs=1, max_tokens=1, temperature=0.0
        )
        (choice,) = completion.choices
        logprobs = choice.logprobs
        assert logprobs is not None
        values: Any = logprobs.token_logprobs
        assert values[0] is None
        assert values[1:-1] == pytest.approx(expected, abs=2e-4)
        tops: Any = logprobs.top_logprobs
        assert tops[0] is None
        found = [value == max(top.values()) for value, top in zip(values[1:-1], tops[1:-1], strict=True)]
        assert found == are_likeliest
        assert len(logprobs.tokens or []) == len(ids) + 1
        assert choice.text.removeprefix("<bos>").startswith(TEXT.removeprefix("<bos>"))
        offsets: Any = logprobs.text_offset
        assert offsets == sorted(offsets)
        assert completion.usage is not None
        assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (len(ids), 1)


async def test_a_prompt_alone(gateway: Gateway, model: str, ids: list[int]) -> None:
    completion = await gateway.client.completions.create(
        model=model, prompt=[TEXT, "<bos>Yes"], echo=True, logprobs=0, max_tokens=0
    )
    first, second = completion.choices
    assert (first.text, second.text) == (TEXT, "<bos>Yes")
    assert first.logprobs is not None
    assert len(first.logprobs.token_logprobs or []) == len(ids)
    assert [first.finish_reason, second.finish_reason] == ["length", "length"]
    plain = await gateway.client.completions.create(model=model, prompt=TEXT, echo=True, max_tokens=3, temperature=0.0)
    assert plain.choices[0].text.startswith(TEXT)
    assert plain.choices[0].logprobs is None


async def test_token_ids_are_answered_as_their_text(gateway: Gateway, model: str, ids: list[int]) -> None:
    options: Any = {"model": model, "max_tokens": 8, "temperature": 0.0}
    by_text = await gateway.client.completions.create(prompt=TEXT, **options)
    by_ids = await gateway.client.completions.create(prompt=ids, **options)
    both = await gateway.client.completions.create(prompt=[ids, ids], **options)
    assert by_text.choices[0].text == by_ids.choices[0].text == both.choices[1].text
    assert by_ids.usage is not None
    assert by_ids.usage.prompt_tokens == len(ids)


async def test_the_best_answers_come_first(gateway: Gateway, model: str) -> None:
    options: Any = {"model": model, "prompt": TEXT, "max_tokens": 8, "temperature": 1.5, "seed": 3, "logprobs": 0}
    every = await gateway.client.completions.create(n=4, **options)
    best = await gateway.client.completions.create(n=2, best_of=4, **options)

    def mean(choice: Any) -> float:
        values = choice.logprobs.token_logprobs
        return float(sum(values) / len(values))

    ranked = sorted(every.choices, key=mean, reverse=True)
    assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]
    assert best.usage is not None
    assert every.usage is not None
    assert best.usage.completion_tokens == every.usage.completion_tokens


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"echo": True, "stream": True}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 17}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 2, "echo": True}, "best_of"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [5, "x"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [["x"]]}, "prompt"),
        ({"prompt": [600]}, "prompt"),
    ],
)
async def test_what_is_refused_is_named(gateway: Gateway, model: str, options: dict[str, Any], param: str) -> None:
    given: Any = {"model": model, "prompt": "x", **options}
    with pytest.raises(openai.BadRequestError) as caught:
        await gateway.client.completions.create(**given)
    assert caught.value.param == param
