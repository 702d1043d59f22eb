"""The documented example of structured output, in an engine thread and in an engine process, cold and warm."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

import pytest

from lookonce.client import Client
from lookonce.local.local_stack import LocalStack
from tests.conftest import DEMO_MODEL, ONE_THREAD, REPOSITORY
from tests.e2e.pictures import Picture, fresh

PAGE = REPOSITORY / "docs/sdk.md"
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue", "pink"]}, "sure": {"type": "boolean"}},
    "required": ["colour", "sure"],
    "additionalProperties": False,
}


@pytest.fixture
def picture(tmp_path: pathlib.Path) -> Picture:
    (picture,) = fresh(1)
    (tmp_path / "picture.png").write_bytes(picture.data)
    return picture


def test_the_example_runs(stack: LocalStack, picture: Picture, tmp_path: pathlib.Path) -> None:
    pattern = r"<!-- run by tests/e2e/test_structured_output.py -->\n```python\n(.*?)```"
    (example,) = re.findall(pattern, PAGE.read_text(), re.DOTALL)
    code = example.replace("127.0.0.1:50051", stack.decoder_targets[0])
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert process.stdout.strip() in ("red", "blue", "pink"), process.stderr


def test_an_engine_process_gives_the_same_answers(stack: LocalStack, picture: Picture) -> None:
    flags = (*ONE_THREAD, "--engine", "process")
    with LocalStack(DEMO_MODEL, num_encoders=1, num_decoders=1, decoder_arguments=flags) as other:
        answers = []
        for target in (stack.decoder_targets[0], other.decoder_targets[0]):
            with Client.connect(target) as client:
                answers.append(
                    [
                        client.generate("What colour is it?", images=[picture.data], json_schema=SCHEMA, seed=seed).text
                        for seed in range(3)
                    ]
                )
                with pytest.raises(Exception, match=r"^regex: "):
                    client.generate("What colour is it?", regex="(")
    assert answers[0] == answers[1]
    assert all(set(json.loads(text)) == {"colour", "sure"} for text in answers[0])
