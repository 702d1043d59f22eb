"""Tests with random constraints; random_constraints.py runs as many as one likes."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.decoder_svc.constraint.demo_constraints import demo_grammars
from tests.decoder_svc.constraint.random_constraints import KINDS, cases, check


@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_conforms_and_what_is_not_supported_is_refused_by_name(kind: str) -> None:
    grammars = demo_grammars()
    ends = Counter(check(grammars, case, rng) for case, rng in cases(kind, range(60)))
    assert ends["conforms"] > 35
    assert ends["refused by name"] > 1
    assert ends.keys() <= {"conforms", "refused by name", "cut"}


def test_the_programs_that_check_answers_find_wrong_ones() -> None:
    for kind in KINDS:
        found = [case.conforms("\x00 no answer") for case, _ in cases(kind, range(40))]
        assert not any(found)
