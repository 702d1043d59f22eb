"""`make bench-gpu` without a GPU, and its parts on a device with graphs that runs anywhere."""

from __future__ import annotations

import functools
import json
import math
import pathlib
import sys
from collections.abc import Callable

import pytest
import torch

from benchmarks import gpu, gpu_checks, gpu_decode, gpu_quantized, gpu_recurrent, report
from benchmarks.gpu_models import SHAPES, shaped_folder
from benchmarks.gpu_peers import matrix_peak, memory_bandwidth
from benchmarks.gpu_section import section
from benchmarks.gpu_service import service_cells
from benchmarks.gpu_split import split_over
from benchmarks.gpu_steps import SAMPLINGS, Answer, StepDriver, fill, largest_difference
from benchmarks.gpu_vllm import vllm_cells
from benchmarks.peer import PeerInstall
from decoder_svc.runner.attention import AttentionBackend, SdpaBackend
from decoder_svc.runner.cpu.runner import CPUModelRunner
from decoder_svc.runner.cuda.paged_backend import LayerPools
from decoder_svc.scheduling.scheduler_output import SampledToken, SchedulerOutput
from lookonce.errors import ConfigurationError
from tests.decoder_svc.runner.recording_runner import RecordingRunner
from tests.decoder_svc.runner.tensor_backend import TensorBackend
from tests.tiny_families import FAMILIES
from tests.tiny_models import build_llava_clip

CPU = torch.device("cpu")


class AheadRunner(RecordingRunner):
    """Launches steps ahead, as a GPU does."""

    overlaps_steps = True


class RecurrentRunner(RecordingRunner):
    """Computes recurrent layers with PyTorch's operators."""

    serves_recurrent_layers = True


class ForgetfulRunner(RecurrentRunner):
    """Loses the states of recurrent layers behind each step."""

    def execute_model(self, scheduled: SchedulerOutput) -> list[SampledToken]:
        tokens = super().execute_model(scheduled)
        assert self.recurrent is not None
        self.recurrent.allocate(self.recurrent.sizes, self.device)
        return tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return build_llava_clip(tmp_path_factory.mktemp("models") / "llava")


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return shaped_folder("tiny", tmp_path_factory.mktemp("models"), CPU)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_decode, "memory_bandwidth", lambda _device: 1e9)
    monkeypatch.setattr(gpu_decode, "matrix_peak", lambda _device: 1e12)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so there is something to measure")
def test_without_a_gpu_it_says_so_and_nothing_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = report.RESULTS.read_text("utf-8")
    monkeypatch.setattr(sys, "argv", ["gpu"])
    gpu.main()
    assert "no CUDA device" in capsys.readouterr().out
    assert report.RESULTS.read_text("utf-8") == before


