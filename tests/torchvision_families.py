"""Families whose image processors or vision towers need torchvision, and whether it is installed.

timm, which builds those towers, imports torchvision and is installed beside it. Where torchvision is installed,
transformers treats images of other families differently, and so would the models that tests compare with. `make test`
therefore runs twice: once without torchvision, and once with it, and then these families alone.
"""

from __future__ import annotations

import pathlib
import sys

from lookonce.model.libraries import torchvision_import

# These are names of tiny families.
TORCHVISION_FAMILIES = frozenset({
    "cohere2_vision", "fast_vlm", "gemma3n", "gemma4_unified", "kimi_k25", "lfm2_vl", "llama4", "muse_glimmer",
    "muse_spark", "nemotron_h_omni", "perception_lm", "step3p7",
})  # fmt: skip
# Here `make venv` installs torchvision and timm.
INSTALLED = pathlib.Path(sys.prefix) / "torchvision"
HAS_TORCHVISION = torchvision_import.is_installed()
