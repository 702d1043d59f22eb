"""Starts the services with a model, asks one question about a picture and ends them, for `lookonce doctor --start`."""

from __future__ import annotations

import math
import pathlib
import struct
import time
import zlib

from lookonce.commands.asking.questions import raw_prompt
from lookonce.commands.running.found_encoders import wait_until_encoders_are_found
from lookonce.commands.targets import connect
from lookonce.errors import LookonceError
from lookonce.images import ImageRef
from lookonce.local.finding import Finding
from lookonce.local.local_stack import LocalStack

_QUESTION = "What is this?"
_ANSWER_TIMEOUT_S = 300.0
_NUM_TOKENS = 2
# Small, so that limits in the environment do not refuse it.
_PICTURE_SIZE = (96, 64)


def examine_start(folder: pathlib.Path) -> list[Finding]:
    """Returns whether the services start with a folder, and whether they answer.

    Both check at start-up that their half computes finite numbers from real pictures and prompts, which no look at the
    files can tell. They have addresses and a Redis of their own, and the settings of the environment.
    """
    began_s = time.monotonic()
    try:
        with LocalStack(folder) as stack:
            wait_until_encoders_are_found(stack.decoder_targets)
            started_s = time.monotonic() - began_s
            findings = [Finding("start", True, f"encoder and decoder were ready after {started_s:.0f} s")]
            return [*findings, _answer(stack.decoder_targets[0])]
    except LookonceError as error:
        return [Finding("start", False, _in_one_line(error))]


def _answer(target: str) -> Finding:
    try:
        with connect(target) as client:
            # Without a template, which not every model has.
            prompt = raw_prompt(client, _QUESTION, [ImageRef.from_bytes(_picture())], _ANSWER_TIMEOUT_S)
            answer = client.generate(prompt, max_tokens=_NUM_TOKENS, logprobs=0, timeout_s=_ANSWER_TIMEOUT_S)
    except LookonceError as error:
        return Finding("answer", False, _in_one_line(error))
    if not all(math.isfinite(logprob) for of_token in answer.logprobs for _, logprob in of_token):
        return Finding("answer", False, "its log probabilities are not finite: a weight is damaged; download it again")
    usage = answer.usage
    sizes = f"{usage.completion_tokens} to a prompt of {usage.prompt_tokens} tokens with a picture"
    return Finding("answer", True, f"tokens: {sizes}")


def _picture() -> bytes:
    """Returns a PNG file with courses of colours. No package that reads or writes images is needed for that."""
    width, height = _PICTURE_SIZE
    lines = (bytes((0, *(each for x in range(width) for each in (x % 256, y % 256, 90)))) for y in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(b"".join(lines))), (b"IEND", b"")
    parts = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _in_one_line(error: LookonceError) -> str:
    """Returns what a service wrote last, if its log is in the error, and which service it was."""
    first, *log = str(error).strip().splitlines()
    return f"{first} {log[-1]}" if log else first
