"""A real encoder process whose forward thread dies: the answers that clients get, and the end of the process."""

from __future__ import annotations

import json
import pathlib
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from lookonce.common.v1 import common_pb2
from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.encoder.v1.encoder_service_pb2_grpc import EncoderServiceStub
from tests import image_files
from tests.fault_file import DIE, HANG, FaultFile
from tests.warm_processes import WarmProcess, WarmProcesses

Health = health_pb2.HealthCheckResponse
NUM_CALLS = 3
TIMEOUT_S = 60


def _num_queued(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT_S) as response:
        families = text_string_to_metric_families(response.read().decode())
        return int(next(one for one in families if one.name == "lookonce_encoder_queued_images").samples[0].value)


def _code_of_encode(target: str, seed: int) -> str:
    image = common_pb2.ImageSource(data=image_files.encoded(image_files.noise(seed)))
    with grpc.insecure_channel(target) as channel:
        try:
            EncoderServiceStub(channel).Encode(pb.EncodeRequest(items=[pb.EncodeItem(image=image)]), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def _check(process: WarmProcess, log: pathlib.Path, ready: dict[str, Any], fault: FaultFile) -> None:
    with grpc.insecure_channel(ready["target"]) as channel, ThreadPoolExecutor(NUM_CALLS) as threads:
        watching = health_pb2.HealthCheckRequest(service="lookonce.encoder.v1.EncoderService")
        states: Any = health_pb2_grpc.HealthStub(channel).Watch(watching, timeout=TIMEOUT_S)
        assert next(states).status == Health.SERVING
        assert _code_of_encode(ready["target"], 0) == "OK"
        fault.order(HANG)
        calls = [threads.submit(_code_of_encode, ready["target"], seed) for seed in range(1, 1 + NUM_CALLS)]
        deadline_s = time.monotonic() + TIMEOUT_S
        while _num_queued(ready["metrics_port"]) < NUM_CALLS:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        fault.order(DIE)
        assert [call.result() for call in calls] == ["UNAVAILABLE"] * NUM_CALLS
        assert next(states).status == Health.NOT_SERVING
        assert process.wait(TIMEOUT_S) == 1
    events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    assert "the forward thread ended" in events
    assert events[-1] == "the service failed"


def test_a_dead_forward_thread_answers_who_waits_says_not_serving_and_ends_the_process_with_1(
    tiny_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path, warm_processes: WarmProcesses
) -> None:
    ready_file, fault_path, log = (tmp_path / name for name in ("ready.json", "fault", "log"))
    arguments = [str(fault_path), "--num-threads", "1", "--model", str(tiny_folder("llava_clip"))]
    arguments += ["--ready-file", str(ready_file), "--metrics-listen", "127.0.0.1:0"]
    process = warm_processes.start("tests.encoder_svc.faulty_program", arguments, log)
    try:
        while not ready_file.exists():
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        _check(process, log, json.loads(ready_file.read_text()), FaultFile(fault_path))
    finally:
        process.kill()
        process.wait()
