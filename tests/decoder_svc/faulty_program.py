"""`python -m tests.decoder_svc.faulty_program FILE …`: the decoder service, whose steps obey a fault file.

The runner is in another file, which the service imports after transformers. The service's way to import transformers
takes two seconds less of CPU than a plain import. With `--engine process`, the runner is in faulty_engine_worker.py.
"""

from __future__ import annotations

import os
import sys

from decoder_svc.__main__ import serve
from decoder_svc.engine.process import engine_process
from lookonce.server import serving
from tests.decoder_svc.faulty_engine_worker import FAULT_FILE, register

if __name__ == "__main__":
    os.environ[FAULT_FILE] = sys.argv[1]
    engine_process._MODULE = "tests.decoder_svc.faulty_engine_worker"
    register()
    serving.run(serve(sys.argv[2:]))
