"""What running a model's chat template may raise. Needs Jinja."""

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
"""A template is a program, and its operators are Python's."""
