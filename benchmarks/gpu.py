"""Is the CUDA path right, and how near to the device's limits is it? `--help` lists the options.

Runs the model runner alone on small-llava, without scheduler and services. Without a CUDA device it prints so and ends.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import PIL.Image
import torch

from benchmarks import models, report
from benchmarks.gpu_peers import continuous_batching_s, matrix_peak, memory_bandwidth, seconds_of
from benchmarks.gpu_steps import Run, StepDriver, largest_difference
from decoder_svc.prompt.family import load_family
from decoder_svc.runner.attention import AttentionBackend, KVCacheSpec, SdpaBackend
from decoder_svc.runner.attention_trial import AttentionTrial
from decoder_svc.runner.base import ModelRunnerBase, RunnerConfig
from decoder_svc.runner.cpu.runner import CPUModelRunner
from decoder_svc.runner.cuda.flash_attention import FlashBackend, load_flash_functions
from decoder_svc.runner.cuda.runner import GPUModelRunner
from encoder_svc.settings import EncoderSettings
from encoder_svc.vision.vision_model import VisionModel
from lookonce.content_key import ProcessorOptions
from lookonce.model.model_folder import ModelFolder
from lookonce.model.pretrained_tokenizer import load_pretrained
from lookonce.server.settings_parser import parse_settings

_NAME = "gpu"
# Largest accepted distance of a log probability from that of the CPU in float32.
TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 0.25}
_BATCHES, _CONTEXTS = (1, 8, 32, 64), (64, 1024)
_MAX_TOKENS = 1200
_NUM_STEPS = 30
_NUM_ROUNDS = 5
_BLOCK_SIZES = (16, 256)
_ENCODER_BATCHES = (1, 4, 16, 64)


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one correctness check."""

    name: str
    passed: bool
    found: str


@dataclass(frozen=True, slots=True)
class DecodeCell:
    """One batch with one length of context, in bfloat16."""

    batch: int
    context: int
    # Median step with graphs and without, and of the whole prompt, seconds.
    graphs_s: float
    eager_s: float
    prefill_s: float
    # Bytes that a step must read, over what the device reads in a second; seconds.
    memory_limit_s: float
    # Operations of the prompts' matrix products over the device's; seconds.
    matrix_limit_s: float
    # Prompts and _NUM_STEPS + 1 tokens each: our seconds, and those of transformers or the reason why they are missing.
    whole_s: float
    peer_s: float | str


def main() -> None:
    """Runs all checks and writes JSON and the section of RESULTS.md. Without a device it only prints a message."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=list(_BATCHES))
    parser.add_argument("--contexts", type=int, nargs="+", default=list(_CONTEXTS))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("PyTorch sees no CUDA device here: there is nothing to measure, and RESULTS.md stays as it is")
        return
    device = torch.device("cuda", 0)
    folder = models.small_llava(torch.bfloat16)
    checks = [*parity(folder, GPUModelRunner), *backends_agree(cuda_backends(device), device)]
    bench = DecodeBench(folder, GPUModelRunner, max(arguments.batches))
    checks.append(bench.graphs_give_the_same_bits(min(8, max(arguments.batches))))
    for check in checks:
        print(_check_row(check), flush=True)
    cells = [bench.measure(batch, context) for context in arguments.contexts for batch in arguments.batches]
    attention = attention_seconds(cuda_backends(device), device)
    encoder = encoder_rates(folder, _ENCODER_BATCHES)
    figures = {
        "device": torch.cuda.get_device_name(device),
        "backend": bench.driver.runner.backend.name,
        "checks": [asdict(check) for check in checks],
        "cells": [asdict(cell) for cell in cells],
        "attention_s": attention,
        "encoder_images_per_s": encoder,
    }
    text = section(torch.cuda.get_device_name(device), checks, cells, attention, encoder)
    report.publish(_NAME, figures, text, is_quick=False)
    if not all(check.passed for check in checks):
        raise SystemExit("not everything is right; see above")


def runner_of(
    folder: pathlib.Path, kind: type[ModelRunnerBase], dtype: torch.dtype, block_size: int = 16, max_num_seqs: int = 64
) -> ModelRunnerBase:
    """Returns a runner of this kind with the folder's model."""
    family = load_family(ModelFolder.open(folder), load_pretrained(folder))
    return kind(RunnerConfig(folder, dtype, block_size, None, max_num_seqs=max_num_seqs), family)


