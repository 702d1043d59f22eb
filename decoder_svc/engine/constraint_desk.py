"""Gets constraints ready on a thread of its own, so that steps go on meanwhile."""

from __future__ import annotations

import itertools
import logging
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from decoder_svc.constraint.answer_follower import AnswerFollower
from decoder_svc.engine.messages import Compiled
from decoder_svc.scheduling.request import Request, RequestId
from decoder_svc.scheduling.sampling_params import Constraint, TokenConstraint
from lookonce.errors import InternalError, LookonceError
from lookonce.turns.cost_turns import CostTurns, TurnRequest
from lookonce.turns.fair_queue import CallerId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Work:
    """A request whose constraint waits."""

    request: Request
    constraint: Constraint
    done: Callable[[Compiled], None]


class ConstraintDesk:
    """Turns a request's constraint into the state that follows its answer, before the scheduler gets the request.

    Tenants take turns by the length of their constraints. One that sends a hundred large schemas at once would delay
    the others' requests by all of them (38 s, in an attack).
    """

    def __init__(self, follower: AnswerFollower) -> None:
        self._follower = follower
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="constraints")
        # Guards `_waiting`, from which the thread takes.
        self._lock = threading.Lock()
        self._waiting: CostTurns[_Work] = CostTurns()
        self._numbers = itertools.count()
        # Requests whose constraints wait or are being compiled, with their turns.
        self._compiling: dict[RequestId, tuple[Request, TurnRequest]] = {}

    def begin(self, request: Request, done: Callable[[Compiled], None]) -> None:
        """Starts to compile when it is the request's turn. `done` gets the outcome on another thread."""
        constraint = request.params.constraint
        assert constraint is not None, "the request has no constraint"
        caller = CallerId(request.tenant, request.request_id)
        turn = TurnRequest(caller, next(self._numbers), 1 + len(constraint.text))
        self._compiling[request.request_id] = request, turn
        with self._lock:
            self._waiting.put(turn, _Work(request, constraint, done))
        self._thread.submit(self._compile_next)

    def take(self, request_id: RequestId) -> Request | None:
        """Returns a request whose constraint has been compiled; None if it was given up."""
        request, _ = self._compiling.pop(request_id, (None, None))
        return request

    def give_up(self, request_id: RequestId) -> Request | None:
        """Returns a request whose constraint waits or is being compiled, and is not needed any more; None: none is."""
        request, turn = self._compiling.pop(request_id, (None, None))
        if turn is not None:
            with self._lock:
                self._waiting.discard(turn)
        return request

    def close(self) -> None:
        """Ends the process that follows answers, and what waits for it."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._follower.close()

    def _compile_next(self) -> None:
        with self._lock:
            # Requests that were given up leave fewer than there are calls.
            work = self._waiting.take() if len(self._waiting) else None
        if work is None:
            return
        request, constraint = work.request, work.constraint
        outcome: TokenConstraint | LookonceError
        try:
            self._follower.prepare(constraint)
            outcome = self._follower.follow(
                constraint,
                request.num_prompt_tokens,
                request.params.stop_token_ids,
                is_greedy=request.params.is_greedy,
            )
        except LookonceError as error:
            outcome = error
        except Exception:
            incident = uuid.uuid4().hex
            logger.exception("a constraint could not be compiled, incident %s", incident)
            outcome = InternalError(f"internal error {incident}")
        work.done(Compiled(request.request_id, outcome))
