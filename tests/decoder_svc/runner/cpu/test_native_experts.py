"""Experts by our kernel: their results are those of transformers' modules, in any batch."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.models.aria.configuration_aria import AriaTextConfig
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.muse_spark.configuration_muse_spark import MuseSparkTextConfig
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeTextConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextExperts
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from decoder_svc.runner.cpu.attention import SOURCES, NativeBackend
from decoder_svc.runner.cpu.native_experts import NativeExperts, replace_experts
from lookonce.model.empty_weights import empty_weights
from lookonce.model.kernels.native_library import load_library
from lookonce.model.kernels.quantized_experts import (
    Expert,
    ExpertWeights,
    QuantizedExperts,
    experts_of,
    quantized_experts,
)
from lookonce.model.kernels.quantized_weight import quantized, whole

pytestmark = pytest.mark.usefixtures("library")

DTYPES = [torch.float32, torch.bfloat16]
# Gates and values in one tensor; the same with inputs first; no gates.
KINDS = ["gated", "turned", "ungated"]


def backend() -> NativeBackend:
    return NativeBackend(load_library(SOURCES), 2)


def module(
    hidden: int, mlp: int, num_experts: int, dtype: torch.dtype = torch.float32, kind: str = "gated"
) -> torch.nn.Module:
    """Returns such a module with random weights."""
    return filled(transformers_module(hidden, mlp, num_experts, kind), dtype)


def filled(made: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Draws the weights of a module and returns it."""
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.data = (torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5).to(dtype)
    return made.requires_grad_(False)


def transformers_module(hidden: int, mlp: int, num_experts: int, kind: str) -> Any:
    """Returns the module of Qwen3-VL, of Aria or of Nemotron-H."""
    sizes = {"hidden_size": hidden, "num_attention_heads": 1, "num_key_value_heads": 1}
    if kind == "turned":
        made = AriaExperts(AriaTextConfig(**sizes, intermediate_size=mlp, moe_num_experts=num_experts))
    elif kind == "ungated":
        made = NemotronHExperts(NemotronHConfig(**sizes, moe_intermediate_size=mlp, n_routed_experts=num_experts))
    else:
        made = Qwen3VLMoeTextExperts(Qwen3VLMoeTextConfig(**sizes, moe_intermediate_size=mlp, num_experts=num_experts))
    made.config._experts_implementation = "eager"
    return made


def native(made: torch.nn.Module) -> NativeExperts:
    weights = experts_of(made)
    assert weights is not None
    return NativeExperts(weights, backend())


