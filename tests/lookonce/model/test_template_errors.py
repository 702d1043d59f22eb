"""Faulty chat templates raise only errors of the listed types, so that a request cannot fail a service otherwise."""

from __future__ import annotations

import jinja2
import jinja2.sandbox
import pytest

from lookonce.model.template_errors import TEMPLATE_ERRORS

FAULTY = {
    "syntax": "{% for message in %}",
    "missing variable": "{{ messages.content }}",
    "forbidden attribute": "{{ ''.__class__.__mro__[1].x }}",
    "division by zero": "{{ 1 / 0 }}",
    "operands of different types": "{{ 'a' + 1 }}",
    "wrong value": "{{ 'abc'.index('z') }}",
    "missing key": "{{ {}.pop('role') }}",
    "endless recursion": "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "unknown filter": "{{ 'a' | unknown }}",
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_template_raises_a_listed_error(name: str) -> None:
    environment = jinja2.sandbox.SandboxedEnvironment()
    with pytest.raises(TEMPLATE_ERRORS):
        environment.from_string(FAULTY[name]).render()
