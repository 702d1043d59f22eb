"""Every script's `--quick` form runs against real services and says what is sane. Nothing here is timed.

The services run in this process, except where the script measures processes.
"""

from __future__ import annotations

import importlib
import json
import pathlib
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from benchmarks import report
from tests.in_process_stack import InProcessStack
from tests.quantized_folders import PUBLISHED_FORMS


@pytest.fixture
def quick(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a script's quick form and returns its figures; results must stay as they are."""
    monkeypatch.delenv("LOOKONCE_PEER_PYTHON", raising=False)
    monkeypatch.setattr(report, "RESULTS", tmp_path / "RESULTS.md")
    monkeypatch.setattr(report, "JSON_FOLDER", tmp_path / "results")

    def run(name: str, *, in_processes: bool = False) -> Any:
        script = importlib.import_module(f"benchmarks.{name}")
        if not in_processes:
            monkeypatch.setattr(script, "LocalStack", InProcessStack, raising=False)
        script.main(["--quick"])
        printed = capsys.readouterr().out
        assert f"## {name}\n" in printed
        assert not list(tmp_path.iterdir()), "a quick run wrote results"
        figures = json.loads(printed.splitlines()[-1])
        assert figures["machine"]["num_cpus"] > 0
        return figures

    return run


def test_encode_once(quick: Any) -> None:
    (setup,) = quick("encode_once")["setups"]
    assert [(one["num_requests"], one["num_encodes"]) for one in setup["rounds"]] == [(8, 2), (8, 2)]


def test_hit_cost(quick: Any) -> None:
    first, second = quick("hit_cost")["pairs"]
    for pair in (first, second):
        assert pair["num_image_prompt_tokens"] == pair["num_text_prompt_tokens"] > 36
        assert min(pair["image_s"], pair["text_s"], pair["cold_s"]) > 0


def test_rows_moved(quick: Any) -> None:
    figures = quick("rows_moved")
    (case,) = figures["cases"]
    (moved,) = case["rounds"]
    assert (moved["num_rows_needed"], moved["num_encodes"]) == (4, 0)
    assert moved["num_bytes"] >= moved["num_bytes_read"] >= 4 * figures["row_bytes"]


def test_fetch_speed(quick: Any) -> None:
    figures = quick("fetch_speed")
    for sizes in figures["sizes"].values():
        assert [round(size["num_bytes"] / 1e6) for size in sizes] == [0, 2]
        for size in sizes:
            assert all(size[side][0]["gb_per_s"] > 0 for side in ("raw", "ours", "in_pieces", "sealed", "redis_py"))
    assert set(figures["small_get_us"][0]) == {"alone", "readers", "computing"}


def test_frozen_redis(quick: Any) -> None:
    (both,) = quick("frozen_redis")["rounds"]
    for phase in (both["normal"], both["frozen"]):
        assert phase["num_right_pictures"] == phase["num_pictures"] == phase["num_encodes"] == 4
        assert phase["num_texts"] > 0


def test_scheduler_cost(quick: Any) -> None:
    figures = quick("scheduler_cost")
    assert [(cost["num_running"], cost["num_waiting"]) for cost in figures["costs"]] == [
        (1, 0), (1, 100), (4, 0), (4, 100),
    ]  # fmt: skip
    assert figures["hashing"]["num_hashed"] == figures["hashing"]["num_blocks"]


def test_host_step(quick: Any) -> None:
    for step in quick("host_step")["steps"]:
        parts = [times for (times,) in step["parts_us"].values()]
        assert len(parts) == 5
        assert min(parts) > 0
        (of_step,) = step["step_us"]
        assert of_step > sum(parts)


def test_prefix_reuse(quick: Any) -> None:
    figures = quick("prefix_reuse")
    assert figures["peer"] == "not run"
    found = {name: pairs[0] for name, pairs in figures["workloads"].items()}
    assert {name: pair["on"]["num_encodes"] for name, pair in found.items()} == {"P40": 7, "S50": 1, "U40": 10}
    for name, pair in found.items():
        assert pair["on"]["num_requests"] == pair["off"]["num_requests"] == 10
        assert pair["off"]["num_cached_tokens"] == 0
        assert (pair["on"]["num_cached_tokens"] > 0) == (name != "U40")
        assert pair["peer"] is None


def test_two_replicas(quick: Any) -> None:
    figures = quick("two_replicas")
    assert figures["peer"] == "not run"
    assert figures["memory_bytes"]["ours"] > 1e8
    found = {name: rounds[0] for name, rounds in figures["workloads"].items()}
    assert {name: one["num_encodes"] for name, one in found.items()} == {"P40": 7, "S50": 1}
    assert all(one["ours"]["num_requests"] == 10 and one["peer"] is None for one in found.values())


def test_overlap(quick: Any) -> None:
    (only,) = quick("overlap")["images"]["4"]
    assert min(only.values()) > 0


def test_startup(quick: Any) -> None:
    figures = quick("startup")
    assert set(figures["sides"]) == {"stack", "decoder"}
    for side in figures["sides"].values():
        assert 0 < side["starts"][0]["ready_s"] < side["starts"][0]["first_token_s"]
    assert figures["sides"]["stack"]["memory_bytes"] > figures["kv_cache_bytes"]


def test_event_loop(quick: Any) -> None:
    encoder, decoder = quick("event_loop", in_processes=True)["loops"]
    assert (encoder["service"], decoder["service"]) == ("encoder-0", "decoder-0")
    for loop in (encoder, decoder):
        assert loop["num_callbacks"] > 20
        assert 0 < loop["cpu_s"]["0.5"] <= loop["cpu_s"]["1.0"]
        assert sum(map(len, loop["long_s"].values())) < loop["num_callbacks"]


def test_soak(quick: Any) -> None:
    figures = quick("soak", in_processes=True)
    assert not figures["notes"], "wrong answers, or calls that hang"
    assert not figures["ended_by_themselves"]
    ends = [Counter(counts) for by_kind in figures["outcomes"].values() for counts in by_kind.values()]
    assert sum(ends, Counter())["right"] > 10
    assert len(figures["faults"]) == 15
    assert len(figures["stretches"]) == 2, "one of faults, one of abuses"
    assert {"encoder-0", "decoder-0"} <= set(figures["memory"])
    assert figures["num_encodes"] > 0


def test_image_light(quick: Any) -> None:
    (only,) = quick("image_light")["rounds"]
    # Two of ten requests have an image of 36 rows.
    assert only["split"]["num_encoded_rows"] == only["single"]["num_encoded_rows"] == 72


def test_pixel_parity() -> None:
    """A process of its own, because transformers looks for torchvision once."""
    command = [sys.executable, "-m", "benchmarks.pixel_parity", "--quick"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    figures = json.loads(printed.splitlines()[-1])
    assert all(0 < one["largest"] < 10 for one in figures["differences"])


def test_busy_step(quick: Any, library: None) -> None:
    cells = quick("busy_step")["cells"]
    assert [(cell["dtype"], cell["batch"]) for cell in cells] == [("bfloat16", 1), ("float32", 1)]
    assert all(seconds > 0 for cell in cells for seconds in (*cell["quiet_s"], *cell["busy_s"]))


def test_restarts(quick: Any) -> None:
    outcomes = quick("restarts", in_processes=True)["outcomes"]
    assert [(one["signal"], one["num_restarts"]) for one in outcomes] == [("SIGTERM", 1), ("SIGKILL", 1)]
    assert all(one["num_right"] > 0 and one["num_wrong"] == 0 and one["failures"] == [] for one in outcomes)


def test_drains(quick: Any) -> None:
    (burst,) = quick("drains", in_processes=True)["bursts"]
    assert sum(burst["ends"].values()) == 60
    assert burst["ends"]["OK"] > 0, "the decoder took calls before it got the signal"
    assert burst["ends"]["INVALID_ARGUMENT INVALID_PARAMETER"] > 0, "refused calls are among them"


def test_giants(quick: Any) -> None:
    (only,) = quick("giants", in_processes=True)["rounds"]
    assert only["giants"] == {"INVALID_ARGUMENT IMAGE_UNDECODABLE": 1}
    assert min(*only["alone_s"], *only["same_tenant_s"], *only["other_tenant_s"]) > 0


def test_gateway_cost(quick: Any) -> None:
    figures = quick("gateway_cost")
    assert [cell["num_streams"] for cell in figures["cells"]] == [1, 4]
    for pair in (pair for cell in figures["cells"] for pair in cell["pairs"]):
        assert min(pair["gateway"]["first_token_s"]) > 0
    assert 0 < figures["idle"]["empty_bytes"] < figures["idle"]["full_bytes"]


def test_large_messages(quick: Any) -> None:
    (stalls,) = quick("large_messages")["rounds"]
    statuses = {one["message"]: one["status"] for one in stalls}
    assert statuses["Encode items empty, 1 MiB"] == statuses["Check unknown numbers, 1 MiB"] == "RESOURCE_EXHAUSTED"
    assert statuses["Encode items.image.data long, 1 MiB"] == "INVALID_ARGUMENT"
    assert all(one["num_calls"] > 0 and one["longest_s"] > 0 for one in stalls)


def test_adapter_cost(quick: Any) -> None:
    cells = quick("adapter_cost")["cells"]
    assert [(cell["batch"], cell["num_adapters"]) for cell in cells] == [(3, 1), (3, 3)]
    for cell in cells:
        assert len(cell["base_s"]) == len(cell["adapted_s"]) == 1
        assert min(*cell["base_s"], *cell["adapted_s"]) > 0


def test_tenant_fairness(quick: Any) -> None:
    rounds = quick("tenant_fairness", in_processes=True)["rounds"]
    assert {number: len(found) for number, found in rounds.items()} == {"2": 1, "1": 1}
    for number, (one,) in rounds.items():
        for phase in ("alone", "shared", "beside", "as_one"):
            assert len(one[phase]["whole_s"]) == 3 * int(number)
            for first_s, whole_s in zip(one[phase]["first_s"], one[phase]["whole_s"], strict=True):
                assert 0 < first_s <= whole_s


def test_quantized_speed(quick: Any) -> None:
    (cell,) = quick("quantized_speed")["cells"]
    assert cell["batch"] == 3
    sizes = cell["weight_bytes"]
    assert set(cell["steps_s"]) == set(sizes) == {"whole", "int8", "int4", *PUBLISHED_FORMS}
    assert sizes["int4"] < sizes["int8"] < sizes["whole"]
    assert max(sizes[form] for form in ("AWQ", "GPTQ", "W4A16")) < min(sizes[form] for form in ("W8A8", "float8"))
    assert max(sizes[form] for form in PUBLISHED_FORMS) < sizes["whole"]


def test_rounded_cache(quick: Any) -> None:
    (cell,) = quick("rounded_cache")["cells"]
    assert (cell["batch"], cell["context"]) == (3, 40)
    assert cell["rounded_bytes"] / cell["whole_bytes"] == (32 + 4) / (32 * 4)
    assert min(cell["whole_s"] + cell["rounded_s"]) > 0


def test_delta_net_speed(quick: Any) -> None:
    cells = quick("delta_net_speed")["cells"]
    assert [(cell["layer"], cell["num_sequences"], cell["num_tokens"]) for cell in cells] == [
        (layer, *step) for layer in ("gated delta net", "short convolution", "Mamba2") for step in ((2, 1), (1, 5))
    ]
    for cell in cells:
        assert set(cell["layer_s"]) == {"without", "ours"}
        assert all(seconds > 0 for layer_s in cell["layer_s"].values() for seconds in layer_s)


def test_latent_attention_speed(quick: Any) -> None:
    cells = quick("latent_attention_speed")["cells"]
    assert [(cell["model"], cell["num_sequences"], cell["context"]) for cell in cells] == [
        ("Mistral Small 4", 2, 40),
        ("Kimi K2.5", 2, 40),
    ]
    for cell in cells:
        assert set(cell["step_s"]) == {"expanded", "ours", "operators"}
        assert all(seconds > 0 for step_s in cell["step_s"].values() for seconds in step_s)
        assert cell["token_bytes"]["ours"] * 20 < cell["token_bytes"]["expanded"]


def test_expert_speed(quick: Any) -> None:
    cells = quick("expert_speed")["cells"]
    assert [(cell["model"], cell["num_tokens"]) for cell in cells] == [
        ("qwen3_vl_moe", 3),
        ("llama4", 3),
        ("nemotron_h", 3),
    ]
    for cell in cells:
        assert set(cell["layer_s"]) == {"transformers", "ours", "ours, int8", "ours, int4"}
        assert all(seconds > 0 for layer_s in cell["layer_s"].values() for seconds in layer_s)
