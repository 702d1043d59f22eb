"""`python -m tests.decoder_svc.faulty_program FILE …`: the decoder service, whose steps obey a fault file."""

from __future__ import annotations

import pathlib
import sys

from decoder_svc import assembly
from decoder_svc.__main__ import serve
from decoder_svc.runner.base import ModelRunnerBase
from decoder_svc.runner.cpu.runner import CPUModelRunner
from decoder_svc.scheduling.scheduler_output import SampledToken, SchedulerOutput
from decoder_svc.settings import DecoderSettings
from lookonce.server import serving
from tests.fault_file import FaultFile


class FaultyRunner(CPUModelRunner):
    """Obeys the fault file before each step that computes something."""

    def execute_model(self, output: SchedulerOutput) -> list[SampledToken]:
        if output.chunks:
            FaultFile(pathlib.Path(sys.argv[1])).obey()
        return super().execute_model(output)


def _runner_class(settings: DecoderSettings) -> type[ModelRunnerBase]:
    return FaultyRunner


if __name__ == "__main__":
    assembly._runner_class = _runner_class
    serving.run(serve(sys.argv[2:]))
