"""Runs the encoder service with forward passes that obey a fault file.

Usage: `python -m tests.encoder_svc.faulty_program FILE …`, followed by the service's flags.
"""

from __future__ import annotations

import sys

from encoder_svc.__main__ import serve
from lookonce.model.libraries.lean_transformers import import_lean_transformers
from lookonce.server import serving

if __name__ == "__main__":
    # The service imports it this way, too. A plain import, as in the file of the model, takes two seconds more of CPU.
    import_lean_transformers()
    from encoder_svc.vision import vision_model
    from tests.encoder_svc.faulty_model import FaultyModel

    vision_model.VisionModel = FaultyModel  # type: ignore[misc]
    serving.run(serve(sys.argv[2:]))
