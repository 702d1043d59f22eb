"""A model split over several processes gives the tokens of Hugging Face `generate`."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import transformers

from decoder_svc.rank_start import rank_config
from decoder_svc.runner.attention import SdpaBackend
from decoder_svc.runner.cpu import runner as cpu_runner
from decoder_svc.runner.cpu.native_experts import NativeExperts
from decoder_svc.runner.cpu.runner import CPUModelRunner
from decoder_svc.runner.parallel.leader import Leader, LostRankError
from decoder_svc.runner.parallel.other_ranks import OtherRanks
from decoder_svc.runner.parallel.rank_processes import RankProcesses
from decoder_svc.runner.parallel.split_model import kv_heads_of_rank
from lookonce.errors import ConfigurationError
from lookonce.model.kernels.native_linear import NativeLinear
from lookonce.model.kernels.quantized_layers import has_quantized_layers
from tests import tiny_models
from tests.decoder_svc.rounded_weights import round_weights
from tests.decoder_svc.runner.cpu.loaded_runner import load
from tests.parity import families, offline
from tests.quantized_folders import FORMS, store_quantized
from tests.tiny_families import FAMILIES

# A plan of transformers with plain layers, one with products that are gathered, two of experts, recurrent layers beside
# attention, feature levels (without a plan of transformers), a window, text that is scaled and soft-capped, and a
# language model with a head of its own.
SPLIT_IN_TWO = (
    "llava_clip", "glm46v", "qwen3_vl_moe", "aria", "qwen3_5", "qwen3_vl", "gemma3", "aya_vision", "lfm2_vl", "lfm3_vl",
    "llama4",
)  # fmt: skip
SPLIT_IN_THREE = ("llava_clip", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe")


@contextlib.contextmanager
def split(
    family: families.Conformance, size: int, on_loss: Callable[[], None]
) -> Iterator[tuple[offline.OfflineModel, RankProcesses]]:
    """Yields the family's model split over this process and `size` - 1 more."""
    # The family is shared, and earlier sessions may have left another number in its configuration.
    config = replace(family.offline.runner.config, max_num_seqs=offline.NUM_SEQS)
    processes = RankProcesses([{}] * (size - 1), [str(config.folder), "1", "json", "info"])
    others = OtherRanks(processes.connections, on_loss=on_loss)
    try:
        ranks = others.meet(rank_config(config, "cpu", "float32"), CPUModelRunner.rank_engine)
        runner = CPUModelRunner(replace(config, ranks=ranks), family.offline.runner.family)
        others.wait_until_loaded()
        runner.lead(Leader(ranks, others.connections))
        yield replace(family.offline, runner=runner), processes
    finally:
        others.close()
        processes.close()


def have_six_heads(monkeypatch: pytest.MonkeyPatch, **sizes: int) -> None:
    """Makes tiny models whose heads three ranks can divide, with other sizes of the text model."""
    plain = tiny_models._text_config

    def with_six_heads(tokenizer: object) -> dict[str, object]:
        return plain(tokenizer) | {"num_attention_heads": 6, "num_key_value_heads": 3} | sizes

    monkeypatch.setattr(tiny_models, "HIDDEN_SIZE", 96)
    monkeypatch.setattr(tiny_models, "_text_config", with_six_heads)


def must_not_be_lost() -> None:
    raise AssertionError("a rank has ended")


def check_answers(family: families.Conformance, model: offline.OfflineModel) -> None:
    questions = family.offline.questions
    prompts, expected = [one.prompt for one in questions], [one.expected for one in questions]
    assert offline.Session(model).ask(prompts).token_ids == expected, "all at once"
    longest = max([23, *(span.length for prompt in prompts for span in prompt.mutual_spans)])
    session = offline.Session(model, max_num_batched_tokens=longest, num_blocks=families.few_blocks(prompts))
    assert session.ask(prompts).token_ids == expected, "in chunks, some of them preempted"
    again = session.ask(prompts)
    assert again.token_ids == expected, "with hits in the prefix cache"


@pytest.mark.parametrize("name", SPLIT_IN_TWO)
def test_two_ranks_give_the_tokens_of_one(name: str, tiny_family: Callable[[str], families.Conformance]) -> None:
    family = tiny_family(name)
    with split(family, 2, must_not_be_lost) as (model, _):
        spec, whole = model.runner.get_kv_cache_spec(), family.offline.runner.get_kv_cache_spec()
        assert spec.num_kv_heads * 2 == whole.num_kv_heads
        # Recurrent layers are whole on each rank.
        assert model.runner.weight_bytes < 0.8 * family.offline.runner.weight_bytes
        check_answers(family, model)