@pytest.mark.usefixtures("limits")
def test_every_stage_leaves_figures_that_make_a_section(
    folder: pathlib.Path, install: PeerInstall, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is this processor; everything else is as on a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "a pretended device")
    monkeypatch.setattr(gpu, "_device", lambda: CPU)
    monkeypatch.setattr(gpu, "GPUModelRunner", AheadRunner)
    monkeypatch.setattr(gpu, "cuda_backends", lambda _device: {"sdpa": SdpaBackend, "tensor": TensorBackend})
    monkeypatch.setattr(gpu_checks, "TRIALS", {"decode": [(20, 1)]})
    monkeypatch.setattr(gpu_checks, "PENALISED", (2, 1500))
    monkeypatch.setattr("benchmarks.models.small_llava", lambda _dtype=None: folder)
    # Attention by plain tensor operations takes minutes for 64 requests.
    monkeypatch.setattr(gpu, "_CHECKED", (2, 4))
    monkeypatch.setattr(gpu, "_MIXED", ((2, 32, 4),))
    monkeypatch.setattr(gpu, "_PREFILLS", ((1, 16),))
    monkeypatch.setattr(gpu, "_ENCODER_BATCHES", (1, 2))
    monkeypatch.setattr(gpu, "_IMAGE_SIDES", (56,))
    monkeypatch.setattr(gpu, "_CALLERS", (2,))
    monkeypatch.setattr(gpu, "service_cells", functools.partial(service_cells, num_tokens=4, device="cpu"))
    monkeypatch.setattr(gpu, "continuous_batching_s", lambda *_arguments: "not asked")
    file = tmp_path / "figures.json"
    monkeypatch.setattr(gpu, "encoder_rates", functools.partial(gpu.encoder_rates, device="cpu"))
    # Keys of 8 bits, quantized weights and kernels of recurrent layers need Triton, and ranks two devices.
    stages = [stage for stage in gpu.STAGES if stage not in ("rounded", "quantized", "recurrent", "split")]
    monkeypatch.setattr(gpu, "vllm_cells", functools.partial(vllm_cells, num_tokens=4, device="cpu"))
    options = [
        "--stage",
        *stages,
        "--peer-python",
        str(install.python),
        "--model",
        "tiny",
        "--batches",
        "1",
        "4",
        "--contexts",
        "32",
    ]
    monkeypatch.setattr(sys, "argv", ["gpu", *options, "--json", str(file), "--folder", str(tmp_path)])
    gpu.main()
    figures = json.loads(file.read_text("utf-8"))
    assert len(figures["decode"]) == 2 * 2 * 2
    assert {row["has_graphs"] for row in figures["mixed"]} == {True, False}
    assert [*figures["stage_s"][-1]] == ["vllm"]
    started, *answered, steps = figures["vllm"]
    assert started["version"] == "0.0"
    assert [(row["callers"], row["reuse"]) for row in answered] == [(2, 0.0), (2, 1.0)]
    # The stand-in needs 2 s for what follows the first token.
    assert steps["theirs_s"] == [pytest.approx(2 / 3)] * 3
    assert all(second > 0 for second in steps["ours_s"])
    started, *served = figures["service"]
    assert started["start_s"] > 0
    assert [(row["num_failed"], row["image_rows"]["encoded"] > 0) for row in served] == [(0, True), (0, False)]
    text = section(figures)
    for told in (
        "| tiny | 32 | 4 | sampled |",
        "| tiny | 1 | 16 |",
        "56 × 56",
        "| tiny | 2 | known |",
        "| Kimi K2.5 | decode |",
        "not asked",
        "vLLM 0.0 on the same device",
        "| tiny | 32 | 2 |",
        "a pretended device",
    ):
        assert told in text


def test_runners_over_several_processes_are_compared_with_one(folder: pathlib.Path) -> None:
    with split_over(2, CPUModelRunner, "cpu") as make:
        checks = gpu_checks.parity(folder, make, prompt_tokens=20, dtypes=[torch.float32])
        assert len(checks) == 2
        assert all(check.passed for check in checks), checks
        ranks = gpu_checks.runner_of(folder, make, torch.float32).config.ranks
        assert ranks is not None
        assert ranks.size == 2
    with pytest.raises(ConfigurationError, match="RecordingRunner"), split_over(2, RecordingRunner, "cpu"):
        pass


