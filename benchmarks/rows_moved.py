"""How many bytes leave Redis for the rows that a prompt needs? `--help` lists the options.

Real services as processes of their own, asked through the SDK. The prompt is the one that crashed vLLM (PR #11895):
16032 tokens with an image of 8687 rows at token 7333. What the KV cache still has of it when it is asked again is set
by the pool's size and by one request in between, which also takes the rows' place on the decoder. Bytes are counted by
Redis itself, so headers and whatever else is read are in them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import pathlib
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import PIL.Image
import redis
from tokenizers import Tokenizer

from benchmarks import report
from benchmarks.models import large_image_qwen2_vl
from lookonce.client import Client
from lookonce.generation import Generation, Message
from lookonce.local.local_stack import LocalStack
from lookonce.store.codec import BLOCK_TARGET_BYTES

_NAME = "rows_moved"
_TIMEOUT_S = 300.0
_BLOCK_SIZE = 16
_ROW_BYTES = 512 * 4
# Pixels of an image under one row, on each side.
_ROW_SIDE = 28


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a prompt with one image, whose last four rows are in the prompt's last block."""

    # Rows of the image, across and down.
    columns: int
    lines: int
    # Tokens before the image, and all.
    image_offset: int
    prompt_tokens: int

    @property
    def num_rows(self) -> int:
        return self.columns * self.lines

    @property
    def num_blocks(self) -> int:
        return self.prompt_tokens // _BLOCK_SIZE

    @property
    def num_words(self) -> tuple[int, int]:
        """Number of words before and after the image, without the template's special tokens."""
        return self.image_offset - 2, self.prompt_tokens - self.image_offset - self.num_rows - 2


CRASH = Shape(73, 119, 7333, 16032)
# The same at a sixteenth of its size.
QUICK = Shape(20, 30, 396, 1008)


@dataclass(frozen=True, slots=True)
class Case:
    """A state of the caches when the prompt comes."""

    name: str
    # Blocks evicted from the prompt's end before it is sent again; None means a decoder that has never seen it.
    num_lost_blocks: int | None
    # The image has been encoded before.
    is_encoded: bool = True


