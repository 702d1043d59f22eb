"""Compares the CUDA path with the CPU and with itself, for `benchmarks.gpu`."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from benchmarks.gpu_peers import seconds_of
from benchmarks.gpu_steps import Run, StepDriver, largest_difference
from decoder_svc.prompt.family import DecoderFamily, load_family
from decoder_svc.runner.attention import AttentionBackend, SdpaBackend
from decoder_svc.runner.attention_trial import CODE, AttentionTrial
from decoder_svc.runner.base import ModelRunnerBase
from decoder_svc.runner.cpu.runner import CPUModelRunner
from decoder_svc.runner.cuda.flash_attention import FlashBackend, load_flash_functions
from decoder_svc.runner.cuda.paged_backend import PagedBackend
from decoder_svc.runner.kv_cache_spec import KVCacheSpec
from decoder_svc.runner.runner_config import RunnerConfig
from decoder_svc.runner.sampling.device_penalties import IN_PROMPT, penalised_logits
from lookonce.model.model_folder import ModelFolder
from lookonce.model.pretrained_tokenizer import load_pretrained

# Largest accepted distance of a log probability from that of the CPU in float32.
TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 0.25}
# A key between two codes may get the other one, and rounding all keys moves these answers by 0.2.
_ROUNDED_TOLERANCES = {torch.float32: 0.1, torch.bfloat16: 0.25}
_BLOCK_SIZES = (16, 256)


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one correctness check."""

    name: str
    passed: bool
    found: str


# A runner class, or a function that makes runners.
MakeRunner: TypeAlias = Callable[[RunnerConfig, DecoderFamily], ModelRunnerBase]


def runner_of(
    folder: pathlib.Path,
    kind: MakeRunner,
    dtype: torch.dtype,
    block_size: int = 16,
    max_num_seqs: int = 64,
    *,
    rounds_kv_cache: bool = False,
    quantize_bits: int | None = None,
) -> ModelRunnerBase:
    """Returns a runner of this kind with the folder's model."""
    family = load_family(ModelFolder.open(folder), load_pretrained(folder))
    config = RunnerConfig(folder, dtype, block_size, None, max_num_seqs=max_num_seqs, rounds_kv_cache=rounds_kv_cache)
    return kind(replace(config, quantize_bits=quantize_bits), family)


def parity(
    folder: pathlib.Path,
    kind: MakeRunner,
    prompt_tokens: int = 100,
    *,
    rounds_kv_cache: bool = False,
    quantize_bits: int | None = None,
    dtypes: Sequence[torch.dtype] = tuple(TOLERANCES),
) -> list[Check]:
    """Compares the log probabilities of greedy answers in these types with those of the CPU in float32.

    With `rounds_kv_cache`, keys and values have 8 bits on both sides; with `quantize_bits`, weights have so many.
    """
    batch, num_steps = 4, 8
    max_tokens = prompt_tokens + num_steps + 1

    def answers(kind: MakeRunner, dtype: torch.dtype, block_size: int) -> Run:
        rounding: dict[str, Any] = {"rounds_kv_cache": rounds_kv_cache, "quantize_bits": quantize_bits}
        runner = runner_of(folder, kind, dtype, block_size, batch, **rounding)
        return StepDriver(runner, batch, max_tokens).run(batch, prompt_tokens, num_steps, with_logprobs=True)

    reference = answers(CPUModelRunner, torch.float32, 16).answers
    checks = []
    tolerances = _ROUNDED_TOLERANCES if rounds_kv_cache else TOLERANCES
    for dtype in dtypes:
        tolerance = tolerances[dtype]
        for block_size in _BLOCK_SIZES:
            largest, num_places = largest_difference(reference, answers(kind, dtype, block_size).answers)
            rounded = ", keys of 8 bits" if rounds_kv_cache else ""
            rounded += f", weights of {quantize_bits} bits" if quantize_bits else ""
            name = f"log probabilities against the CPU's in float32: {_word(dtype)}, blocks of {block_size}{rounded}"
            found = f"{largest:.2g} at most in {num_places} places; {tolerance:g} passes"
            checks.append(Check(name, num_places >= batch and largest <= tolerance, found))
    return checks