def test_a_right_runner_passes_and_a_wrong_one_does_not(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = gpu_checks.parity(folder, RecordingRunner, prompt_tokens=20)
    assert len(checks) == 4
    assert all(check.passed for check in checks), checks
    right = TensorBackend.attend_paged
    monkeypatch.setattr(TensorBackend, "attend_paged", lambda *args, **options: right(*args, **options) * 1.5)
    assert not any(check.passed for check in gpu_checks.parity(folder, RecordingRunner, prompt_tokens=20))


@pytest.mark.parametrize("name", ["qwen3_5"])
def test_answers_of_models_with_recurrent_layers_are_compared(name: str, tmp_path: pathlib.Path) -> None:
    folder = FAMILIES[name].build(tmp_path)
    checks = gpu_checks.parity(folder, RecurrentRunner, prompt_tokens=20)
    assert all(check.passed for check in checks), checks
    in_float32 = gpu_checks.parity(folder, ForgetfulRunner, prompt_tokens=20)[:2]
    assert not any(check.passed for check in in_float32), in_float32


def test_answers_with_keys_of_8_bits_are_compared(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = gpu_checks.parity(folder, CPUModelRunner, 20, rounds_kv_cache=True)
    assert all(check.passed for check in checks), checks
    assert all("keys of 8 bits" in check.name for check in checks)

    right = TensorBackend.attend_paged
    monkeypatch.setattr(TensorBackend, "can_round", True)
    monkeypatch.setattr(TensorBackend, "attend_paged", lambda *args, **options: right(*args, **options) * 1.5)
    checks = gpu_checks.parity(folder, RecordingRunner, 20, rounds_kv_cache=True)
    assert not any(check.passed for check in checks), checks


@pytest.mark.parametrize("bits", [4, 8])
def test_answers_of_quantized_weights_are_compared(folder: pathlib.Path, bits: int) -> None:
    checks = gpu_checks.parity(folder, CPUModelRunner, 20, quantize_bits=bits)
    assert all(check.passed for check in checks), checks
    assert all(f"weights of {bits} bits" in check.name for check in checks)


def test_products_with_codes_are_checked_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.decoder_svc.runner.cuda.interpreted_triton import triton_quantized

    monkeypatch.setattr(gpu_quantized, "_LAYERS", ((40, 256),))
    monkeypatch.setattr(gpu_quantized, "_ROWS", (1, 17))
    monkeypatch.setattr(gpu_quantized, "_CALLS", 1)
    # Triton's interpreter does not compute with bfloat16.
    monkeypatch.setattr(gpu_quantized, "_DTYPE", torch.float16)
    cells = [*gpu_quantized.quantized_cells(CPU)]
    checks = [cell for cell in cells if isinstance(cell, gpu_checks.Check)]
    assert [check.passed for check in checks] == [True] * 3, checks
    timed = [cell for cell in cells if isinstance(cell, dict)]
    assert [(cell["form"], cell["rows"]) for cell in timed] == [
        (form, rows) for form in ("INT4", "INT8", "FLOAT8") for rows in (1, 17)
    ]
    assert all(cell["codes_s"] > 0 and cell["whole_s"] > 0 for cell in timed)
    figures = {"device": "a device", "torch": "2", "products": timed}
    assert "| 40 × 256 | INT4 | 17 |" in section(figures)
    right = triton_quantized.linear
    monkeypatch.setattr(triton_quantized, "linear", lambda *arguments: right(*arguments) * 1.05)
    checks = [cell for cell in gpu_quantized.quantized_cells(CPU) if isinstance(cell, gpu_checks.Check)]
    assert not any(check.passed for check in checks)


def test_recurrent_layers_are_checked_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.decoder_svc.runner.cuda.interpreted_triton import triton_recurrent

    monkeypatch.setattr(gpu_recurrent, "_STEPS", ((2, 1), (1, 3)))
    cells = [*gpu_recurrent.recurrent_cells(CPU, 64, dtype=torch.float32, num_calls=1)]
    checks = [cell for cell in cells if isinstance(cell, gpu_checks.Check)]
    assert [check.passed for check in checks] == [True] * 3, checks
    timed = [cell for cell in cells if isinstance(cell, dict)]
    assert [(cell["sequences"], cell["tokens"]) for cell in timed] == [(2, 1), (1, 3)] * 3
    assert all(cell["kernels_s"] > 0 and cell["operators_s"] > 0 for cell in timed)
    text = section({"device": "a device", "torch": "2", "recurrent": timed})
    assert "| short convolution | 1 | 3 |" in text
    assert "| Mamba2 | 2 | 1 |" in text
    right = triton_recurrent.convolve
    monkeypatch.setattr(triton_recurrent, "convolve", lambda *args, **options: right(*args, **options) * 1.05)
    cells = [*gpu_recurrent.recurrent_cells(CPU, 64, dtype=torch.float32, num_calls=1)]
    assert not any(cell.passed for cell in cells if isinstance(cell, gpu_checks.Check))


def test_pools_are_filled_with_numbers_or_with_codes_and_scales() -> None:
    pools = [torch.zeros(2, 4, 2, 8) for _ in range(2)]
    fill(LayerPools(*pools, *pools))
    codes = [torch.zeros(2, 4, 2, 8, dtype=torch.int8) for _ in range(2)]
    scales = [torch.zeros(2, 4, 2) for _ in range(2)]
    fill(LayerPools(*codes, *scales))
    assert all(each.float().std() > 0 for each in (*pools, *codes))
    assert all(bool((each == 1 / 64).all()) for each in scales)


def test_attention_over_latents_is_checked_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.decoder_svc.runner.cuda.interpreted_triton import interpreted

    monkeypatch.setattr(gpu_checks, "TRIALS", {"decode": [(20, 1)], "chunks": [(3, 10), (0, 1)]})
    monkeypatch.setattr(gpu_checks, "LATENTS", {"a model": (4, 32)})
    backends: dict[str, Callable[[], AttentionBackend]] = {"sdpa": SdpaBackend, "triton": interpreted}
    cells = [*gpu_checks.latent_cells(backends, CPU, torch.float32)]
    checks = [cell for cell in cells if isinstance(cell, gpu_checks.Check)]
    assert [check.name for check in checks] == [
        f"triton against sdpa: {step}, heads of a model" for step in ("decode", "chunks")
    ]
    assert all(check.passed for check in checks), checks
    timed = [cell for cell in cells if isinstance(cell, dict)]
    assert all(cell["attention_s"] > 0 for cell in timed)
    text = section({"device": "a device", "torch": "2", "latents": timed})
    assert "| heads of | step | sdpa | triton |" in text
    assert "| a model | chunks |" in text


def test_backends_are_compared_with_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "TRIALS", {"decode": [(20, 1)], "chunks": [(3, 10), (0, 1)]})
    backends = {"sdpa": SdpaBackend, "tensor": TensorBackend}
    checks = gpu_checks.backends_agree(backends, CPU)
    assert [check.name for check in checks] == ["tensor against sdpa: decode", "tensor against sdpa: chunks"]
    assert all(check.passed for check in checks)
    right = TensorBackend.attend_paged
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorBackend, "attend_paged", lambda *args, **options: right(*args, **options) * 1.1)
        assert not any(check.passed for check in gpu_checks.backends_agree(backends, CPU))
    seconds = gpu_checks.attention_seconds(backends, CPU)
    assert {(name, backend) for name, of_trial in seconds.items() for backend in of_trial} == {
        (name, backend) for name in ("decode", "chunks") for backend in backends
    }


