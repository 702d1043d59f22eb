"""Gets constraints ready on a thread of its own, so that steps go on meanwhile."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from decoder_svc.constraint.answer_follower import AnswerFollower
from decoder_svc.engine.messages import Compiled
from decoder_svc.scheduling.request import Request, RequestId
from decoder_svc.scheduling.sampling_params import Constraint, TokenConstraint
from lookonce.errors import InternalError, LookonceError

logger = logging.getLogger(__name__)


class ConstraintDesk:
    """Turns a request's constraint into the state that follows its answer, before the scheduler gets the request."""

    def __init__(self, follower: AnswerFollower) -> None:
        self._follower = follower
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="constraints")
        # Requests whose constraints are being compiled, with the work.
        self._compiling: dict[RequestId, tuple[Request, Future[None]]] = {}

    def begin(self, request: Request, done: Callable[[Compiled], None]) -> None:
        """Starts to compile. `done` gets the outcome on another thread."""
        assert request.params.constraint is not None, "the request has no constraint"
        work = self._thread.submit(self._compile, request, request.params.constraint, done)
        self._compiling[request.request_id] = request, work

    def take(self, request_id: RequestId) -> Request | None:
        """Returns a request whose constraint has been compiled; None if it was given up."""
        request, _ = self._compiling.pop(request_id, (None, None))
        return request

    def give_up(self, request_id: RequestId) -> Request | None:
        """Returns a request whose constraint is being compiled, which is not needed any more; None: there is none."""
        request, work = self._compiling.pop(request_id, (None, None))
        if work is not None:
            work.cancel()
        return request

    def close(self) -> None:
        """Ends the process that follows answers, and what waits for it."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._follower.close()

    def _compile(self, request: Request, constraint: Constraint, done: Callable[[Compiled], None]) -> None:
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
        done(Compiled(request.request_id, outcome))
