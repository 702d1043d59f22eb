"""The threads in which prompts are prepared. Tenants and calls take turns in them, piece by piece.

A call's work is cut into pieces: the hash and header of one file, a look-up of a few digests in the shared cache, the
split of the videos, and the rendering and tokenizing of the text. A piece that has begun is not interrupted, so each
kind of piece has its own threads: a piece waits for those of its own kind only. `lookonce/turns/` has the rule of the
turns.

The cost of a piece must be known before it begins. That of a text is its number of characters, and that of a look-up
its number of digests. That of a file is not known: a header takes from 0.1 ms to 80 ms, and its worst length is
anything from 22 kB on (2 × AMD EPYC, 2026-11-25). So all files count the same, as in the encoder.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from lookonce.content_key import Tenant
from lookonce.turns.cost_turns import TurnRequest
from lookonce.turns.fair_queue import CallerId
from lookonce.turns.turn_threads import TurnThreads

ArgumentsT = ParamSpec("ArgumentsT")
ResultT = TypeVar("ResultT")

# Threads that hash files and read headers. Headers are read in Python, so that more threads only share one processor.
_NUM_FILE_THREADS = 2
# Threads that ask the shared cache, and wait for it.
_NUM_LOOKUP_THREADS = 4
# Threads that split videos, render templates, tokenize and detokenize: few ones compete with the engine's thread.
_NUM_TEXT_THREADS = 2
# Threads that wait for constraints to be compiled, which one process does one by one.
_NUM_CONSTRAINT_THREADS = 1
# Threads for longer texts. Each may take seconds, and the others stay free meanwhile.
_NUM_LONG_TEXT_THREADS = 1
# Longest text that is not a long one, characters. It takes 20 to 120 ms.
LONG_TEXT_CHARS = 32_768
# Characters that a text counts at least: templates and layouts take time for the shortest one, too.
MIN_TEXT_CHARS = 1024


class PreparationThreads:
    """The threads of one decoder, and the pieces of work that wait for them. Event loop only."""

    def __init__(self) -> None:
        # Positions of the pieces in the order of asking.
        self._numbers = itertools.count()
        self._files = TurnThreads(_NUM_FILE_THREADS, "image")
        self._lookups = TurnThreads(_NUM_LOOKUP_THREADS, "image-lookup")
        self._texts = TurnThreads(_NUM_TEXT_THREADS, "prompt")
        self._long_texts = TurnThreads(_NUM_LONG_TEXT_THREADS, "prompt-long")
        self._constraints = TurnThreads(_NUM_CONSTRAINT_THREADS, "constraint")

    async def read_file(
        self,
        caller: CallerId,
        function: Callable[ArgumentsT, ResultT],
        *arguments: ArgumentsT.args,
        **keywords: ArgumentsT.kwargs,
    ) -> ResultT:
        """Calls `function`, which reads one file, when it is the caller's turn."""
        return await self._files.run(self._request(caller, 1), function, *arguments, **keywords)

    async def look_up(
        self,
        caller: CallerId,
        num_keys: int,
        function: Callable[ArgumentsT, ResultT],
        *arguments: ArgumentsT.args,
        **keywords: ArgumentsT.kwargs,
    ) -> ResultT:
        """Calls `function`, which asks the shared cache for `num_keys` keys, when it is the caller's turn."""
        return await self._lookups.run(self._request(caller, num_keys), function, *arguments, **keywords)

    async def compute_text(
        self,
        caller: CallerId,
        num_chars: int,
        function: Callable[ArgumentsT, ResultT],
        *arguments: ArgumentsT.args,
        **keywords: ArgumentsT.kwargs,
    ) -> ResultT:
        """Calls `function`, which takes as long as tokenizing `num_chars` characters, when it is the caller's turn."""
        threads = self._texts if num_chars <= LONG_TEXT_CHARS else self._long_texts
        request = self._request(caller, max(MIN_TEXT_CHARS, num_chars))
        return await threads.run(request, function, *arguments, **keywords)

    async def compile(
        self,
        caller: CallerId,
        num_chars: int,
        function: Callable[ArgumentsT, ResultT],
        *arguments: ArgumentsT.args,
        **keywords: ArgumentsT.kwargs,
    ) -> ResultT:
        """Calls `function`, which compiles a constraint of `num_chars` characters, when it is the caller's turn."""
        request = self._request(caller, max(MIN_TEXT_CHARS, num_chars))
        return await self._constraints.run(request, function, *arguments, **keywords)

    def close(self) -> None:
        """Drops what waits. Does not wait for the pieces in progress."""
        for threads in (self._files, self._lookups, self._texts, self._long_texts, self._constraints):
            threads.close(wait=False)

    def _request(self, caller: CallerId, cost: int) -> TurnRequest:
        return TurnRequest(caller, next(self._numbers), cost)


def caller_of(tenant: Tenant, request_id: str) -> CallerId:
    """Returns the caller whose turn a request takes: the same one as for its images in the encoder."""
    return CallerId(tenant.tag, request_id)
