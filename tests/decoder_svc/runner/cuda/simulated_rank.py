"""A rank's process on a simulated device: `decoder_svc.rank_worker`, with a fake CUDA and a stand-in for NCCL."""

from __future__ import annotations

import importlib
import os

from decoder_svc import rank_worker
from lookonce.model.kernels import openmp
from tests.decoder_svc.runner.cuda.fake_cuda import installed
from tests.decoder_svc.runner.cuda.gloo_as_nccl import nccl_installed

# The modules whose kernels run in Triton's interpreter, with commas between them.
KERNELS = "LOOKONCE_TEST_KERNELS"


def main() -> None:
    """Runs the rank and ends the process."""
    names = [name for name in os.environ.get(KERNELS, "").split(",") if name]
    if names:
        # It finds Triton, and makes its interpreter fast.
        importlib.import_module("tests.decoder_svc.runner.cuda.interpreted_triton")
    # The simulated device is that of one thread.
    openmp.run_in_short_lived_thread = lambda work: work()
    with nccl_installed(), installed(*map(importlib.import_module, names)):
        rank_worker.main()


if __name__ == "__main__":
    main()