CASES = (
    Case("nobody has seen the image", None, is_encoded=False),
    Case("another decoder has", None),
    Case(
        "KV covers half of the image", (CRASH.prompt_tokens - CRASH.image_offset - CRASH.num_rows // 2) // _BLOCK_SIZE
    ),
    Case("KV lacks the last block (4 rows)", 1),
    Case("KV covers the image", 0),
)


@dataclass(frozen=True, slots=True)
class Moved:
    """The rows and bytes that one prompt moved."""

    num_rows_needed: int
    # Bytes that Redis sent by its own count, which includes the reply with the count: a few bytes too many.
    num_bytes: int
    # Bytes of values that the decoder read, by its own count.
    num_bytes_read: int
    num_encodes: int

    @property
    def num_bytes_needed(self) -> int:
        return self.num_rows_needed * _ROW_BYTES

    @property
    def excess_bytes(self) -> int:
        return self.num_bytes - self.num_bytes_needed


def main(given: Sequence[str] | None = None) -> None:
    """Measures every case, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="stacks per case (default: %(default)s)")
    report.add_quick(parser)
    arguments = parser.parse_args(given)
    shape, cases = (QUICK, CASES[3:4]) if arguments.quick else (CRASH, CASES)
    # The model takes no larger images; otherwise the decoder would hold two of them.
    model = large_image_qwen2_vl(shape.num_rows)
    moved = {case: [measure(model, case, shape) for _ in range(arguments.rounds)] for case in cases}
    figures = {
        "row_bytes": _ROW_BYTES,
        "cases": [{**asdict(case), "rounds": [asdict(one) for one in found]} for case, found in moved.items()],
    }
    report.publish(_NAME, figures, _section(moved, shape), is_quick=arguments.quick)


def measure(model: pathlib.Path, case: Case, shape: Shape) -> Moved:
    """Brings a stack of its own into the case's state, asks the prompt, and checks the answer."""
    # Room for the prompt and the request in between.
    num_blocks = 2 * shape.num_blocks - (case.num_lost_blocks or 0)
    pools = ["--num-kv-blocks", str(num_blocks), "--max-num-batched-tokens", "8192"]
    pools += ["--encoder-cache-rows", str(shape.num_rows)]
    num_decoders = 2 if case.num_lost_blocks is None else 1
    with LocalStack(model, num_decoders=num_decoders, decoder_arguments=pools) as stack:
        first = Client.connect(stack.decoder_targets[0], timeout_s=_TIMEOUT_S)
        last = Client.connect(stack.decoder_targets[-1], timeout_s=_TIMEOUT_S)
        with first, last:
            expected = _ask(first, model, shape, 1) if case.is_encoded else None
            if case.num_lost_blocks is not None:
                _ask(first, model, shape, 2)
            with _counted(stack) as counted:
                answer = _ask(last, model, shape, 1)
        if expected is not None and answer.text != expected.text:
            raise AssertionError(f"{case.name}: another answer than at first")
    needed = answer.usage.image_tokens - answer.usage.skipped_image_tokens
    moved = Moved(needed, counted.num_bytes, counted.num_bytes_read, counted.num_encodes)
    print(f"{case.name}: {moved}", flush=True)
    return moved


@dataclass(slots=True)
class _Counted:
    num_bytes: int = 0
    num_bytes_read: int = 0
    num_encodes: int = 0


@contextlib.contextmanager
def _counted(stack: LocalStack) -> Iterator[_Counted]:
    """Bytes that Redis sent and images that were encoded during the block."""
    assert stack.redis_url is not None
    with redis.Redis.from_url(stack.redis_url) as server:
        # Counting is counted as well: the second count includes one more reply than the first.
        before = _bytes_sent(server)
        cost = _bytes_sent(server) - before
        encodes, read = _num_encodes(stack), _bytes_read(stack)
        sent = _bytes_sent(server)
        counted = _Counted()
        yield counted
        counted.num_bytes = _bytes_sent(server) - sent - cost
        counted.num_bytes_read = _bytes_read(stack) - read
        counted.num_encodes = _num_encodes(stack) - encodes


def _bytes_sent(server: Any) -> int:
    return int(server.info("stats")["total_net_output_bytes"])


def _bytes_read(stack: LocalStack) -> int:
    return int(stack.metric(stack.decoders, "lookonce_decoder_store_read_bytes_total"))


def _num_encodes(stack: LocalStack) -> int:
    return int(stack.metric(stack.encoders, "lookonce_encoder_encodes_total"))


def _ask(client: Client, model: pathlib.Path, shape: Shape, seed: int) -> Generation:
    """The prompt with this seed's picture; a text of the same length for every seed, but not the same one."""
    word = _word(model, seed)
    before, behind = shape.num_words
    message = Message("user", [word * before, _picture(shape, seed), word * behind])
    answer = client.generate([message], max_tokens=1, temperature=0.0)
    if (answer.usage.prompt_tokens, answer.usage.image_tokens) != (shape.prompt_tokens, shape.num_rows):
        raise AssertionError(f"the prompt should have the tokens of {shape}: {answer.usage}")
    return answer


def _word(model: pathlib.Path, seed: int) -> str:
    """A word that is one token wherever it stands; another seed gives another one."""
    vocabulary = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab()
    words = sorted(token for token in vocabulary if token.startswith("Ġ") and token[1:].isalpha())
    return words[seed].replace("Ġ", " ")


def _picture(shape: Shape, seed: int) -> bytes:
    """A PNG of coarse noise: quick to compress at this size."""
    noise = random.Random(seed).randbytes(3 * 8 * 8)
    file = io.BytesIO()
    size = (shape.columns * _ROW_SIDE, shape.lines * _ROW_SIDE)
    PIL.Image.frombytes("RGB", (8, 8), noise).resize(size, PIL.Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()


def _section(moved: dict[Case, list[Moved]], shape: Shape) -> str:
    head = [
        "the prompt comes again, and …",
        "rows needed",
        "encodes",
        "bytes needed",
        "read by the decoder",
        "sent by Redis",
        "÷ needed",
    ]
    rows = [
        [
            case.name,
            _spread([one.num_rows_needed for one in rounds]),
            _spread([one.num_encodes for one in rounds]),
            _spread([one.num_bytes_needed for one in rounds]),
            _spread([one.num_bytes_read for one in rounds]),
            _spread([one.num_bytes for one in rounds]),
            _ratio(rounds),
        ]
        for case, rounds in moved.items()
    ]
    excess = max(one.excess_bytes for rounds in moved.values() for one in rounds)
    question = (
        "## rows_moved\n\nHow many bytes leave Redis for the rows that a prompt really needs? Goal: those and at most\n"
        "one sealed block per range; nothing at all, and no encode, where the KV cache covers the image."
    )
    note = (
        f"A prompt of {shape.prompt_tokens} tokens with an image of {shape.num_rows} rows of {_ROW_BYTES} bytes at "
        f"token {shape.image_offset}; blocks of\n{_BLOCK_SIZE} tokens. Between the first time and this one "
        "another such prompt took the rows' place on the decoder.\nRedis counts protocol and headers, too, and its own "
        f"report, give or take some bytes. The most beyond what is needed:\n{excess} bytes; a sealed block is at most "
        f"{BLOCK_TARGET_BYTES} bytes. Every answer was that of the first time."
    )
    return f"{question}\n\n{report.table(head, rows)}\n\n{note}"


def _ratio(rounds: Sequence[Moved]) -> str:
    ratios = [one.num_bytes / one.num_bytes_needed for one in rounds if one.num_bytes_needed]
    return f"{statistics.median(ratios):.3f}" if ratios else "–"


def _spread(counts: Sequence[int]) -> str:
    return f"{counts[0]}" if len(set(counts)) == 1 else f"{min(counts)} … {max(counts)}"


if __name__ == "__main__":
    main()