# Experts are split, or the layers around experts whose outputs are normed.
@pytest.mark.parametrize(("name", "most"), [("mistral4", 0.8), ("muse_spark", 0.9)])
def test_each_rank_has_the_attention_of_all_heads(
    name: str, most: float, tiny_family: Callable[[str], families.Conformance]
) -> None:
    """Heads share latents, and the plan of transformers leaves the attention of some models whole."""
    family = tiny_family(name)
    with split(family, 2, must_not_be_lost) as (model, _):
        assert model.runner.get_kv_cache_spec() == family.offline.runner.get_kv_cache_spec()
        assert model.runner.weight_bytes < most * family.offline.runner.weight_bytes
        check_answers(family, model)


@pytest.mark.parametrize("name", ["step3p7"])
def test_experts_with_bounded_gates_are_split(name: str, tiny_family: Callable[[str], families.Conformance]) -> None:
    """Each rank computes its units with transformers' modules. Layers have different numbers of query heads."""
    family = tiny_family(name)
    with split(family, 2, must_not_be_lost) as (model, _):
        assert model.runner.get_kv_cache_spec() == family.offline.runner.get_kv_cache_spec()
        layers = model.runner.get_model().model.language_model.layers
        assert {layer.self_attn.num_heads for layer in layers} == {4, 6}
        assert [isinstance(layer.mlp.experts.part, NativeExperts) for layer in layers[1:]] == [False, True, False]
        check_answers(family, model)


# 3 does not divide the units of experts and MLPs.
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["nemotron_h_omni"])
def test_mixtures_without_gates_are_split(
    name: str, size: int, tiny_family: Callable[[str], families.Conformance]
) -> None:
    """Attention and recurrent layers are whole on each rank; experts, shared experts and MLPs are split."""
    family = tiny_family(name)
    with split(family, size, must_not_be_lost) as (model, _):
        assert model.runner.get_kv_cache_spec() == family.offline.runner.get_kv_cache_spec()
        for kind in (NativeExperts, NativeLinear):
            parts, whole = (bytes_of(one.get_model(), kind) for one in (model.runner, family.offline.runner))
            assert parts < 0.9 * whole
        check_answers(family, model)


def bytes_of(model: torch.nn.Module, kind: type[NativeExperts | NativeLinear]) -> int:
    return sum(module.nbytes for module in model.modules() if isinstance(module, kind))


