"""Imports transformers without PyTorch's compiler and its distributed tensors, and reads its folder of models once.

Importing transformers' model code also imports `torch._dynamo`, for one class and a few decorators, and
`torch.distributed.tensor`, for models spread over several devices. The services use neither: nothing here is compiled
by `torch.compile`, and a model runs on one device. ADR 21 has the reasons and the measurements.

transformers also reads all of its 1,600 files of models to learn their names, and it does that twice. Where torchvision
is installed, transformers imports it for image processors. It takes 52 MB and 1 s, so only models that need it get it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import pathlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from lookonce.model.libraries import torchvision_import

logger = logging.getLogger(__name__)

_COMPILER = "torch._dynamo"


def import_lean_transformers(*, needs_torchvision: bool = False, shows_progress: bool = True) -> None:
    """Imports transformers' model code. Call it once, before anything else imports transformers.

    The compiler itself is not changed: whatever asks for it later imports it. A process that has already imported
    transformers is left as it is. Without `needs_torchvision`, or where torchvision cannot be imported, transformers
    does as if it were not installed. With `shows_progress` False, loading a model shows no progress bars, which would
    break a log of JSON lines.
    """
    if "transformers" not in sys.modules:
        _import_lean(needs_torchvision=needs_torchvision)
    if not shows_progress:
        import transformers.utils

        transformers.utils.logging.disable_progress_bar()


def _can_import_torchvision() -> bool:
    try:
        torchvision_import.import_torchvision()
    except ImportError as error:
        logger.warning("torchvision cannot be imported: %s", error)
        return False
    return True


@contextlib.contextmanager
def _without_torchvision() -> Iterator[None]:
    """Hides torchvision, if nobody has imported it yet."""
    if torchvision_import.PACKAGE in sys.modules:
        yield
        return
    # With this entry, the interpreter neither finds nor imports it.
    sys.modules[torchvision_import.PACKAGE] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[torchvision_import.PACKAGE]


def _import_lean(*, needs_torchvision: bool) -> None:
    import torch

    stand_in = sys.modules.setdefault(_COMPILER, _CompilerStandIn())
    try:
        # transformers supports a torch without distributed tensors. It asks once, and remembers the answer.
        with (
            mock.patch.object(torch.distributed, "is_available", return_value=False),
            contextlib.nullcontext() if needs_torchvision and _can_import_torchvision() else _without_torchvision(),
        ):
            import transformers

            _import_models()
            import transformers.generation.utils
            import transformers.modeling_utils
            import transformers.utils

            transformers.utils.is_torch_distributed_available()
            transformers.utils.is_torchvision_available()
    finally:
        if isinstance(stand_in, _CompilerStandIn):
            # Its submodules would not become attributes of the real package. torchvision, where it is installed, has
            # some of them imported.
            for name in [each for each in sys.modules if each == _COMPILER or each.startswith(f"{_COMPILER}.")]:
                del sys.modules[name]
            vars(torch).pop(_COMPILER.rpartition(".")[2], None)


def _import_models() -> None:
    """Imports `transformers.models` with the names that importing `transformers` has already read from its files.

    Reading them takes 0.4 s of CPU. transformers keeps them under the folder's path, and asks by a file in that folder.
    """
    from transformers.utils import import_utils

    read = import_utils.create_import_structure_from_path

    def read_folder(path: str | pathlib.Path) -> Any:
        return read(pathlib.Path(path).parent if pathlib.Path(path).is_file() else pathlib.Path(path))

    with mock.patch.object(import_utils, read.__name__, read_folder):
        import transformers.models  # noqa: F401


class _CompilerStandIn(types.ModuleType):
    """Takes the place of `torch._dynamo` or a submodule while modules that use its decorators are imported."""

    def __init__(self) -> None:
        super().__init__(_COMPILER)
        spec = importlib.util.find_spec(_COMPILER)
        if spec is None or spec.submodule_search_locations is None:
            raise ImportError(f"{_COMPILER} is not installed")
        self.__spec__ = spec
        self.__path__ = list(spec.submodule_search_locations)

    # These decorators only tell the compiler how to treat a function.
    @staticmethod
    def allow_in_graph(function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function unchanged, since nothing compiles it."""
        return function

    @staticmethod
    def assume_constant_result(function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function unchanged, since nothing compiles it."""
        return function

    @staticmethod
    def disable(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
        """Returns the function, or, called with options only, a decorator that returns its function."""
        return function if function is not None else _CompilerStandIn.disable
