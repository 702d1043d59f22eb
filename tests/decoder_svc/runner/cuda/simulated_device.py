"""A CUDA device that computes on the CPU and notes what a real one would wait for.

Tensors on it are `DeviceTensor`s around tensors of the CPU. Operators that mix them with tensors in host memory raise,
as on a real device. Copies between the two, and operators that the host must wait for, are noted as events with the
line of our code that caused them. Inside a recording they raise.
"""

from __future__ import annotations

import contextlib
import linecache
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from tests.decoder_svc.runner.operator_tape import OperatorTape

CUDA = torch.device("cuda", 0)
# Kinds of events.
PINNED, PAGEABLE, RESULT, HOST_INDEX, SYNCHRONISATION = "pinned", "pageable", "result", "host index", "synchronisation"
# A copy to the host that begins, for which nobody waits yet.
RETURN = "return"

_aten = torch.ops.aten
# The content of page-locked memory until the copy into it is done.
_GARBAGE = -(10**6)
# Operators whose result, or its shape, the host must know.
_ASK = frozenset(
    packet
    for packet in (
        _aten._local_scalar_dense, _aten.item, _aten.is_nonzero, _aten.nonzero, _aten.masked_select, _aten.equal,
        _aten.unique_consecutive, _aten._unique2, _aten.unique_dim, _aten.allclose,
    )
)  # fmt: skip
_COPIES = frozenset({_aten.to, _aten._to_copy, _aten.copy_})
_INDEXING = frozenset({_aten.index, _aten.index_put_, _aten.index_put, _aten._index_put_impl_})


@dataclass(frozen=True, slots=True)
class Event:
    """A copy between host and device, or an operator that makes the host wait."""

    kind: str
    operator: str
    # The innermost line of our own code.
    place: str


class DeviceTensor(Tensor):  # type: ignore[misc]  # torch is untyped here
    """A tensor that says it is on the CUDA device; `content` has its numbers."""

    content: Tensor
    device = property(lambda _self: CUDA)
    is_cuda = property(lambda _self: True)
    is_cpu = property(lambda _self: False)

    @staticmethod
    def __new__(cls, content: Tensor) -> DeviceTensor:
        # PyTorch cannot make views of tensors of both modes: all are outside of inference mode, the contents are not.
        with torch.inference_mode(False):
            made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
                cls,
                content.size(),
                strides=content.stride(),
                storage_offset=content.storage_offset(),
                dtype=content.dtype,
            )
        made.content = content
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises: outside of the device's mode, nothing could be noted."""
        raise AssertionError(f"{func} on a simulated device that is not active")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"DeviceTensor({self.content})"

    def cpu(self, *_: Any) -> Tensor:
        """Copies to the host. PyTorch's own method believes the contents' device and does nothing."""
        return _aten._to_copy(self, device=torch.device("cpu"))

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Moves to the device and type of another tensor. PyTorch's own method believes the contents' device."""
        if args and isinstance(args[0], Tensor):
            return super().to(args[0].device, args[0].dtype, *args[1:], **kwargs)
        return super().to(*args, **kwargs)

    def tolist(self) -> Any:
        """Copies to the host, as a real device does."""
        return self.cpu().tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        """Raises TypeError like a real device's tensor."""
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def data_ptr(self) -> int:
        """Returns the address of the numbers."""
        return int(self.content.data_ptr())


