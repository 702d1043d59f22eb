"""`make bench-gpu` without a GPU, and its parts on a device with graphs that runs anywhere."""

from __future__ import annotations

import math
import pathlib
import sys

import pytest
import torch

from benchmarks import gpu, report
from benchmarks.gpu_peers import matrix_peak, memory_bandwidth
from benchmarks.gpu_steps import Answer, StepDriver, largest_difference
from decoder_svc.runner.attention import SdpaBackend
from tests.decoder_svc.runner.recording_runner import RecordingRunner
from tests.decoder_svc.runner.tensor_backend import TensorBackend
from tests.tiny_models import build_llava_clip

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return build_llava_clip(tmp_path_factory.mktemp("models") / "llava")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so there is something to measure")
def test_without_a_gpu_it_says_so_and_nothing_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = report.RESULTS.read_text("utf-8")
    monkeypatch.setattr(sys, "argv", ["gpu"])
    gpu.main()
    assert "no CUDA device" in capsys.readouterr().out
    assert report.RESULTS.read_text("utf-8") == before


def test_a_right_runner_passes_and_a_wrong_one_does_not(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = gpu.parity(folder, RecordingRunner, prompt_tokens=20)
    assert len(checks) == 4
    assert all(check.passed for check in checks), checks
    right = TensorBackend.attend_paged
    monkeypatch.setattr(TensorBackend, "attend_paged", lambda *args, **options: right(*args, **options) * 1.5)
    assert not any(check.passed for check in gpu.parity(folder, RecordingRunner, prompt_tokens=20))


def test_backends_are_compared_with_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_TRIALS", {"decode": [(20, 1)], "chunks": [(3, 10), (0, 1)]})
    backends = {"sdpa": SdpaBackend, "tensor": TensorBackend}
    checks = gpu.backends_agree(backends, CPU)
    assert [check.name for check in checks] == ["tensor against sdpa: decode", "tensor against sdpa: chunks"]
    assert all(check.passed for check in checks)
    seconds = gpu.attention_seconds(backends, CPU)
    assert {(name, backend) for name, of_trial in seconds.items() for backend in of_trial} == {
        (name, backend) for name in ("decode", "chunks") for backend in backends
    }


def test_a_cell_and_its_row(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "memory_bandwidth", lambda _device: 1e9)
    monkeypatch.setattr(gpu, "matrix_peak", lambda _device: 1e12)
    monkeypatch.setattr(gpu, "continuous_batching_s", lambda *_arguments: "not asked")
    bench = gpu.DecodeBench(folder, RecordingRunner, max_batch=4, max_tokens=40)
    check = bench.graphs_give_the_same_bits(4, context=10)
    assert check.passed, check
    cell = bench.measure(3, 16, num_steps=3)
    assert min(cell.graphs_s, cell.eager_s, cell.prefill_s) > 0
    assert cell.whole_s > cell.prefill_s
    text = gpu.section("a device", [check], [cell], {"decode": {"sdpa": 1e-6}}, {"1": 10.0})
    assert "| 3 | 16 |" in text
    assert "not asked" in text
    # Four query heads on two key heads in bfloat16: keys and values of 16 tokens more in 3 layers.
    longer = bench.measure(3, 32, num_steps=3)
    assert longer.memory_limit_s - cell.memory_limit_s == pytest.approx(3 * 16 * 3 * 2 * 32 * 2 / 1e9)
    # All weights but the table of embeddings, which is the head, too, once for each token; the head once for a prompt.
    model = bench.driver.runner.get_model()
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    head = model.config.get_text_config().vocab_size * model.config.get_text_config().hidden_size
    layers = sum(size for name, size in sizes.items() if "embed_tokens" not in name and "lm_head" not in name)
    assert cell.matrix_limit_s == pytest.approx(2 * 3 * (16 * layers + head) / 1e12)
    assert longer.matrix_limit_s == pytest.approx(2 * 3 * (32 * layers + head) / 1e12)


def test_a_run_answers_every_prompt_step_by_step(folder: pathlib.Path) -> None:
    runner = gpu.runner_of(folder, RecordingRunner, torch.float32, max_num_seqs=4)
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


def test_limits_are_measured_on_any_device() -> None:
    assert 0 < memory_bandwidth(CPU, 1 << 20) < math.inf
    assert 0 < matrix_peak(CPU, 64) < math.inf


def test_images_per_second_are_told_by_batch(folder: pathlib.Path) -> None:
    rates = gpu.encoder_rates(folder, (1, 2), "cpu")
    assert set(rates) == {"1", "2"}
    assert min(rates.values()) > 0