def graphs_give_the_same_bits(driver: StepDriver, batch: int, context: int = 64) -> Check:
    """Compares tokens and log probabilities of a batch without padding, with graphs and without."""
    driver.use_graphs(True)
    with_graphs = driver.run(batch, context, 8, with_logprobs=True).answers
    has_graphs = driver.runner.graphs is not None
    driver.use_graphs(False)
    without = driver.run(batch, context, 8, with_logprobs=True).answers
    found = "equal" if with_graphs == without else f"{largest_difference(with_graphs, without)[0]:.2g} at most"
    return Check(
        f"graphs give the bits of steps without: batch {batch}",
        has_graphs and with_graphs == without,
        found if has_graphs else "no graphs",
    )


def overlapped_steps_give_the_same_ids(driver: StepDriver, batch: int, context: int = 64) -> Check:
    """Compares the ids of steps that are launched ahead with those of steps that wait for each other."""
    ahead = [answer.token_ids for answer in driver.run(batch, context, 16).answers]
    overlaps, driver.runner.overlaps_steps = driver.runner.overlaps_steps, False
    waiting = [answer.token_ids for answer in driver.run(batch, context, 16).answers]
    driver.runner.overlaps_steps = overlaps
    differing = sum(one != other for one, other in zip(ahead, waiting, strict=True))
    return Check(
        f"steps launched ahead give the same ids: batch {batch}", differing == 0, f"{differing} of {batch} differ"
    )


def cuda_backends(device: torch.device) -> dict[str, Callable[[], AttentionBackend]]:
    """Returns every attention backend that this machine supports."""
    found: dict[str, Callable[[], AttentionBackend]] = {"sdpa": SdpaBackend}
    try:
        from decoder_svc.runner.cuda.triton_attention import TritonBackend
    except ImportError:
        print("Triton is not installed")
    else:
        properties = torch.cuda.get_device_properties(device)
        sizes = properties.multi_processor_count, properties.shared_memory_per_block_optin
        found["triton"] = lambda: TritonBackend(*sizes)
    try:
        functions = load_flash_functions()
    except ImportError:
        print("flash-attn is not installed")
    else:
        found["flash-attn"] = lambda: FlashBackend(functions, None)
    return found


def _spec(block_size: int = 256) -> KVCacheSpec:
    """Returns the KV cache spec of one layer of a model with 8B parameters."""
    return KVCacheSpec(num_layers=1, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16, block_size=block_size)


_NUM_HEADS = 32
TRIALS = {
    "decode": [(1023, 1)] * 16,
    "long decode": [(16383, 1)] * 2,
    "chunks": [(512, 256), (0, 300), (700, 1)],
}


def backends_agree(backends: Mapping[str, Callable[[], AttentionBackend]], device: torch.device) -> list[Check]:
    """Compares each backend with the PyTorch one in bfloat16."""
    return _agree(backends, _spec(), _NUM_HEADS, device)


def _agree(
    backends: Mapping[str, Callable[[], AttentionBackend]],
    spec: KVCacheSpec,
    num_heads: int,
    device: torch.device,
    heads: str = "",
) -> list[Check]:
    checks = []
    for name, chunks in TRIALS.items():
        trial = AttentionTrial(spec, num_heads, chunks, device)
        reference = trial.prepared(SdpaBackend())()[..., : spec.value_dim].float()
        for backend, make in backends.items():
            if backend != "sdpa":
                found = trial.prepared(make())()[..., : spec.value_dim].float()
                largest = float((found - reference).abs().max())
                told = f"{largest:.2g} at most; 0.02 passes"
                checks.append(Check(f"{backend} against sdpa: {name}{heads}", largest <= 2e-2, told))
    return checks


# Heads of models with latent attention: their number, and the elements of a latent. Rotary keys have 64 elements.
LATENTS = {"Mistral Small 4": (32, 256), "Kimi K2.5": (64, 512)}
_ROTARY_DIM = 64


