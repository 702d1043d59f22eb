"""An event loop whose time passes only while nothing else is to be done, so that tests take minutes without waiting."""

from __future__ import annotations

import asyncio
import functools
import selectors
import sys
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

ArgumentsT = ParamSpec("ArgumentsT")
ResultT = TypeVar("ResultT")


class _Selector(selectors.DefaultSelector):
    """Lets the loop's time pass in place of waiting."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events and timeout is None:
            raise AssertionError("nothing will ever happen again")
        if not events and timeout:
            self.loop.on_quiet(self.loop.now_s)
            self.loop.now_s += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with its own clock. `on_quiet` is called with the time whenever nothing more happens then."""

    def __init__(self, on_quiet: Callable[[float], None]) -> None:
        selector = _Selector()
        super().__init__(selector)
        selector.loop, self.now_s, self.on_quiet = self, 1000.0, on_quiet
        # Errors of callbacks.
        self.errors: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _, context: self.errors.append(context))

    def time(self) -> float:
        return self.now_s


def run(main: Coroutine[Any, Any, ResultT], on_quiet: Callable[[float], None] = lambda _: None) -> ResultT:
    """Runs a coroutine in virtual time. No callback may have raised."""
    loop = VirtualLoop(on_quiet)
    try:
        result = loop.run_until_complete(main)
    finally:
        loop.close()
    assert not loop.errors
    return result


def throughout(test: Callable[ArgumentsT, Coroutine[Any, Any, None]]) -> Callable[ArgumentsT, None]:
    """Makes a test run in virtual time, so that its pauses are as long as it says on any machine."""

    @functools.wraps(test)
    def run_test(*args: ArgumentsT.args, **kwargs: ArgumentsT.kwargs) -> None:
        run(test(*args, **kwargs))

    return run_test


def num_function_calls(of: Callable[[], None]) -> int:
    """Returns the number of functions that a call runs: its cost, whatever the machine does meanwhile."""
    num = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal num
        num += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        of()
    finally:
        sys.setprofile(before)
    return num
