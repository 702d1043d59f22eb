"""A model without a chat template answers text prompts, of the SDK and of the command line, with real services."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

import lookonce
from lookonce.errors import ImageCountError, InvalidParameterError, UnsupportedError
from lookonce.generation import TextPrompt
from tests import image_files
from tests.conftest import ONE_THREAD, REPOSITORY
from tests.in_process_stack import InProcessStack
from tests.tiny_families import paligemma

PICTURE = image_files.encoded(image_files.noise(7, 64, 48))
ROWS = paligemma.ROWS_PER_IMAGE
TEXT = "caption en"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = paligemma.build(tmp_path_factory.mktemp("model") / "paligemma")
    few_blocks = (*ONE_THREAD, "--num-kv-blocks", "200")
    with InProcessStack(folder, encoder_arguments=ONE_THREAD, decoder_arguments=few_blocks) as stack:
        yield stack.decoder_targets[0]


def test_the_refusal_of_a_chat_names_the_way(target: str) -> None:
    with lookonce.Client.connect(target) as client, pytest.raises(UnsupportedError) as caught:
        client.generate(TEXT, images=[PICTURE])
    assert "TextPrompt" in caught.value.message
    assert "--raw" in caught.value.message
    assert "<image>" in caught.value.message


def test_a_text_prompt_is_answered_with_its_images(target: str) -> None:
    with lookonce.Client.connect(target) as client:
        placeholder = client.model_info().image_placeholder
        prompt = TextPrompt(placeholder + TEXT, [PICTURE])
        first = client.generate(prompt, max_tokens=8, temperature=0.0)
        assert (first.usage.image_tokens, first.usage.encoded_image_tokens) == (ROWS, ROWS)
        with client.stream(prompt, max_tokens=8, temperature=0.0) as stream:
            assert "".join(stream) == first.text
        assert stream.usage.encoded_image_tokens == 0
        with pytest.raises(ImageCountError):
            client.generate(TextPrompt(TEXT, [PICTURE]))


@pytest.mark.parametrize("text", [TEXT, f"<image>{TEXT}"])
def test_the_command_sends_a_raw_prompt(target: str, text: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "picture.png").write_bytes(PICTURE)
    asked = [text, "--raw", "-i", "picture.png", "--target", target, "--max-tokens", "8", "--temperature", "0"]
    finished = subprocess.run(
        [sys.executable, "-m", "lookonce.cli", "generate", *asked],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "200"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    assert f"{ROWS} " not in finished.stdout
    assert "image rows" in finished.stderr
    with lookonce.Client.connect(target) as client:
        expected = client.generate(TextPrompt(f"<image>{TEXT}", [PICTURE]), max_tokens=8, temperature=0.0)
    assert finished.stdout == expected.text + "\n"


def test_token_ids_are_answered_as_their_text(target: str) -> None:
    with lookonce.Client.connect(target) as client:
        text = TextPrompt(f"<image>{TEXT}", [PICTURE])
        expected = client.generate(text, max_tokens=8, temperature=0.0)
        token_ids = client.tokenize(text).token_ids
        answer = client.generate(lookonce.TokenPrompt(token_ids, [PICTURE]), max_tokens=8, temperature=0.0)
        assert answer.text == expected.text
        assert answer.usage.prompt_tokens == len(token_ids)
        for wrong in (["x"], "x", [1.5], []):
            with pytest.raises(InvalidParameterError):
                client.generate(lookonce.TokenPrompt(wrong))  # type: ignore[arg-type]
        with pytest.raises(InvalidParameterError, match="tokens already"):
            client.tokenize(lookonce.TokenPrompt(token_ids))
