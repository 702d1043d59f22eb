"""Imports torchvision, of which some image processors need the functions that resize, where its operators do not load.

The wheel on PyPI for x86-64 is compiled against PyTorch for CUDA. Beside PyTorch for CPUs, its compiled operators do
not load, and importing the package fails with "operator torchvision::nms does not exist". No image processor calls
them: resizing is PyTorch's own. They are declared here, so that the package can describe them, and never implemented.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PACKAGE = "torchvision"
# torchvision describes the results of these operators to the compiler when it is imported.
_DESCRIBED = (
    "nms(Tensor a, Tensor b, float c) -> Tensor",
    "qnms(Tensor a, Tensor b, float c) -> Tensor",
    "roi_align(Tensor a, Tensor b, float c, SymInt d, SymInt e, int f, bool g) -> Tensor",
    "_roi_align_backward(Tensor a, Tensor b, float c, SymInt d, SymInt e, SymInt f, SymInt g, SymInt h, SymInt i, "
    "int j, bool k) -> Tensor",
    "roi_pool(Tensor a, Tensor b, float c, SymInt d, SymInt e) -> (Tensor, Tensor)",
    "_roi_pool_backward(Tensor a, Tensor b, Tensor c, float d, SymInt e, SymInt f, SymInt g, SymInt h, SymInt i, "
    "SymInt j) -> Tensor",
    "ps_roi_align(Tensor a, Tensor b, float c, SymInt d, SymInt e, int f) -> (Tensor, Tensor)",
    "_ps_roi_align_backward(Tensor a, Tensor b, Tensor c, float d, SymInt e, SymInt f, int g, SymInt h, SymInt i, "
    "SymInt j, SymInt k) -> Tensor",
    "ps_roi_pool(Tensor a, Tensor b, float c, SymInt d, SymInt e) -> (Tensor, Tensor)",
    "_ps_roi_pool_backward(Tensor a, Tensor b, Tensor c, float d, SymInt e, SymInt f, SymInt g, SymInt h, SymInt i, "
    "SymInt j) -> Tensor",
    "deform_conv2d(Tensor a, Tensor b, Tensor c, Tensor d, Tensor e, SymInt f, SymInt g, SymInt h, SymInt i, SymInt j, "
    "SymInt k, SymInt l, SymInt m, bool n) -> Tensor",
    "_deform_conv2d_backward(Tensor a, Tensor b, Tensor c, Tensor d, Tensor e, Tensor f, SymInt g, SymInt h, SymInt i, "
    "SymInt j, SymInt k, SymInt l, SymInt m, SymInt n, bool o) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "_cuda_version() -> int",
)


def is_installed() -> bool:
    """Whether there is a package of this name."""
    return sys.modules.get(PACKAGE) is not None or importlib.util.find_spec(PACKAGE) is not None


@functools.cache
def import_torchvision() -> Any:
    """Returns the package, without its operators if they do not load. Raises ImportError if it cannot be imported.

    Whoever imports it for the first time calls this; afterwards `import torchvision` works.
    """
    try:
        importlib.import_module(PACKAGE)
    except RuntimeError:
        # The failed import has left its parts behind.
        for name in [each for each in sys.modules if each.startswith(f"{PACKAGE}.")]:
            del sys.modules[name]
        _declare_operators()
    except (Exception, SystemExit):
        # It fails once more below.
        pass
    try:
        # Image processors need this part.
        importlib.import_module(f"{PACKAGE}.transforms.v2")
        return sys.modules[PACKAGE]
    # A package that is broken, or is another one of this name, may raise anything.
    except (Exception, SystemExit) as error:
        for name in [each for each in sys.modules if each.partition(".")[0] == PACKAGE]:
            del sys.modules[name]
        raise ImportError(f"torchvision does not fit the installed PyTorch: {type(error).__name__}: {error}") from error


@functools.cache
def _declare_operators() -> torch.library.Library:
    # Imported here, because it takes seconds.
    import torch

    # The declarations last as long as the library.
    library = torch.library.Library(PACKAGE, "DEF")
    for schema in _DESCRIBED:
        library.define(schema)
    return library