def parity(folder: pathlib.Path, kind: type[ModelRunnerBase], prompt_tokens: int = 100) -> list[Check]:
    """Compares the log probabilities of greedy answers with those of the CPU in float32."""
    batch, num_steps = 4, 8
    max_tokens = prompt_tokens + num_steps + 1

    def answers(kind: type[ModelRunnerBase], dtype: torch.dtype, block_size: int) -> Run:
        driver = StepDriver(runner_of(folder, kind, dtype, block_size, batch), batch, max_tokens)
        return driver.run(batch, prompt_tokens, num_steps, with_logprobs=True)

    reference = answers(CPUModelRunner, torch.float32, 16).answers
    checks = []
    for dtype, tolerance in TOLERANCES.items():
        for block_size in _BLOCK_SIZES:
            largest, num_places = largest_difference(reference, answers(kind, dtype, block_size).answers)
            name = f"log probabilities against the CPU's in float32: {_word(dtype)}, blocks of {block_size}"
            found = f"{largest:.2g} at most in {num_places} places; {tolerance:g} passes"
            checks.append(Check(name, num_places >= batch and largest <= tolerance, found))
    return checks


def cuda_backends(device: torch.device) -> dict[str, Callable[[], AttentionBackend]]:
    """Returns every attention backend that this machine supports."""
    found: dict[str, Callable[[], AttentionBackend]] = {"sdpa": SdpaBackend}
    try:
        from decoder_svc.runner.cuda.triton_attention import TritonBackend
    except ImportError:
        print("Triton is not installed")
    else:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        found["triton"] = lambda: TritonBackend(processors)
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
_TRIALS = {
    "decode": [(1023, 1)] * 16,
    "long decode": [(16383, 1)] * 2,
    "chunks": [(512, 256), (0, 300), (700, 1)],
}


def backends_agree(backends: Mapping[str, Callable[[], AttentionBackend]], device: torch.device) -> list[Check]:
    """Compares each backend with the PyTorch one in bfloat16."""
    checks = []
    for name, chunks in _TRIALS.items():
        trial = AttentionTrial(_spec(), _NUM_HEADS, chunks, device)
        reference = trial.prepared(SdpaBackend())().float()
        for backend, make in backends.items():
            if backend != "sdpa":
                largest = float((trial.prepared(make())().float() - reference).abs().max())
                checks.append(
                    Check(f"{backend} against sdpa: {name}", largest <= 2e-2, f"{largest:.2g} at most; 0.02 passes")
                )
    return checks


def attention_seconds(
    backends: Mapping[str, Callable[[], AttentionBackend]], device: torch.device
) -> dict[str, dict[str, float]]:
    """Median seconds of each backend, by trial."""
    found: dict[str, dict[str, float]] = {}
    for name, chunks in _TRIALS.items():
        trial = AttentionTrial(_spec(), _NUM_HEADS, chunks, device)
        found[name] = {
            backend: statistics.median(seconds_of(trial.prepared(make()), device)) for backend, make in backends.items()
        }
    return found