@pytest.mark.usefixtures("limits")
def test_cells_and_their_limits(folder: pathlib.Path) -> None:
    bench = gpu_decode.DecodeBench("tiny", folder, AheadRunner, max_batch=4, max_tokens=48)
    assert gpu_checks.overlapped_steps_give_the_same_ids(bench.driver, 4, context=10).passed
    check = gpu_checks.graphs_give_the_same_bits(bench.driver, 4, context=10)
    assert check.passed, check
    cell, longer = (bench.decode(3, context, "greedy", num_steps=3) for context in (16, 32))
    assert 0 < cell.low_s <= cell.step_s <= cell.high_s
    # Four query heads on two key heads in bfloat16: keys and values of 16 tokens more in 3 layers.
    assert longer.memory_limit_s - cell.memory_limit_s == pytest.approx(3 * 16 * 3 * 2 * 32 * 2 / 1e9)
    # All weights but the table of embeddings, which is the head, too, once for each token; the head once for a prompt.
    model = bench.driver.runner.get_model()
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    head = model.config.get_text_config().vocab_size * model.config.get_text_config().hidden_size
    layers = sum(size for name, size in sizes.items() if "embed_tokens" not in name and "lm_head" not in name)
    assert bench.prefill(3, 16).matrix_limit_s == pytest.approx(2 * 3 * (16 * layers + head) / 1e12)
    assert bench.prefill(3, 32).matrix_limit_s == pytest.approx(2 * 3 * (32 * layers + head) / 1e12)
    assert bench.whole_s(2, 16, 4) > 0
    assert len(bench.driver.runner.batch) == 0


