"""Lists of shapes as JSON, asked of the demo model through the whole system."""

from __future__ import annotations

import json

import jsonschema
import pytest

from demo.lists import ask_for_lists, count_exact
from demo.questions import LIST_SCHEMA
from lookonce.aio import AsyncClient
from lookonce.local.local_stack import LocalStack
from tests.conftest import DEMO_MODEL

RED = {"shape": "circle", "colour": "red", "position": "centre"}
BLUE = {"shape": "star", "colour": "blue", "position": "top left"}


def listed(*shapes: dict[str, str]) -> str:
    return json.dumps({"shapes": shapes})


def test_fields_are_counted_shape_by_shape() -> None:
    counted = count_exact(
        [listed(RED), listed(RED, BLUE), listed(RED), listed(BLUE)],
        [listed(RED), listed(RED), listed(RED, BLUE), listed(BLUE | {"colour": "red"})],
    )
    assert (counted.num_pictures, counted.num_exact_pictures) == (4, 1)
    assert (counted.num_fields, counted.num_exact_fields) == (3 + 6 + 6 + 3, 3 + 3 + 3 + 2)


def test_an_answer_beside_the_schema_is_an_error() -> None:
    with pytest.raises(jsonschema.ValidationError):
        count_exact([listed(RED)], ['{"shapes": [{"shape": "circle"}]}'])
    jsonschema.validate(json.loads(listed(RED, BLUE)), LIST_SCHEMA)


async def test_most_fields_of_new_pictures_are_exact() -> None:
    with LocalStack(DEMO_MODEL) as stack:
        async with AsyncClient.connect(stack.decoder_targets[0], stack.encoder_targets[0]) as client:
            counted = await ask_for_lists(client, num_pictures=120, seed=5)
    assert counted.num_pictures == 120
    assert counted.share >= 0.95, counted
