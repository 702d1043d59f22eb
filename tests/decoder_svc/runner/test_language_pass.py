"""Passes of the language half: what graphs compute is what steps without graphs compute."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from decoder_svc.runner.language_pass import LanguagePass, wraps_nothing
from lookonce.model.half_model import text_child
from tests.decoder_svc.runner.recording_runner import RecordingRunner
from tests.parity import families, offline
from tests.tiny_families import FAMILIES

# Both questions at once, and some to spare: the runner's attention reads the whole pool for each token of a graph.
NUM_BLOCKS = 40


@pytest.fixture(scope="module")
def built(tiny_family: Callable[[str], families.Conformance]) -> Callable[[str], offline.OfflineModel]:
    @functools.cache
    def model(name: str) -> offline.OfflineModel:
        family = tiny_family(name).offline
        return replace(family, runner=RecordingRunner(family.runner.config, family.runner.family))

    return model


def language_of(model: offline.OfflineModel) -> LanguagePass:
    language = model.runner.language
    assert isinstance(language, LanguagePass)
    return language


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_logits_of_hidden_states_are_those_of_the_pass(
    name: str, tiny_family: Callable[[str], families.Conformance], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_family(name).offline
    runner, original = model.runner, model.runner._forward
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(inputs: Any, chunks: Any, **how: bool) -> torch.Tensor:
        assert not any(how.values())
        with runner.hidden_states.keeping():
            logits = original(inputs, chunks, keeps_hidden=True)
        hidden = runner.hidden_states.take()[inputs.sampled_indexes]
        found.append((logits, runner.language.logits_of(hidden)))
        return logits

    monkeypatch.setattr(runner, "_forward", forward)
    offline.run(model, max_num_batched_tokens=2048)
    assert any(len(logits) > 1 for logits, _ in found)
    for logits, again in found:
        assert torch.allclose(logits, again, atol=1e-5, rtol=1e-5)
    # The base model computes again.
    monkeypatch.undo()
    answers, _, _ = offline.run(model, max_num_batched_tokens=2048)
    assert answers == [question.expected for question in model.questions]


def test_ids_outside_the_table_are_looked_up_without_an_error(built: Callable[[str], offline.OfflineModel]) -> None:
    language = language_of(built("llava_clip"))
    table = language.model.get_input_embeddings()
    ids = torch.tensor([3, table.num_embeddings + 5])
    assert torch.equal(language.look_up(ids)[0], table.weight[3])


@pytest.mark.parametrize(("name", "num_levels"), [("llava_clip", 0), ("qwen3_vl", 2)])
def test_rows_of_text_are_embeddings_and_zeros_for_the_levels(
    name: str, num_levels: int, built: Callable[[str], offline.OfflineModel]
) -> None:
    language = language_of(built(name))
    ids = torch.tensor([3, 5])
    tokens, *levels = language.split_levels(language.look_up_rows(ids))
    assert torch.equal(tokens, language.look_up(ids))
    assert len(levels) == num_levels
    assert not any(level.any() for level in levels)


def test_only_a_stack_that_adds_levels_without_waiting_takes_rows_with_levels_in_graphs(
    built: Callable[[str], offline.OfflineModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert language_of(built("llava_clip")).records_rows
    language = language_of(built("qwen3_vl"))
    assert not language.records_rows
    stack = language.model.model.language_model
    monkeypatch.setattr(type(stack), "adds_levels_without_waiting", True, raising=False)
    assert language.records_rows


def test_a_model_with_experts_of_images_gets_no_graphs(built: Callable[[str], offline.OfflineModel]) -> None:
    """Graphs would repeat the choice of experts that was made for the recorded step."""
    model = built("ernie4_5_vl_moe")
    model.runner.config = replace(model.runner.config, use_graphs=True)
    offline.Session(model, num_blocks=NUM_BLOCKS)
    model.runner.capture_model()
    assert model.runner.graphs is None


@pytest.mark.parametrize("name", ["llava_clip", "qwen2_vl", "gemma3", "gemma4"])
def test_padded_passes_give_the_log_probabilities_of_steps_without_graphs(
    name: str, built: Callable[[str], offline.OfflineModel]
) -> None:
    """Padding changes the shape of matrix products, so the last bits may differ."""
    model = built(name)
    questions = [question for question in model.questions if question.prompt.images][:2]
    prompts = [question.prompt for question in questions]
    spans = [span.length for prompt in prompts for span in prompt.mutual_spans]
    answers = []
    for use_graphs in (True, False):
        model.runner.config = replace(model.runner.config, use_graphs=use_graphs)
        session = offline.Session(model, num_blocks=NUM_BLOCKS, max_num_batched_tokens=max([23, *spans]))
        model.runner.capture_model()
        answers.append(session.ask(prompts, logprobs=5))
    padded, plain = answers
    assert padded.token_ids == plain.token_ids == [question.expected for question in questions]
    for of_padded, of_plain in zip(padded.logprobs, plain.logprobs, strict=True):
        for one, other in zip(of_padded, of_plain, strict=True):
            assert one is not None
            assert other is not None
            assert [token_id for token_id, _ in one.top] == [token_id for token_id, _ in other.top]
            values = [torch.tensor([value for _, value in each.top]) for each in (one, other)]
            torch.testing.assert_close(*values, rtol=0, atol=1e-5)


# Plain wrappers, one without `logits_to_keep`, and layers of transformers.
@pytest.mark.parametrize(
    ("name", "is_direct"),
    [("llava_clip", True), ("qwen2_5_vl", True), ("mistral3", True), ("video_llama_3", False), ("gemma3", False)],
)
def test_layers_and_head_are_called_directly_where_the_model_does_nothing(
    name: str, is_direct: bool, tiny_family: Callable[[str], families.Conformance], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_family(name).offline
    assert language_of(model).is_direct == is_direct
    if is_direct:
        monkeypatch.setattr(type(model.runner.model), "forward", lambda *_, **__: pytest.fail("the model was called"))
    answers, _, _ = offline.run(model, max_num_batched_tokens=2048)
    assert answers == [question.expected for question in model.questions]


@pytest.mark.parametrize("changed", ["logits", "embeddings", "positions"])
def test_a_model_that_changes_anything_is_called(
    changed: str, tiny_family: Callable[[str], families.Conformance], monkeypatch: pytest.MonkeyPatch
) -> None:
    language = language_of(tiny_family("llava_clip").offline)
    model = language.model
    plain = type(model).forward

    @functools.wraps(plain)
    def forward(self: Any, *args: Any, **arguments: Any) -> Any:
        if changed == "embeddings":
            arguments["inputs_embeds"] = arguments["inputs_embeds"] * 2
        if changed == "positions":
            arguments["position_ids"] = arguments["position_ids"] + 1
        output = plain(self, *args, **arguments)
        if changed == "logits":
            output.logits = output.logits.tanh()
        return output

    check = functools.partial(wraps_nothing, language, 1, torch.device("cpu"))
    with torch.inference_mode():
        assert check()
        monkeypatch.setattr(type(model), "forward", forward)
        assert not check()
    assert "forward" not in vars(getattr(model.model, text_child(model))), "the layers compute again"
