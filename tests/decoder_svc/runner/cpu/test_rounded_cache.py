"""Keys and values of 8 bits: the kernel against loops over rounded numbers, and whole models that use it."""

from __future__ import annotations

import pathlib
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from decoder_svc.runner.attention import LayerOptions
from decoder_svc.runner.cpu.attention import HostSdpaBackend
from decoder_svc.runner.kv_cache_spec import KVCacheSpec
from decoder_svc.scheduling.window import Window
from lookonce.errors import ConfigurationError
from tests import tiny_models
from tests.decoder_svc.runner.attention_reference import Chunk
from tests.decoder_svc.runner.attention_step import LAYER, Sizes, Step, StepCase
from tests.decoder_svc.runner.cpu.test_attention import Native, any_native_step, keys_in, values_in
from tests.decoder_svc.runner.rounded_numbers import check_rounded, codes_of, scales_of
from tests.parity import offline

pytestmark = pytest.mark.usefixtures("library")

NUM_PROMPTS = 12
BLOCK_SIZE = 8


class RoundedNative(Native):
    """The kernel with rounded pools, which are filled from pools in token order."""

    def allocate(
        self, spec: KVCacheSpec, num_blocks: int, num_sliding_blocks: int, device: torch.device
    ) -> list[tuple[Tensor, Tensor]]:
        return super().allocate(replace(spec, is_rounded=True), num_blocks, num_sliding_blocks, device)

    def _fill(self, layer: int) -> None:
        for plain, own, arranged in zip(self._plain[layer], self._tensors[layer], (keys_in, values_in), strict=True):
            room = torch.full((len(plain), own.shape[2], *plain.shape[2:]), torch.nan, dtype=plain.dtype)
            room[:, : plain.shape[1]] = plain
            # The order of codes is that of elements of the model's type, which hold them for the moment.
            codes = arranged(codes_of(room).to(plain.dtype)).reshape(*own.shape[:2], -1).to(torch.int8)
            scales = scales_of(room)[..., 0].transpose(1, 2).contiguous().view(torch.int8)
            own.copy_(torch.cat((codes, scales), dim=2).view(own.shape))


@settings(max_examples=200)
@any_native_step
def test_any_step_equals_the_reference_over_rounded_numbers(case: StepCase) -> None:
    window = case.options.window if case.has_sliding_group else None
    step = Step(case.chunks, case.sizes, case.seed, case.dtype, window, RoundedNative)
    check_rounded(step, case.options, is_mutual_beyond_window=case.is_mutual_beyond_window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, Window(300), Window(300, is_chunked=True)])
def test_long_contexts_in_blocks_that_no_piece_ends_with(dtype: torch.dtype, window: Window | None) -> None:
    sizes = Sizes(48, 3, 3, 64)
    chunks = [Chunk(stop, stop - 1, stop - 1, stop) for stop in (1, 255, 256, 257, 800)] + [Chunk(300, 290, 290, 300)]
    check_rounded(Step(chunks, sizes, 5, dtype, backend=RoundedNative), LayerOptions(0.125, window))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_number_that_is_none_stays_in_its_sequence(poison: float) -> None:
    """One sequence's NaN reaches neither the scales nor the codes of the next one."""
    chunks = [Chunk(70, 69, 69, 70), Chunk(5, 4, 4, 5), Chunk(33, 0, 0, 33)]
    step, clean = (Step(chunks, Sizes(16, 2, 2, 32), 3, torch.float32, backend=RoundedNative) for _ in range(2))
    for pool in step.pools[LAYER]:
        pool[step.tables[0][1], 3, 0, 7] = poison
    outputs, wanted = step.run(LayerOptions(0.2)), clean.run(LayerOptions(0.2))
    assert outputs[0][:, :2].isnan().all(), "heads that share the key head"
    assert torch.equal(outputs[0][:, 2:], wanted[0][:, 2:])
    for output, want in zip(outputs[1:], wanted[1:], strict=True):
        assert torch.equal(output, want)


@pytest.fixture(scope="module", params=sorted(tiny_models.BUILDERS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> offline.OfflineModel:
    folder = tmp_path_factory.mktemp("models") / request.param
    tiny_models.BUILDERS[request.param](folder)
    built = offline.build(folder, NUM_PROMPTS, (0, 1, 3), BLOCK_SIZE)
    runner = built.runner
    return replace(built, runner=type(runner)(replace(runner.config, rounds_kv_cache=True), runner.family))


def test_hits_chunks_and_preemptions_change_no_bit(model: offline.OfflineModel) -> None:
    """Keys and values that are read from the cache were rounded in the same way as new ones."""
    prompts = [question.prompt for question in model.questions]
    session = offline.Session(model, num_blocks=20_000, cache_rows=2000, deterministic=True)
    first = session.ask(prompts, logprobs=3)
    again = session.ask(prompts, logprobs=3)
    assert any(request.usage.cached_prompt_tokens > 0 for request in again.requests)
    assert again.token_ids == first.token_ids
    assert again.logprobs == first.logprobs
    longest = max(len(prompt.token_ids) for prompt in prompts) + offline.MAX_NEW_TOKENS
    small = offline.Session(model, num_blocks=-(-longest // BLOCK_SIZE) + 3, cache_rows=2000, max_num_batched_tokens=64)
    squeezed = small.ask(prompts, logprobs=3)
    assert any(request.num_preemptions > 0 for request in squeezed.requests)
    assert squeezed.token_ids == first.token_ids


def test_answers_are_close_to_those_of_a_whole_cache(model: offline.OfflineModel) -> None:
    """The first token of each answer has nearly the same probability; random weights make later ones drift apart."""
    prompts = [question.prompt for question in model.questions]
    whole = offline.Session(
        replace(
            model, runner=type(model.runner)(replace(model.runner.config, rounds_kv_cache=False), model.runner.family)
        ),
        cache_rows=2000,
    ).ask(prompts, max_tokens=1, logprobs=1)
    found = offline.Session(model, cache_rows=2000).ask(prompts, max_tokens=1, logprobs=1)
    differences = [
        abs(one[0].top[0][1] - other[0].top[0][1])  # type: ignore[union-attr]
        for one, other in zip(whole.logprobs, found.logprobs, strict=True)
    ]
    assert max(differences) > 0, "the cache was not rounded"
    assert statistics.median(differences) < 0.02, differences
    assert max(differences) < 0.1, differences


def test_a_block_takes_about_half_of_the_memory(model: offline.OfflineModel) -> None:
    spec = model.runner.get_kv_cache_spec()
    assert spec.is_rounded
    whole = replace(spec, is_rounded=False)
    assert spec.block_bytes / whole.block_bytes == (spec.head_dim + 4) / (4 * spec.head_dim)
    model.runner.initialize_kv_cache(7, 5)
    pools = model.runner.backend._tensors  # type: ignore[attr-defined]
    full = [pair for layer, pair in enumerate(pools) if layer not in spec.sliding_layers]
    assert sum(pool.nbytes for pair in full for pool in pair) == 8 * spec.block_bytes


def test_a_backend_that_cannot_round_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = offline.build(tiny_models.build_llava_clip(tmp_path / "model"), 0, (0,)).runner
    monkeypatch.setattr("decoder_svc.runner.cpu.runner.cpu_attention", lambda *_: HostSdpaBackend())
    with pytest.raises(ConfigurationError, match="kv_cache_dtype int8 is not offered by the attention backend sdpa"):
        type(runner)(replace(runner.config, rounds_kv_cache=True), runner.family)
