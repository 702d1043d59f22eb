"""Families whose image processors need torchvision, and whether it is installed.

Where it is, transformers treats images of other families differently, and so would the models that tests compare with.
`make test` therefore runs twice: once without torchvision, and once with it, and then these families alone.
"""

from __future__ import annotations

import pathlib
import sys

from lookonce.model.libraries import torchvision_import

# These are names of tiny families.
TORCHVISION_FAMILIES = frozenset({"lfm2_vl", "llama4", "muse_glimmer"})
# Here `make venv` installs torchvision.
INSTALLED = pathlib.Path(sys.prefix) / "torchvision"
HAS_TORCHVISION = torchvision_import.is_installed()