def test_a_wrong_id_of_a_step_launched_ahead_is_found(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = gpu_checks.runner_of(folder, AheadRunner, torch.float32, max_num_seqs=4)
    driver = StepDriver(runner, 3, 40)
    monkeypatch.setattr(runner.feed, "write", lambda _unknown, _token_ids: None)
    assert not gpu_checks.overlapped_steps_give_the_same_ids(driver, 3, context=10).passed


def test_steps_behind_cached_tokens_read_them(folder: pathlib.Path) -> None:
    driver = StepDriver(gpu_checks.runner_of(folder, AheadRunner, torch.float32, max_num_seqs=4), 3, 60)
    whole = driver.run(2, 33, 5, with_logprobs=True).answers
    # The same blocks still hold the prompts.
    behind_them = driver.run(2, 33, 5, num_cached=32, with_logprobs=True).answers
    largest, num_places = largest_difference(whole, behind_them)
    assert largest < 1e-4
    assert num_places == 2 * 6
    driver.fill_pools()
    behind_others = driver.run(2, 33, 5, num_cached=32, with_logprobs=True).answers
    assert [each.token_ids for each in behind_others] != [each.token_ids for each in whole]
    assert len(driver.mixed_s(2, 16, 4, 3)) == 3


def test_sampled_runs_sample(folder: pathlib.Path) -> None:
    driver = StepDriver(gpu_checks.runner_of(folder, AheadRunner, torch.float32, max_num_seqs=4), 3, 60)
    greedy, sampled, again = (
        [answer.token_ids for answer in driver.run(3, 8, 12, params=SAMPLINGS[name]).answers]
        for name in ("greedy", "sampled", "sampled")
    )
    assert greedy != sampled
    assert sampled == again


def test_a_shaped_folder_loads_like_any_other(shaped: pathlib.Path) -> None:
    runner = gpu_checks.runner_of(shaped, RecordingRunner, torch.bfloat16, max_num_seqs=2)
    text = runner.get_model().config.get_text_config()
    shape = SHAPES["tiny"]
    assert (text.hidden_size, text.num_hidden_layers) == (shape.hidden_size, shape.num_hidden_layers)
    assert (shaped / "model.safetensors").stat().st_mtime == shaped_folder("tiny", shaped.parent, CPU).joinpath(
        "model.safetensors"
    ).stat().st_mtime
    assert min(gpu.encoder_rates(shaped, (1,), 56, "cpu").values()) > 0


def test_a_run_answers_every_prompt_step_by_step(folder: pathlib.Path) -> None:
    runner = gpu_checks.runner_of(folder, RecordingRunner, torch.float32, max_num_seqs=4)
    driver = StepDriver(runner, 3, 40)
    run = driver.run(3, 12, 5, with_logprobs=True)
    assert [len(answer.token_ids) for answer in run.answers] == [6] * 3
    assert len(run.decode_s) == 5
    assert driver.run(3, 12, 5, with_logprobs=True).answers == run.answers
    assert len(runner.batch) == 0
    driver.use_graphs(False)
    assert runner.graphs is None


def test_differences_count_up_to_where_answers_part() -> None:
    one = [Answer((1, 2, 3), ({1: -0.1, 5: -3.0}, {2: -0.5}, {3: -0.2}))]
    other = [Answer((1, 4, 3), ({1: -0.2, 6: -3.0}, {4: -0.4, 2: -0.6}, {3: -9.0}))]
    largest, num_places = largest_difference(one, other)
    assert num_places == 2
    assert largest == pytest.approx(0.1)
    others = [Answer((7, 8, 9), ({7: -0.2}, {8: -0.4}, {9: -9.0}))]
    assert largest_difference(one, others) == (math.inf, 1)


def test_limits_are_measured_on_any_device() -> None:
    assert 0 < memory_bandwidth(CPU, 1 << 20) < math.inf
    assert 0 < matrix_peak(CPU, 64) < math.inf


def test_images_per_second_are_told_by_batch(folder: pathlib.Path) -> None:
    rates = gpu.encoder_rates(folder, (1, 2), 448, "cpu")
    assert set(rates) == {"1", "2"}
    assert min(rates.values()) > 0
