"""`python -m tests.decoder_svc.faulty_program FILE …`: the decoder service, whose steps obey a fault file."""

from __future__ import annotations

import pathlib
import sys
from dataclasses import replace

from decoder_svc.__main__ import serve
from decoder_svc.runner.cpu.runner import CPUModelRunner
from decoder_svc.scheduling.scheduler_output import SampledToken, SchedulerOutput
from lookonce.devices import cpu, registry
from lookonce.server import serving
from tests.fault_file import FaultFile


class FaultyRunner(CPUModelRunner):
    """Obeys the fault file before each step that computes something."""

    def execute_model(self, output: SchedulerOutput) -> list[SampledToken]:
        if output.chunks:
            FaultFile(pathlib.Path(sys.argv[1])).obey()
        return super().execute_model(output)


if __name__ == "__main__":
    registry._BUILT_IN = (replace(cpu.PLATFORM, runner=f"{__name__}:FaultyRunner"),)
    serving.run(serve(sys.argv[2:]))
