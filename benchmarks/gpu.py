"""Is the CUDA path right, and how near to the device's limits is it? `--help` lists the options.

Most stages run the model runner and the vision half alone; `service` runs the whole system. Each figure is written to a
JSON file as soon as it is known, so that a run that ends early leaves something. Without a CUDA device it prints so and
ends.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import PIL.Image
import torch

from benchmarks import models, peer, report
from benchmarks.gpu_checks import (
    Check,
    attention_seconds,
    backends_agree,
    cuda_backends,
    graphs_give_the_same_bits,
    latent_cells,
    overlapped_steps_give_the_same_ids,
    parity,
    penalties_agree,
    rounded_agrees,
)
from benchmarks.gpu_decode import DecodeBench
from benchmarks.gpu_models import SHAPES, shaped_folder
from benchmarks.gpu_peers import continuous_batching_s, seconds_of
from benchmarks.gpu_quantized import quantized_cells
from benchmarks.gpu_recurrent import recurrent_cells
from benchmarks.gpu_section import section
from benchmarks.gpu_service import service_cells
from benchmarks.gpu_split import split_over
from benchmarks.gpu_steps import SAMPLINGS
from benchmarks.gpu_vllm import vllm_cells
from decoder_svc.runner.cuda.runner import GPUModelRunner
from encoder_svc.settings import EncoderSettings
from encoder_svc.vision.vision_model import VisionModel
from lookonce.content_key import ProcessorOptions
from lookonce.model.libraries import torchvision_import
from lookonce.server.settings_parser import parse_settings

_NAME = "gpu"
STAGES = (
    "checks",
    "decode",
    "rounded",
    "quantized",
    "recurrent",
    "latents",
    "attention",
    "encoder",
    "service",
    "split",
    "peer",
    "vllm",
)
# Few machines have several GPUs. Other engines take minutes to start, and must be installed.
_DEFAULT_STAGES = STAGES[:-3]
_BATCHES, _CONTEXTS = (1, 8, 64), (1024, 8192)
# (requests that decode, context, tokens of the new request).
_MIXED = ((32, 1024, 64), (32, 1024, 256))
_PREFILLS = ((1, 1024), (8, 1024))
_ENCODER_BATCHES = (1, 4, 16)
_IMAGE_SIDES = (448, 1036)
_CALLERS = (1, 8, 64)
# Requests in the steps whose results are compared.
_CHECKED = (8, 64)
_PEER_TOKENS = 32
# GPUs over which the stage `split` divides a model.
_NUM_RANKS = 2


class Figures:
    """All figures of a run, written to a file whenever one is added."""

    def __init__(self, path: pathlib.Path, device: str) -> None:
        self.path = path
        machine = asdict(report.this_machine())
        self.values: dict[str, Any] = {"machine": machine, "device": device, "torch": torch.__version__}

    def add(self, group: str, value: object) -> None:
        """Appends to a list of figures, prints the value and writes the file."""
        self.values.setdefault(group, []).append(value)
        print(f"{group}: {json.dumps(value)[:400]}", flush=True)
        self.path.write_text(json.dumps(self.values, indent=1) + "\n", "utf-8")


def main() -> None:
    """Runs the stages that were asked for. Exits with 1 if a check fails or a stage raises."""
    arguments = _parser().parse_args()
    if arguments.publish is not None:
        figures = json.loads(arguments.publish.read_text("utf-8"))
        report.write_json(_NAME, figures)
        report.write_section(_NAME, section(figures), report.Machine(**figures["machine"]))
        return
    if not torch.cuda.is_available():
        print("PyTorch sees no CUDA device here: there is nothing to measure, and RESULTS.md stays as it is")
        return
    device = _device()
    figures = Figures(arguments.json, torch.cuda.get_device_name(device))
    stages: dict[str, Callable[[], None]] = {
        "checks": functools.partial(_checks, figures, device),
        "decode": functools.partial(_decode, figures, device, arguments),
        "rounded": functools.partial(_rounded, figures, device, arguments),
        "quantized": functools.partial(_quantized, figures, device, arguments),
        "recurrent": functools.partial(_recurrent, figures, device),
        "latents": functools.partial(_latents, figures, device),
        "attention": lambda: figures.add("attention_s", attention_seconds(cuda_backends(device), device)),
        "encoder": functools.partial(_encoder, figures, device, arguments),
        "service": functools.partial(_service, figures, device, arguments),
        "split": functools.partial(_split, figures, device, arguments),
        "peer": functools.partial(_peer, figures, device, arguments),
        "vllm": functools.partial(_vllm, figures, device, arguments),
    }
    for name in arguments.stage:
        began_s = time.perf_counter()
        try:
            stages[name]()
        except Exception:  # the other stages have figures to give
            figures.add("errors", {"stage": name, "text": traceback.format_exc()[-3000:]})
        figures.add("stage_s", {name: round(time.perf_counter() - began_s, 1)})
        torch.cuda.empty_cache()
    failed = [check["name"] for check in figures.values.get("checks", ()) if not check["passed"]]
    if failed or "errors" in figures.values:
        raise SystemExit(f"not everything is right: {failed or 'a stage failed'}")


def _device() -> torch.device:
    return torch.device("cuda", 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=_DEFAULT_STAGES, help="in this order")
    parser.add_argument("--model", nargs="+", choices=("small", *SHAPES), default=["2b"], help="of the other stages")
    parser.add_argument("--batches", type=int, nargs="+", default=list(_BATCHES))
    parser.add_argument("--contexts", type=int, nargs="+", default=list(_CONTEXTS))
    parser.add_argument("--sampling", nargs="+", choices=SAMPLINGS, default=list(SAMPLINGS))
    parser.add_argument("--no-graphs", action="store_true", help="no comparison with steps without graphs")
    parser.add_argument("--trace", action="store_true", help="also list the kernels of a step")
    default = report.JSON_FOLDER / f"{_NAME}.json"
    parser.add_argument("--json", type=pathlib.Path, default=default, help="file for the figures (%(default)s)")
    parser.add_argument(
        "--publish", type=pathlib.Path, help="only take over such a file and write its section of RESULTS.md"
    )
    folder = pathlib.Path(tempfile.gettempdir()) / "lookonce-gpu-models"
    parser.add_argument("--folder", type=pathlib.Path, default=folder, help="folder for large models (%(default)s)")
    peer.add_arguments(parser)
    parser.add_argument("--peer-options", type=json.loads, default={}, help="JSON: further arguments of vllm.LLM")
    return parser


def _folder_of(name: str, arguments: argparse.Namespace, device: torch.device) -> pathlib.Path:
    return models.small_llava() if name == "small" else shaped_folder(name, arguments.folder, device)


def _checks(figures: Figures, device: torch.device) -> None:
    folder = models.small_llava(torch.bfloat16)
    for check in backends_agree(cuda_backends(device), device):
        figures.add("checks", asdict(check))
    for check in penalties_agree(device):
        figures.add("checks", asdict(check))
    bench = DecodeBench("small", folder, GPUModelRunner, max_batch=max(_CHECKED), max_tokens=128)
    figures.add("backend", {"small": bench.driver.runner.backend.name})
    for batch in _CHECKED:
        figures.add("checks", asdict(overlapped_steps_give_the_same_ids(bench.driver, batch)))
    for batch in _CHECKED:
        figures.add("checks", asdict(graphs_give_the_same_bits(bench.driver, batch)))
    del bench
    for check in parity(folder, GPUModelRunner):
        figures.add("checks", asdict(check))


def _decode(figures: Figures, device: torch.device, arguments: argparse.Namespace) -> None:
    for name in arguments.model:
        began_s = time.perf_counter()
        folder = _folder_of(name, arguments, device)
        written_s = time.perf_counter()
        bench = DecodeBench(name, folder, GPUModelRunner, max(arguments.batches), max(arguments.contexts) + 256)
        loaded_s = time.perf_counter()
        started = {"model": name, "write_s": written_s - began_s, "load_and_record_s": loaded_s - written_s}
        figures.add("starts", started | bench.limits)
        for with_graphs in (True,) if arguments.no_graphs else (True, False):
            if not with_graphs:
                bench.driver.use_graphs(False)
            for context in arguments.contexts:
                for batch in arguments.batches:
                    for sampling in arguments.sampling:
                        figures.add("decode", asdict(bench.decode(batch, context, sampling)))
            for batch, context, chunk in _MIXED:
                if batch <= max(arguments.batches) and context <= max(arguments.contexts):
                    figures.add("mixed", asdict(bench.mixed(batch, context, chunk)))
            if arguments.trace:
                _trace(figures, bench, max(arguments.batches), min(arguments.contexts))
        for batch, tokens in _PREFILLS:
            if batch <= max(arguments.batches) and tokens <= max(arguments.contexts):
                figures.add("prefill", asdict(bench.prefill(batch, tokens)))
        del bench
        torch.cuda.empty_cache()


def _rounded(figures: Figures, device: torch.device, arguments: argparse.Namespace) -> None:
    """Checks and times keys and values of 8 bits."""
    small = models.small_llava(torch.bfloat16)
    for check in rounded_agrees(cuda_backends(device)["triton"], device):
        figures.add("checks", asdict(check))
    for check in parity(small, GPUModelRunner, rounds_kv_cache=True):
        figures.add("checks", asdict(check))
    bench = DecodeBench("small", small, GPUModelRunner, max(_CHECKED), max_tokens=128, rounds_kv_cache=True)
    for batch in _CHECKED:
        check = graphs_give_the_same_bits(bench.driver, batch)
        figures.add("checks", asdict(replace(check, name=f"{check.name}, keys of 8 bits")))
    del bench
    for name in arguments.model:
        longest = max(arguments.contexts)
        folder = _folder_of(name, arguments, device)
        bench = DecodeBench(name, folder, GPUModelRunner, max(arguments.batches), longest + 1, rounds_kv_cache=True)
        for context in arguments.contexts:
            for batch in arguments.batches:
                figures.add("decode", asdict(bench.decode(batch, context, "greedy")))
        del bench
        torch.cuda.empty_cache()


def _quantized(figures: Figures, device: torch.device, arguments: argparse.Namespace) -> None:
    """Checks and times weights of 8 and 4 bits."""
    for cell in quantized_cells(device):
        if isinstance(cell, Check):
            figures.add("checks", asdict(cell))
        else:
            figures.add("products", cell)
    small = models.small_llava(torch.bfloat16)
    for bits in (8, 4):
        for check in parity(small, GPUModelRunner, quantize_bits=bits):
            figures.add("checks", asdict(check))
    context = min(arguments.contexts)
    for name in arguments.model:
        folder = _folder_of(name, arguments, device)
        for bits in (8, 4):
            began_s = time.perf_counter()
            bench = DecodeBench(name, folder, GPUModelRunner, max(arguments.batches), context + 1, quantize_bits=bits)
            loaded = {"model": f"{name}, weights of {bits} bits", "load_and_record_s": time.perf_counter() - began_s}
            figures.add("starts", loaded)
            for batch in arguments.batches:
                figures.add("decode", asdict(bench.decode(batch, context, "greedy")))
            del bench
            torch.cuda.empty_cache()


def _recurrent(figures: Figures, device: torch.device) -> None:
    """Checks and times recurrent layers, and checks the answers of tiny models that have them."""
    for cell in recurrent_cells(device):
        if isinstance(cell, Check):
            figures.add("checks", asdict(cell))
        else:
            figures.add("recurrent", cell)
    with tempfile.TemporaryDirectory() as base:
        # Imported late: other stages need no tests.
        from tests.tiny_families import nemotron_h_omni, qwen3_5

        folders = {"gated delta nets": qwen3_5.build(pathlib.Path(base) / "delta")}
        if torchvision_import.is_installed():
            kinds = ["linear_attention", "mlp", "full_attention", "linear_attention"]
            text = {"layers_block_type": kinds}
            folders["Mamba2"] = nemotron_h_omni.build(pathlib.Path(base) / "mamba2", text=text)
        for name, folder in folders.items():
            for check in parity(folder, GPUModelRunner):
                figures.add("checks", asdict(replace(check, name=f"{check.name}, {name}")))


def _latents(figures: Figures, device: torch.device) -> None:
    """Checks and times attention over latents, and checks the answers of a tiny model that has it."""
    for cell in latent_cells(cuda_backends(device), device):
        if isinstance(cell, Check):
            figures.add("checks", asdict(cell))
        else:
            figures.add("latents", cell)
    with tempfile.TemporaryDirectory() as base:
        # Imported late: other stages need no tests.
        from tests.tiny_families import mistral4

        # Rounding to bfloat16 gives some of its tokens to other experts.
        for check in parity(mistral4.build(pathlib.Path(base) / "model"), GPUModelRunner, dtypes=(torch.float32,)):
            figures.add("checks", asdict(replace(check, name=f"{check.name}, latents")))


def _trace(figures: Figures, bench: DecodeBench, batch: int, context: int) -> None:
    for sampling, chunk in (("greedy", 0), ("sampled", 0), ("greedy", 64)):
        of_step = f"batch {batch if not chunk else batch // 2}, {sampling}, chunk of {chunk}"
        kernels = bench.trace(batch if not chunk else batch // 2, context, sampling, chunk)
        rows = [[each.name, round(each.calls, 1), round(each.device_us, 1)] for each in kernels]
        figures.add("traces", {"step": of_step, "graphs": bench.has_graphs, "kernels": rows})


def _encoder(figures: Figures, device: torch.device, arguments: argparse.Namespace) -> None:
    for name in arguments.model:
        folder = _folder_of(name, arguments, device)
        for side in _IMAGE_SIDES:
            for batch, rate in encoder_rates(folder, _ENCODER_BATCHES, side).items():
                figures.add("encoder", {"model": name, "side": side, "batch": batch, "images_per_s": rate})


def encoder_rates(
    folder: pathlib.Path, batches: Sequence[int], side: int = 448, device: str = "cuda"
) -> dict[str, float]:
    """Returns images per second of the vision half by batch size, from prepared pixels to rows in main memory."""
    settings = parse_settings(EncoderSettings, ["--model", str(folder), "--device", device], "encoder_svc")
    model = VisionModel.load(settings.vision)
    pixels = model.adapter.pixel_inputs(PIL.Image.new("RGB", (side, side), (90, 120, 30)), ProcessorOptions())
    found = {}
    for batch in batches:
        seconds = seconds_of(functools.partial(model.forward, [pixels] * batch), torch.device("cpu"))
        found[str(batch)] = batch / statistics.median(seconds)
    return found


def _service(figures: Figures, device: torch.device, arguments: argparse.Namespace) -> None:
    for name in arguments.model:
        for cell in service_cells(_folder_of(name, arguments, device), _CALLERS):
            figures.add("service", {"model": name} | cell)


def _split(figures: Figures, device: torch.device, arguments: argparse.Namespace) -> None:
    batches, context = arguments.batches, min(arguments.contexts)
    with split_over(_NUM_RANKS, GPUModelRunner, "cuda") as make:
        for check in parity(models.small_llava(torch.bfloat16), make):
            figures.add("checks", asdict(replace(check, name=f"{_NUM_RANKS} GPUs: {check.name}")))
        for name in arguments.model:
            folder = _folder_of(name, arguments, device)
            for number, kind in ((1, GPUModelRunner), (_NUM_RANKS, make)):
                bench = DecodeBench(name, folder, kind, max(batches), context + 256)
                figures.add("checks", asdict(overlapped_steps_give_the_same_ids(bench.driver, max(batches))))
                for batch in batches:
                    cell = bench.decode(batch, context, arguments.sampling[0])
                    figures.add("split", {"num_gpus": number} | asdict(cell))
                del bench
                torch.cuda.empty_cache()


def _peer(figures: Figures, device: torch.device, arguments: argparse.Namespace) -> None:
    for name in arguments.model:
        folder = _folder_of(name, arguments, device)
        bench = DecodeBench(name, folder, GPUModelRunner, max(arguments.batches), min(arguments.contexts) + 256)
        prompt = min(arguments.contexts)
        ours = {batch: bench.whole_s(batch, prompt, _PEER_TOKENS) for batch in arguments.batches}
        del bench
        torch.cuda.empty_cache()
        for batch, seconds in ours.items():
            theirs = continuous_batching_s(folder, device, batch, prompt, _PEER_TOKENS)
            cell = {"model": name, "batch": batch, "prompt": prompt, "tokens": _PEER_TOKENS}
            figures.add("peer", cell | {"ours_s": seconds, "transformers_s": theirs})


def _vllm(figures: Figures, device: torch.device, arguments: argparse.Namespace) -> None:
    install = peer.named_peer(arguments)
    if install is None:
        raise peer.PeerError("stage vllm: --peer-python names no installation of vLLM")
    for name in arguments.model:
        folder = _folder_of(name, arguments, device)
        for cell in vllm_cells(folder, install, _CALLERS, min(arguments.contexts), arguments.peer_options):
            figures.add("vllm", {"model": name} | cell)


if __name__ == "__main__":
    main()