def latent_cells(
    backends: Mapping[str, Callable[[], AttentionBackend]], device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Iterator[Check | dict[str, Any]]:
    """Yields checks of attention over latents, and its median seconds of each backend by model and trial.

    flash-attn has no heads of these sizes.
    """
    made = {name: make for name, make in backends.items() if name != "flash-attn"}
    for model, (num_heads, value_dim) in LATENTS.items():
        spec = KVCacheSpec(1, 1, value_dim + _ROTARY_DIM, dtype, 16, value_dim=value_dim)
        yield from _agree(made, spec, num_heads, device, heads=f", heads of {model}")
        for name, chunks in TRIALS.items():
            trial = AttentionTrial(spec, num_heads, chunks, device)
            for backend, make in made.items():
                seconds = statistics.median(seconds_of(trial.prepared(make()), device))
                yield {"model": model, "step": name, "backend": backend, "attention_s": seconds}


def rounded_agrees(make: Callable[[], AttentionBackend], device: torch.device) -> list[Check]:
    """Compares attention over keys of 8 bits with PyTorch's over the same numbers, which rounding does not change."""
    checks = []
    for name, chunks in TRIALS.items():
        trial = AttentionTrial(_spec(), _NUM_HEADS, chunks, device, has_codes=True)
        reference = trial.prepared(SdpaBackend())().float()
        rounded = AttentionTrial(replace(_spec(), is_rounded=True), _NUM_HEADS, chunks, device, has_codes=True)
        backend = make()
        step = rounded.prepared(backend)
        assert isinstance(backend, PagedBackend), "the backend's pools are private"
        pools = backend.pools_of(0)
        for scales in (pools.key_scales, pools.value_scales):
            scales.fill_(CODE)
        largest = float((step().float() - reference).abs().max())
        found = f"{largest:.2g} at most; 0.02 passes"
        checks.append(Check(f"{backend.name} with keys of 8 bits against sdpa: {name}", largest <= 2e-2, found))
    return checks


# Rows and vocabulary of penalised logits.
PENALISED = (64, 151_936)


def penalties_agree(device: torch.device) -> list[Check]:
    """Compares the kernel for penalties with PyTorch's operators on the CPU, which must have the same bits."""
    try:
        from decoder_svc.runner.cuda.triton_penalties import penalised_logits as by_kernel
    except ImportError:
        return []
    num_rows, vocab = PENALISED
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(-9, 9, (num_rows, vocab), generator=generator, dtype=torch.int32).clamp_(min=0)
    counts += IN_PROMPT * torch.randint(0, 2, counts.shape, generator=generator, dtype=torch.int32)
    numbers = torch.rand(num_rows, 4, generator=generator) * 2 + 0.1
    numbers[:, 3] = torch.inf
    slots = torch.randperm(num_rows, generator=generator)
    checks = []
    for dtype in (torch.float32, torch.bfloat16):
        logits = (torch.randn(num_rows, vocab, generator=generator) * 9).to(dtype)
        arguments = (logits, counts, slots, numbers)
        found = by_kernel(*(each.to(device) for each in arguments)).cpu()
        num_other = int((found.view(torch.int32) != penalised_logits(*arguments).view(torch.int32)).sum())
        name = f"the kernel for penalties against operators on the CPU: {_word(dtype)}"
        checks.append(Check(name, num_other == 0, f"{num_other} of {found.numel()} numbers have other bits; 0 passes"))
    return checks


def attention_seconds(
    backends: Mapping[str, Callable[[], AttentionBackend]], device: torch.device
) -> dict[str, dict[str, float]]:
    """Median seconds of each backend, by trial, for a layer of an 8B model with 32 heads on 8 of 128."""
    found: dict[str, dict[str, float]] = {}
    for name, chunks in TRIALS.items():
        trial = AttentionTrial(_spec(16), _NUM_HEADS, chunks, device)
        found[name] = {
            backend: statistics.median(seconds_of(trial.prepared(make()), device))
            for backend, make in backends.items()
            if backend != "flash-attn"
        }
    return found


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
