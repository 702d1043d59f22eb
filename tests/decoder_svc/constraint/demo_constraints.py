"""Constraints for the demo model's tokenizer."""

from __future__ import annotations

from decoder_svc.constraint.grammars import folder_grammars
from decoder_svc.engine.constraint_desk import ConstraintDesk
from tests.conftest import DEMO_MODEL

DEMO_VOCAB = 600


def demo_constraints() -> ConstraintDesk:
    """Returns a desk that loads the tokenizer when the first request has a constraint."""
    return ConstraintDesk(folder_grammars(DEMO_MODEL), DEMO_VOCAB)