class SimulatedDevice(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped here
    """Runs operators on device tensors and notes events while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        # Kernels launched without PyTorch, and those that a compiler would have made for the launches.
        self.num_launches = 0
        self.variants: set[tuple[Any, ...]] = set()
        # Whether operators raise for which the host would wait.
        self.refuses_waiting = False
        # Copies to the host that nobody has waited for, with their numbers: the host's memory does not have them yet.
        self._returning: list[tuple[Tensor, Tensor]] = []
        self._tape: OperatorTape | None = None
        # Addresses of page-locked memory, with a tensor that keeps it from being used for something else.
        self._pinned: dict[int, Tensor] = {}

    def pin(self, host: Tensor) -> Tensor:
        """Replaces `Tensor.pin_memory`: copies to memory that counts as page-locked."""
        pinned = host.clone()
        self._pinned[pinned.untyped_storage().data_ptr()] = pinned
        return pinned

    def set_sync_debug_mode(self, mode: int | str) -> None:
        """Replaces the function of torch.cuda with the same name."""
        self.refuses_waiting = mode in ("error", 2)

    def wait(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        """Waits for copies to the host."""
        self.events.append(Event(RESULT, "wait", _place()))
        with _disable_current_modes():
            for target, numbers in copies:
                target.copy_(numbers)
        self._returning = [each for each in self._returning if not any(each is other for other in copies)]

    @property
    def returning(self) -> list[tuple[Tensor, Tensor]]:
        """The copies to the host that have begun and that nobody has waited for."""
        return list(self._returning)

    @contextlib.contextmanager
    def recording(self, tape: OperatorTape) -> Iterator[None]:
        """Records all operators inside on `tape`."""
        self._tape = tape
        try:
            yield
        finally:
            self._tape = None

    def launch(self, kernel: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        """Runs a kernel of Triton's interpreter on the tensors' contents."""
        assert all(isinstance(each, DeviceTensor) for each in args if isinstance(each, Tensor)), "a tensor on the host"
        self.num_launches += 1
        args, kwargs = _mapped(_content, tuple(args)), _mapped(_content, kwargs)
        if self._tape is not None:
            self._tape.note(kernel, args, kwargs)
        with _disable_current_modes():
            kernel(*args, **kwargs)

    @contextlib.contextmanager
    def noting(self) -> Iterator[list[Event]]:
        """Yields a list that has, at the end of the block, the events inside it."""
        noted: list[Event] = []
        before = len(self.events)
        yield noted
        noted += self.events[before:]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator on the tensors' contents."""
        kwargs = dict(kwargs or {})
        packet = func.overloadpacket
        tensors = list(_tensors((args, kwargs)))
        on_device = [isinstance(each, DeviceTensor) for each in tensors]
        target = self._target(packet, args, kwargs, is_any_on_device=any(on_device))
        is_moved = packet in _COPIES and self._note_copy(packet, func, args, kwargs, target)
        if packet not in _COPIES and any(on_device):
            self._check(packet, func, args, tensors)
        with contextlib.nullcontext() if self._tape is None else self._tape:
            is_pinned = kwargs.pop("pin_memory", False)
            if is_moved and packet is _aten.copy_ and target != CUDA and self._is_asynchronous(args, kwargs):
                self._returning.append((args[0], _content(args[1]).clone()))
                return args[0].fill_(_GARBAGE)
            result = func(*_mapped(_content, args), **_mapped(_content, kwargs))
            if is_pinned:
                self._pinned[result.untyped_storage().data_ptr()] = result
            # Host and device share no memory, although contents are on the same device.
            result = result.clone() if is_moved and packet is not _aten.copy_ else result
        if target != CUDA:
            return result
        alias = func._schema.arguments[0].alias_info if func._schema.arguments else None
        if alias is not None and alias.is_write and isinstance(args[0], DeviceTensor):
            return args[0]
        # A copy that changes nothing returns the tensor itself.
        same = {id(each.content): each for each in tensors if isinstance(each, DeviceTensor)}
        return _mapped(lambda each: same[id(each)] if id(each) in same else _on_device(each), result)

    def _target(self, packet: Any, args: Any, kwargs: dict[str, Any], *, is_any_on_device: bool) -> torch.device:
        """Returns the device of the result."""
        for wanted in (kwargs.get("device"), *args):
            if isinstance(wanted, torch.device):
                return CUDA if wanted.type == "cuda" else torch.device("cpu")
        if packet is _aten.copy_:
            is_any_on_device = isinstance(args[0], DeviceTensor)
        return CUDA if is_any_on_device else torch.device("cpu")

    def _note_copy(self, packet: Any, func: Any, args: Any, kwargs: dict[str, Any], target: torch.device) -> bool:
        """Returns whether numbers move between host and device."""
        source = args[1] if packet is _aten.copy_ else args[0]
        if packet is _aten.to and len(args) > 1 and isinstance(args[1], Tensor):
            raise AssertionError("Tensor.to(other) is not simulated")
        if isinstance(source, DeviceTensor) == (target == CUDA):
            return False
        is_waiting = not (kwargs.get("non_blocking") or True in args[2:])
        if target != CUDA:
            is_asynchronous = packet is _aten.copy_ and self._is_asynchronous(args, kwargs)
            self._note(RETURN if is_asynchronous else RESULT, func)
        elif source.untyped_storage().data_ptr() in self._pinned and not is_waiting:
            self._note(PINNED, func)
        else:
            self._note(PAGEABLE, func)
        return True

    def _is_asynchronous(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether the host goes on during a copy to its memory."""
        is_pinned = args[0].untyped_storage().data_ptr() in self._pinned
        return is_pinned and bool(kwargs.get("non_blocking") or True in args[2:])

    def _check(self, packet: Any, func: Any, args: Any, tensors: list[Tensor]) -> None:
        if packet in _ASK:
            self._note(SYNCHRONISATION, func)
        if packet in _INDEXING:
            for index in args[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    self._note(SYNCHRONISATION, func)
                elif index is not None and not isinstance(index, DeviceTensor):
                    self._note(HOST_INDEX, func)
            tensors = [each for each in (args[0], *args[2:3]) if isinstance(each, Tensor)]
        if packet is _aten.repeat_interleave and isinstance(args[-1], Tensor):
            self._note(SYNCHRONISATION, func)
        if any(each.dim() and not isinstance(each, DeviceTensor) for each in tensors):
            raise RuntimeError(f"Expected all tensors to be on the same device, in {func} at {_place()}")

    def _note(self, kind: str, func: Any) -> None:
        event = Event(kind, str(func), _place())
        self.events.append(event)
        if self._tape is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {event}")
        if self.refuses_waiting and kind not in (PINNED, RETURN):
            raise RuntimeError(f"called a synchronizing CUDA operation: {event}")


class SimulatedKernel:
    """A function of Triton's interpreter that is launched on a simulated device, and called from other kernels."""

    def __init__(self, function: Any, device: SimulatedDevice) -> None:
        self._function = function
        self._device = device

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self._device.variants.add(self._variant(args, kwargs))
            self._device.launch(self._function[grid], args, kwargs)

        return launch

    def _variant(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Returns what Triton compiles a kernel for: constants, types, and whether numbers are 1 or multiples of 16."""
        general = self._function.kwargs["do_not_specialize"] or ()
        kinds: list[Any] = [self._function.__name__, *sorted(kwargs.items())]
        for name, value in zip(self._function.arg_names, args, strict=False):
            if isinstance(value, Tensor):
                kinds.append((name, value.dtype))
            elif isinstance(value, int) and name not in general:
                kinds.append((name, value == 1, value % 16 == 0))
        return tuple(kinds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Does the same as `tree_map`, which takes twice as long as the operator for the few arguments of one."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([_mapped(change, each) for each in value])
    if kind is dict:
        return {name: _mapped(change, each) for name, each in value.items()}
    # Operators with several results return named tuples.
    if isinstance(value, tuple):
        return tree_map(change, value)
    return change(value)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors among an operator's arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def _content(value: Any) -> Any:
    """Returns an argument as the operator on contents needs it."""
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.content if isinstance(value, DeviceTensor) else value


def _on_device(value: Any) -> Any:
    return DeviceTensor(value) if isinstance(value, Tensor) else value


def _place() -> str:
    """Returns the innermost line of the decoder's code, or of the test."""
    found: tuple[str, int] | None = None
    for frame, number in traceback.walk_stack(None):
        name = frame.f_code.co_filename
        if "/decoder_svc/" in name and "/tests/" not in name:
            found = name, number
            break
        if found is None and "site-packages" not in name and name != __file__:
            found = name, number
    assert found is not None
    return f"{found[0].rpartition('/')[2]}: {linecache.getline(*found).strip()}"


def activate(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    """Makes PyTorch accept the simulated device during one test. The device must be entered, too."""
    device = SimulatedDevice()
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    # Modules get new parameters when they move to the device: old ones cannot hold a DeviceTensor.
    monkeypatch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(Tensor, "pin_memory", lambda host: device.pin(host))
    made = torch.tensor

    def tensor(data: Any, **kwargs: Any) -> Tensor:
        """Copies numbers that are made on the host, since the constructor knows no simulated device."""
        wanted = kwargs.pop("device", None)
        return made(data, **kwargs) if wanted is None else made(data, **kwargs).to(wanted)

    monkeypatch.setattr(torch, "tensor", tensor)
    return device
