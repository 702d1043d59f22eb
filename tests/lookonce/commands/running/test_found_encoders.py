"""A decoder that was ready before its encoder has found it when `up` says that everything runs."""

from __future__ import annotations

import pathlib
import time

from lookonce.client import Client
from lookonce.commands.running.found_encoders import wait_until_encoders_are_found
from lookonce.local.child_process import ChildProcess
from lookonce.local.reserved_port import reserved_port
from tests.conftest import DEMO_MODEL
from tests.tiny_models import random_image
from tests.warm_processes import WarmProcesses

FLAGS = ["--model", str(DEMO_MODEL), "--dtype", "float32", "--num-threads", "1"]
START_TIMEOUT_S = 120.0


def test_the_first_picture_is_answered_though_the_decoder_was_ready_first(
    tmp_path: pathlib.Path, warm_processes: WarmProcesses
) -> None:
    with warm_processes.for_stacks(), reserved_port(0) as encoder_port, reserved_port(0) as decoder_port:
        address = f"127.0.0.1:{encoder_port}"
        flags = [*FLAGS, "--listen", f"127.0.0.1:{decoder_port}", "--encoder-target", f"ipv4:{address}"]
        decoder = ChildProcess("decoder", "decoder_svc", flags, tmp_path)
        processes = [decoder]
        try:
            decoder.wait_until_ready(time.monotonic() + START_TIMEOUT_S)
            encoder = ChildProcess("encoder", "encoder_svc", [*FLAGS, "--listen", address], tmp_path)
            processes.append(encoder)
            encoder.wait_until_ready(time.monotonic() + START_TIMEOUT_S)
            wait_until_encoders_are_found([decoder.ready.target])
            with Client.connect(decoder.ready.target, max_retries=0) as client:
                assert client.generate("What is it?", [random_image(1)], max_tokens=2).usage.encoded_image_tokens > 0
        finally:
            for process in processes:
                process.stop(10.0)