def tokens(
    num_tokens: int, hidden: int, num_experts: int, num_chosen: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns random inputs, numbers of experts and their shares."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(num_tokens, num_experts, generator=generator).topk(num_chosen).indices
    shares = torch.rand(num_tokens, num_chosen, generator=generator)
    return torch.randn(num_tokens, hidden, generator=generator), chosen, shares


@settings(max_examples=40, deadline=None)
@given(
    hidden=st.integers(1, 5).map(lambda size: 16 * size),
    mlp=st.integers(1, 50),
    num_experts=st.integers(1, 9),
    num_tokens=st.integers(0, 40),
    data=st.data(),
)
def test_results_are_those_of_transformers(
    hidden: int, mlp: int, num_experts: int, num_tokens: int, data: st.DataObject
) -> None:
    made = module(hidden, mlp, num_experts, kind=data.draw(st.sampled_from(KINDS)))
    given_tokens = tokens(num_tokens, hidden, num_experts, data.draw(st.integers(1, num_experts)), num_tokens)
    torch.testing.assert_close(native(made)(*given_tokens), made(*given_tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["gated", "ungated"])
@pytest.mark.parametrize("name", ["relu", "relu2", "silu", "gelu", "gelu_pytorch_tanh", "quick_gelu"])
def test_experts_have_the_modules_activation(name: str, kind: str) -> None:
    made = module(48, 40, 4, kind=kind)
    made.act_fn = ACT2FN[name]
    given_tokens = tokens(9, 48, 4, 2)
    expected = made(*given_tokens)
    torch.testing.assert_close(native(made)(*given_tokens), expected, rtol=1e-4, atol=1e-5)
    codes = rounded(made, 8)
    torch.testing.assert_close(native(codes)(*given_tokens), codes(*given_tokens), rtol=1e-4, atol=1e-5)


def test_many_tokens_of_one_expert_are_computed_in_parts() -> None:
    made = module(64, 48, 3)
    inputs, _, shares = tokens(500, 64, 3, 1)
    chosen = torch.zeros(500, 1, dtype=torch.int64)
    torch.testing.assert_close(native(made)(inputs, chosen, shares), made(inputs, chosen, shares), rtol=1e-4, atol=1e-5)


def test_numbers_behind_the_last_expert_are_left_out() -> None:
    made = module(32, 32, 4)
    inputs, chosen, shares = tokens(6, 32, 4, 2)
    chosen[2] = 4
    chosen[4, 1] = 4
    found = native(made)(inputs, chosen, shares)
    torch.testing.assert_close(found, made(inputs, chosen, shares), rtol=1e-4, atol=1e-5)
    assert not found[2].any()


@pytest.mark.parametrize("kind", ["gated", "ungated"])
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_is_bit_equal_alone_and_in_a_batch(bits: int | None, dtype: torch.dtype, kind: str) -> None:
    made = module(128, 96, 8, dtype, kind)
    experts = native(made if bits is None else rounded(made, bits))
    inputs, chosen, shares = tokens(300, 128, 8, 3)
    together = experts(inputs.to(dtype), chosen, shares)
    for index in (0, 17, 299):
        one = slice(index, index + 1)
        assert torch.equal(experts(inputs[one].to(dtype), chosen[one], shares[one]), together[one])


def rounded(made: torch.nn.Module, bits: int) -> QuantizedExperts:
    found = quantized_experts(made, bits)
    assert found is not None
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [8, 4])
def test_rounded_experts_have_the_results_of_whole_ones_with_the_same_weights(bits: int, kind: str) -> None:
    experts = rounded(module(128, 96, 6, kind=kind), bits)
    given_tokens = tokens(20, 128, 6, 2)
    expected = experts.plain()(*given_tokens)
    torch.testing.assert_close(experts(*given_tokens), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(native(experts)(*given_tokens), expected, rtol=1e-4, atol=1e-5)
    exact = module(128, 96, 6, kind=kind)(*given_tokens)
    assert 1e-3 < (expected - exact).norm() / exact.norm() < 0.3, "else the weights were not rounded, or are others"


@pytest.mark.parametrize("kind", ["gated", "ungated"])
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_bfloat16_is_near_float32(bits: int | None, kind: str) -> None:
    made = module(128, 96, 6, torch.bfloat16, kind)
    experts = native(made if bits is None else rounded(made, bits))
    weights = experts_of(module(128, 96, 6, torch.bfloat16, kind))
    assert weights is not None
    inputs, chosen, shares = tokens(50, 128, 6, 2)
    inputs = inputs.bfloat16()
    wanted = torch.zeros(50, 128)
    for token, (numbers, parts) in enumerate(zip(chosen.tolist(), shares, strict=True)):
        for number, share in zip(numbers, parts, strict=True):
            first, last = stored(weights.read(number), bits)
            row = inputs[token].float()
            products = [row @ whole(part).float().T for part in first]
            is_gated = kind == "gated"
            units = F.silu(products[0]) * products[1] if is_gated else products[0].clamp(min=0) ** 2
            wanted[token] += share * units @ whole(last).float().T
    found = experts(inputs, chosen, shares).float()
    assert (found - wanted).norm() < 1e-2 * wanted.norm()


def stored(expert: Expert, bits: int | None) -> Expert:
    if bits is None:
        return expert
    first, last = expert
    return tuple(quantized(whole(part), bits) for part in first), quantized(whole(last), bits)


def test_experts_whose_results_differ_stay_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    made = torch.nn.Sequential(module(32, 32, 4))
    made[0].down_proj[:, 3, 5] = torch.nan
    assert replace_experts(made, backend()) == 0
    assert isinstance(made[0], Qwen3VLMoeTextExperts)
    assert "experts stay as they are" in caplog.text


class Added(Qwen3VLMoeTextExperts):  # type: ignore[misc]  # transformers is untyped here
    def forward(self, *given: Tensor) -> Tensor:
        result: Tensor = super().forward(*given) + 0.01
        return result


class Normed(Qwen3VLMoeTextExperts):  # type: ignore[misc]  # transformers is untyped here
    def forward(self, *given: Tensor) -> Tensor:
        result: Tensor = super().forward(*given)
        return F.rms_norm(result, result.shape[-1:])


class Bounded(NemotronHExperts):  # type: ignore[misc]  # transformers is untyped here
    def forward(self, hidden_states: Tensor, *others: Tensor) -> Tensor:
        result: Tensor = super().forward(hidden_states.clamp(-50, 50), *others)
        return result


class WithMore(NemotronHExperts):  # type: ignore[misc]  # transformers is untyped here
    def forward(self, hidden_states: Tensor, *others: Tensor, scale: Tensor) -> Tensor:
        result: Tensor = super().forward(hidden_states, *others) * scale
        return result


@pytest.mark.parametrize("other", [Added, Normed, Bounded, WithMore])
def test_modules_with_the_same_weights_that_compute_something_else_are_no_experts(other: type) -> None:
    made = module(32, 32, 4, kind="ungated" if issubclass(other, NemotronHExperts) else "gated")
    assert experts_of(made) is not None
    made.__class__ = other
    assert experts_of(made) is None
    assert quantized_experts(made, 8) is None
    models = torch.nn.Sequential(made)
    assert replace_experts(models, backend()) == 0
    assert models[0] is made


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize(("limit", "is_plain"), [(None, True), (7.0, False), (100.0, False)])
def test_bounded_gates_are_found_before_a_token_reaches_the_bounds(
    implementation: str, limit: float | None, is_plain: bool
) -> None:
    """Step 3.7 bounds the gates of some layers."""
    config = types.SimpleNamespace(
        num_local_experts=4, hidden_size=32, moe_intermediate_size=32, hidden_act="silu",
        _experts_implementation=implementation,
    )  # fmt: skip
    assert (experts_of(Step3p7Experts(config, limit)) is not None) == is_plain


def test_normed_results_are_found() -> None:
    """Muse Spark norms them, with weights."""
    config = MuseSparkTextConfig(moe_hidden_size=32, moe_intermediate_size=32, num_local_experts=4, hidden_act="silu")
    assert experts_of(MuseSparkExperts(config)) is None


@pytest.mark.parametrize("is_patched", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_known_before_their_weights_are_loaded(kind: str, is_patched: bool) -> None:
    """Models are constructed on PyTorch's device `meta` when they are checked, and by `empty_weights` otherwise."""
    context = empty_weights() if is_patched else torch.device("meta")
    with context:
        made = transformers_module(32, 48, 4, kind)
        weights = experts_of(made)
    assert all(parameter.is_meta for parameter in made.parameters())
    assert weights is not None
    assert (weights.num_experts, weights.hidden_size, weights.mlp_size) == (4, 32, 48)
    assert weights.is_gated == (kind != "ungated")


def test_experts_that_compute_more_than_gates_are_no_experts_of_the_kernel(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the tokens of the trial are: the bound is far above them, and norms and biases are small."""

    def plain() -> Any:
        return module(32, 32, 4)

    def bounded(limit: float | None) -> Any:
        sizes = Step3p7TextConfig(hidden_size=32, n_routed_experts=4, moe_intermediate_size=32)
        return filled(Step3p7Experts(sizes, limit))

    own_rule, flagged = [plain() for _ in range(2)], [plain() for _ in range(4)]
    own_rule[0]._apply_gate = lambda both: torch.nn.functional.silu(both[:, :32].clamp(max=1e5)) * both[:, 32:]
    own_rule[1]._apply_gate = None
    for made, name in zip(flagged, ("has_gate", "has_bias", "has_post_expert_norm", "is_concatenated"), strict=True):
        setattr(made, name, not getattr(made, name))
    sizes = MuseSparkTextConfig(moe_hidden_size=32, num_local_experts=4, moe_intermediate_size=32)
    normed = filled(MuseSparkExperts(sizes))
    left = [bounded(1e-3), bounded(1e4), bounded(1e37), normed, *own_rule, *flagged]
    assert [experts_of(each) for each in left] == [None] * len(left)
    assert replace_experts(torch.nn.Sequential(*left), backend()) == 0
    assert not caplog.records, "they did not even come to a trial"
    assert [quantized_experts(each, 8) for each in left] == [None] * len(left)
    # Without a bound, the rule is the plain one.
    unbounded = bounded(None)
    given_tokens = tokens(9, 32, 4, 2)
    torch.testing.assert_close(native(unbounded)(*given_tokens), unbounded(*given_tokens), rtol=1e-4, atol=1e-5)


def test_a_bounded_activation_is_another_one() -> None:
    made = module(32, 32, 4)
    made.act_fn = ACT2FN["gelu"]
    assert experts_of(made) is not None
    for name in ("gelu_10", "relu6"):
        made.act_fn = ACT2FN[name]
        assert experts_of(made) is None


def test_other_modules_are_no_experts() -> None:
    weights = experts_of(module(32, 32, 4))
    assert weights is not None
    assert isinstance(replace(weights, num_experts=3), ExpertWeights)
    others = [module(32, 32, 4) for _ in range(5)]
    others[0].act_fn = torch.nn.Tanh()
    others[1].bias = torch.nn.Parameter(torch.zeros(3))
    others[2].down_proj = torch.nn.Parameter(torch.zeros(4, 32, 16))
    others[3].gate_up_proj = None
    others[4].up_proj = torch.nn.Parameter(torch.zeros(4, 32, 32))
    assert [experts_of(other) for other in (*others, torch.nn.Linear(4, 4))] == [None] * 6
