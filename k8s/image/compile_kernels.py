"""Compiles the services' C++ kernels into the image, for every kind of processor that they support.

A container with a read-only root cannot do this later, and the nodes are rarely the machine that built the image.
native_library.py decides where the libraries go (XDG_CACHE_HOME). Run this as the user of the services.
"""

from __future__ import annotations

import sys

from lookonce.model.kernels.native_compiler import machine_levels
from lookonce.model.libraries.lean_transformers import import_lean_transformers


def main() -> None:
    """Compiles all libraries. Raises NativeLibraryError if one cannot be compiled, so that the image build fails."""
    import_lean_transformers()
    # Imported here, because they import transformers, too.
    from decoder_svc.runner.cpu import attention
    from encoder_svc.vision import dense_attention
    from lookonce.model.kernels import native_library, native_linear

    for level in machine_levels():
        for sources in (native_linear.SOURCES, attention.SOURCES, dense_attention.SOURCES):
            native_library.library_of_level(sources, level)
    for path in sorted(native_library.cache_folder().iterdir()):
        print(path, file=sys.stderr)


if __name__ == "__main__":
    main()
