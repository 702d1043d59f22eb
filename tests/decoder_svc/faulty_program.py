"""`python -m tests.decoder_svc.faulty_program FILE …`: the decoder service, whose steps obey a fault file.

The runner is in another file, which the service imports after transformers. The service's way to import transformers
takes two seconds less of CPU than a plain import.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from decoder_svc.__main__ import serve
from lookonce.devices import cpu, registry
from lookonce.server import serving

if __name__ == "__main__":
    registry._BUILT_IN = (replace(cpu.PLATFORM, runner="tests.decoder_svc.faulty_runner:FaultyRunner"),)
    serving.run(serve(sys.argv[2:]))
