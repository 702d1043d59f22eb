"""The limits of a connection follow what a service works on at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from decoder_svc.settings import DecoderSettings
from lookonce.server.server_options import server_options
from tests.lookonce.server.running_server import server_settings

_DEFAULT_BATCH = DecoderSettings.model_fields["max_num_seqs"].default


@pytest.mark.parametrize(("max_running", "max_calls"), [(0, 256), (_DEFAULT_BATCH, 256), (100, 400)])
def test_one_connection_can_keep_a_service_busy(max_running: int, max_calls: int) -> None:
    options = dict(server_options(server_settings(), 1 << 20, max_running))
    assert options["grpc.max_concurrent_streams"] == max_calls


def test_threads_of_a_service_wait_less_for_the_interpreter() -> None:
    program = """
import sys
from lookonce.server import serving

async def main():
    print(sys.getswitchinterval())

serving.run(main())
"""
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert float(printed) == pytest.approx(0.0002)
