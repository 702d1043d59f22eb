"""Compiles the services' C++ kernels into the image, for every kind of processor that they support.

A container with a read-only root cannot do this later, and the nodes are rarely the machine that built the image.
lookonce.model.native_library decides where the libraries go (XDG_CACHE_HOME). Run this as the user of the services.
"""

from __future__ import annotations

import platform
import sys
from unittest.mock import patch

import torch

from decoder_svc.runner.cpu import attention
from encoder_svc.vision import dense_attention
from lookonce.model import native_library

# PyTorch's name for the instruction set, and whether the processor multiplies bfloat16 pairs (AVX512_BF16).
_PROCESSORS = (("DEFAULT", False), ("AVX2", False), ("AVX512", False), ("AVX512", True))
_SOURCES = (attention.SOURCES, dense_attention.SOURCES)


def main() -> None:
    """Compiles all libraries. Raises NativeLibraryError if one cannot be compiled, so that the image build fails."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    for level, has_pairs in _PROCESSORS if is_x86 else _PROCESSORS[:1]:
        with (
            patch.object(torch.backends.cpu, "get_cpu_capability", lambda level=level: level),
            patch.object(torch.cpu, "get_capabilities", lambda has_pairs=has_pairs: {"avx512_bf16": has_pairs}),
        ):
            for sources in _SOURCES:
                native_library.load_library.cache_clear()
                native_library.load_library(sources)
    for path in sorted(native_library.cache_folder().iterdir()):
        print(path, file=sys.stderr)


if __name__ == "__main__":
    main()