@pytest.mark.parametrize("name", SPLIT_IN_THREE)
def test_three_ranks_give_the_tokens_of_one(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 3 does not divide the width of the feed-forward layers and experts.
    have_six_heads(monkeypatch, intermediate_size=100)
    family = families.build(FAMILIES[name], FAMILIES[name].build(tmp_path))
    with split(family, 3, must_not_be_lost) as (model, _):
        check_answers(family, model)


# Each kind of codes; groups that a share begins in, which are divided; inputs of which no share is whole groups; one
# scale for all inputs; inputs that are out of order; experts, also those of which no share is whole groups.
@pytest.mark.parametrize(
    ("name", "form", "size"),
    [
        ("llava_clip", "awq", 2),
        ("llava_clip", "compressed-int8", 3),
        ("qwen2_5_vl", "fp8-block", 2),
        ("gemma3", "compressed-int4-zeros", 2),
        ("qwen3_5", "gptq-8", 2),
        ("qwen2_vl", "gptq-act-order", 2),
        ("qwen3_vl_moe", "awq", 2),
        ("qwen3_vl_moe", "compressed-int8", 3),
        ("qwen3_5_moe", "fp8-block", 2),
        ("llama4", "compressed-int4-zeros", 2),
        ("nemotron_h_omni", "fp8-block", 2),
        ("nemotron_h_omni", "compressed-int8", 3),
    ],
)
def test_quantized_layers_are_split(
    name: str, form: str, size: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if size == 3:
        have_six_heads(monkeypatch)
    stored, whole = (FAMILIES[name].build(tmp_path / one) for one in ("stored", "whole"))
    assert store_quantized(stored, FORMS[form], whole)
    expected = families.build(FAMILIES[name], whole, 6)
    family = replace(expected, offline=replace(expected.offline, runner=load(stored, torch.float32)))
    with split(family, size, must_not_be_lost) as (model, _):
        assert not has_quantized_layers(model.runner.get_model()), "kernels have taken their places"
        has_codes = any(
            isinstance(module, NativeLinear) and module.weights.codes is not None
            for module in model.runner.get_model().modules()
        )
        assert has_codes == FORMS[form].keeps_codes
        has_experts = any(isinstance(module, NativeExperts) for module in model.runner.get_model().modules())
        assert has_experts == ("moe" in name or name in ("llama4", "nemotron_h_omni"))
        check_answers(family, model)


@pytest.mark.parametrize(
    ("name", "bits"), [("llava_clip", 8), ("qwen3_5", 4), ("qwen3_vl_moe", 4), ("aria", 8), ("nemotron_h_omni", 4)]
)
def test_layers_that_are_rounded_while_loading_are_split(name: str, bits: int, tmp_path: pathlib.Path) -> None:
    whole, rounded = (FAMILIES[name].build(tmp_path / one) for one in ("whole", "rounded"))
    round_weights(rounded, bits)
    expected = families.build(FAMILIES[name], rounded, 6)
    runner = load(whole, torch.float32)
    runner = CPUModelRunner(replace(runner.config, quantize_bits=bits), runner.family)
    family = replace(expected, offline=replace(expected.offline, runner=runner))
    with split(family, 2, must_not_be_lost) as (model, _):
        check_answers(family, model)


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "aria", "llama4", "nemotron_h_omni"])
def test_experts_are_split_where_transformers_computes_them(
    name: str, tiny_family: Callable[[str], families.Conformance], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs have no kernel for experts. Here, this process has none."""
    monkeypatch.setattr(cpu_runner, "cpu_attention", lambda *_: SdpaBackend())
    family = tiny_family(name)
    with split(family, 2, must_not_be_lost) as (model, _):
        check_answers_of_plain_experts(family, model)


def test_codes_of_experts_are_split_where_transformers_computes_them(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = FAMILIES["qwen3_vl_moe"]
    stored, whole = (tiny.build(tmp_path / one) for one in ("stored", "whole"))
    assert store_quantized(stored, FORMS["awq"], whole)
    expected = families.build(tiny, whole, 6)
    family = replace(expected, offline=replace(expected.offline, runner=load(stored, torch.float32)))
    monkeypatch.setattr(cpu_runner, "cpu_attention", lambda *_: SdpaBackend())
    with split(family, 2, must_not_be_lost) as (model, _):
        check_answers_of_plain_experts(family, model)


def check_answers_of_plain_experts(family: families.Conformance, model: offline.OfflineModel) -> None:
    assert not bytes_of(model.runner.get_model(), NativeExperts)
    assert not has_quantized_layers(model.runner.get_model())
    check_answers(family, model)


def test_a_model_whose_heads_cannot_be_divided_is_refused(tiny_family: Callable[[str], families.Conformance]) -> None:
    family = tiny_family("llava_clip")
    with (
        pytest.raises(ConfigurationError, match="num_attention_heads is 4, which 3 does not divide"),
        split(family, 3, lambda: None),
    ):
        pass


def test_layers_that_differ_are_not_split(tiny_family: Callable[[str], families.Conformance]) -> None:
    family = tiny_family("gemma4")
    with pytest.raises(ConfigurationError, match="layers with different heads"), split(family, 2, lambda: None):
        pass


def test_activations_that_depend_on_a_whole_layer_are_not_split() -> None:
    text = transformers.Gemma3nTextConfig(num_hidden_layers=2, num_kv_shared_layers=0)
    assert kv_heads_of_rank(text, 2) == 1
    text.activation_sparsity_pattern = [0.95, 0.0]
    with pytest.raises(ConfigurationError, match="activations that depend on all units of a layer"):
        kv_heads_of_rank(text, 2)


def test_a_lost_rank_ends_the_engine(tiny_family: Callable[[str], families.Conformance]) -> None:
    family = tiny_family("llava_clip")
    is_lost = threading.Event()
    with split(family, 2, is_lost.set) as (model, processes):
        session = offline.Session(model)
        os.kill(processes.pids[0], signal.SIGKILL)
        assert is_lost.wait(30)
        with pytest.raises(LostRankError):
            session.ask([family.offline.questions[0].prompt])
