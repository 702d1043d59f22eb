"""Compiles the constraints of requests on a thread of its own, so that steps go on meanwhile."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from decoder_svc.constraint.answer_constraint import AnswerConstraint
from decoder_svc.constraint.grammars import Grammars
from decoder_svc.engine.messages import Compiled
from decoder_svc.scheduling.request import Request
from decoder_svc.scheduling.sampling_params import Constraint
from lookonce.errors import InternalError, LookonceError

logger = logging.getLogger(__name__)


class ConstraintDesk:
    """Turns a request's constraint into the state that follows its answer."""

    def __init__(self, grammars: Grammars, vocab_size: int) -> None:
        """A mask has a bit for each of `vocab_size` logits."""
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="constraints")

    def begin(self, request: Request, done: Callable[[Compiled], None]) -> None:
        """Starts to compile. `done` gets the outcome on another thread."""
        assert request.params.constraint is not None, "the request has no constraint"
        self._thread.submit(self._compile, request, request.params.constraint, done)

    def _compile(self, request: Request, constraint: Constraint, done: Callable[[Compiled], None]) -> None:
        outcome: AnswerConstraint | LookonceError
        try:
            matcher = self._grammars.matcher(constraint)
            stop_token_ids = request.params.stop_token_ids
            outcome = AnswerConstraint(
                matcher,
                request.num_prompt_tokens,
                stop_token_ids,
                self._vocab_size,
                self._grammars.end_token_ids,
            )
        except LookonceError as error:
            outcome = error
        except Exception:
            incident = uuid.uuid4().hex
            logger.exception("a constraint could not be compiled, incident %s", incident)
            outcome = InternalError(f"internal error {incident}")
        done(Compiled(request.request_id, outcome))