class DecodeBench:
    """One model in bfloat16 with one KV pool, decoding with graphs and without."""

    def __init__(
        self, folder: pathlib.Path, kind: type[ModelRunnerBase], max_batch: int, max_tokens: int = _MAX_TOKENS
    ) -> None:
        self._folder = folder
        runner = runner_of(folder, kind, torch.bfloat16, max_num_seqs=max_batch)
        self.driver = StepDriver(runner, max_batch, max_tokens)
        parameters = [
            parameter
            for name, parameter in runner.get_model().named_parameters()
            # A step reads one row of the embedding table per token, unless the table is the head as well.
            if "embed_tokens" not in name or runner.get_model().config.get_text_config().tie_word_embeddings
        ]
        self._weight_bytes = sum(parameter.nbytes for parameter in parameters)
        self._num_weights: int = sum(parameter.numel() for parameter in parameters)
        # Only the last token of a prompt passes the head.
        text = runner.get_model().config.get_text_config()
        self._num_head_weights: int = text.hidden_size * text.vocab_size
        self._bandwidth = memory_bandwidth(runner.device)
        self._matrix_peak = matrix_peak(runner.device)

    def graphs_give_the_same_bits(self, batch: int, context: int = 64) -> Check:
        """Compares tokens and log probabilities of a batch without padding, with graphs and without."""
        self.driver.use_graphs(True)
        with_graphs = self.driver.run(batch, context, 8, with_logprobs=True).answers
        has_graphs = self.driver.runner.graphs is not None
        self.driver.use_graphs(False)
        without = self.driver.run(batch, context, 8, with_logprobs=True).answers
        found = "equal" if with_graphs == without else f"{largest_difference(with_graphs, without)[0]:.2g} at most"
        passed = has_graphs and with_graphs == without
        return Check(
            f"graphs give the bits of steps without: batch {batch}", passed, found if has_graphs else "no graphs"
        )

    def measure(self, batch: int, context: int, num_steps: int = _NUM_STEPS) -> DecodeCell:
        """Measures with graphs, then without: recording takes longer than a round. The first round warms the caches."""
        runs: dict[bool, list[Run]] = {True: [], False: []}
        for wanted in (True, False):
            self.driver.use_graphs(wanted)
            runs[wanted] = [self.driver.run(batch, context, num_steps) for _ in range(_NUM_ROUNDS + 1)][1:]
        step_s = {
            wanted: statistics.median(second for run in of_kind for second in run.decode_s)
            for wanted, of_kind in runs.items()
        }
        spec = self.driver.runner.get_kv_cache_spec()
        kv_bytes = batch * context * spec.block_bytes // spec.block_size
        whole_s = statistics.median(run.prefill_s + sum(run.decode_s) for run in runs[True])
        device = self.driver.runner.device
        return DecodeCell(
            batch=batch,
            context=context,
            graphs_s=step_s[True],
            eager_s=step_s[False],
            prefill_s=statistics.median(run.prefill_s for run in runs[True]),
            memory_limit_s=(self._weight_bytes + kv_bytes) / self._bandwidth,
            matrix_limit_s=2 * batch * self._multiplied_weights(context) / self._matrix_peak,
            whole_s=whole_s,
            peer_s=continuous_batching_s(self._folder, device, batch, context, num_steps + 1),
        )

    def _multiplied_weights(self, num_tokens: int) -> int:
        """Returns the number of weights that each token of a prompt is multiplied with."""
        return (self._num_weights - self._num_head_weights) * num_tokens + self._num_head_weights


def encoder_rates(folder: pathlib.Path, batches: Sequence[int], device: str = "cuda") -> dict[str, float]:
    """Returns images per second of the vision half by batch size, from prepared pixels to rows in main memory."""
    settings = parse_settings(EncoderSettings, ["--model", str(folder), "--device", device], "encoder_svc")
    model = VisionModel.load(settings.vision)
    pixels = model.adapter.pixel_inputs(PIL.Image.new("RGB", (640, 480), (90, 120, 30)), ProcessorOptions())
    found = {}
    for batch in batches:
        seconds = seconds_of(functools.partial(model.forward, [pixels] * batch), torch.device("cpu"))
        found[str(batch)] = batch / statistics.median(seconds)
    return found


def section(
    device: str,
    checks: Sequence[Check],
    cells: Sequence[DecodeCell],
    attention_s: dict[str, dict[str, float]],
    encoder: dict[str, float],
) -> str:
    """Returns the Markdown of this section of RESULTS.md."""
    parts = [
        "## gpu\n\nIs the CUDA path right, and how near to the device's limits is it? "
        f"{device}, small-llava in bfloat16.",
        report.table(["check", "", "found"], [_check_row(check) for check in checks]),
        report.table(
            ["batch", "context", "step", "without graphs", "of the memory's speed", "prefill", "of the matrix peak",
             "transformers ÷ ours"],
            [_cell_row(cell) for cell in cells],
        ),
        "Attention of one layer of an 8B model (32 heads on 8 of 128), µs by backend:",
        report.table(
            ["step", *next(iter(attention_s.values()))],
            [[name, *(f"{1e6 * each:.0f}" for each in of_trial.values())] for name, of_trial in attention_s.items()],
        ),
        "Images per second of the encoder's forward pass, by batch: "
        + ", ".join(f"{batch}: {rate:.0f}" for batch, rate in encoder.items()) + ".",
    ]  # fmt: skip
    return "\n\n".join(parts)


def _check_row(check: Check) -> list[str]:
    return [check.name, "passed" if check.passed else "**failed**", check.found]


def _cell_row(cell: DecodeCell) -> list[str]:
    peer = cell.peer_s if isinstance(cell.peer_s, str) else f"{cell.peer_s / cell.whole_s:.2f}"
    return [
        str(cell.batch),
        str(cell.context),
        f"{1000 * cell.graphs_s:.2f} ms",
        f"{cell.eager_s / cell.graphs_s:.2f} ×",
        f"{100 * cell.memory_limit_s / cell.graphs_s:.0f} %",
        f"{1000 * cell.prefill_s:.1f} ms",
        f"{100 * cell.matrix_limit_s / cell.prefill_s:.0f} %",
        peer,
    ]


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()
