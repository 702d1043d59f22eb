"""The exceptions that rendering a model's chat template may raise. Needs Jinja."""

from __future__ import annotations

import jinja2

TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""Includes Python's own errors, because a template's expressions are evaluated by Python."""
