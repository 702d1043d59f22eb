"""What does an image that is cached somewhere cost a decoder that has never seen it? `--help` lists the options.

Two decoders. The first is asked about a picture, so that it is encoded. Then the second is asked about it, and about a
text with as many tokens, in turns. Times run from sending to the first token, one request at a time.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tokenizers import Tokenizer

from benchmarks import report
from benchmarks.models import demo_model, small_llava
from benchmarks.workloads import Ask, u40
from lookonce.client import Client
from lookonce.local.local_stack import LocalStack

_NAME = "hit_cost"
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Pair:
    """Times to first token of one picture and of one text, in seconds."""

    image_s: float
    text_s: float
    num_image_prompt_tokens: int
    num_text_prompt_tokens: int
    # Time to first token of the new picture, including its encode.
    cold_s: float


def main(given: Sequence[str] | None = None) -> None:
    """Measures, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--pictures", type=int, default=25, help="default: %(default)s")
    report.add_quick(parser)
    arguments = parser.parse_args(given)
    model = demo_model() if arguments.quick else small_llava()
    pairs = measure(model, 2 if arguments.quick else arguments.pictures)
    figures = {"model": model.name, "pairs": [asdict(pair) for pair in pairs]}
    report.publish(_NAME, figures, _section(model.name, pairs), is_quick=arguments.quick)


def measure(model: pathlib.Path, num_pictures: int) -> list[Pair]:
    """Measures one pair per picture; picture and text take turns to come first."""
    asks = u40(random.Random(_NAME))[:num_pictures]
    rng, words = random.Random("texts"), _words(model)
    with (
        LocalStack(model, num_decoders=2) as stack,
        Client.connect(stack.decoder_targets[0], timeout_s=_TIMEOUT_S) as seen,
        Client.connect(stack.decoder_targets[1], timeout_s=_TIMEOUT_S) as unseen,
    ):
        warm_up = u40(random.Random("warm-up"))[:2]
        for client in (seen, unseen):
            for ask in warm_up:
                _first_token_s(client, ask.question, ask)
                _, num_tokens = _first_token_s(client, _text(rng, words, 600), None)
        # Tokens that the template adds to a text.
        num_around = num_tokens - 600
        pairs = []
        for number, ask in enumerate(asks):
            cold_s, num_tokens = _first_token_s(seen, ask.question, ask)
            text = _text(rng, words, num_tokens - num_around)
            if number % 2:
                text_s, num_text_tokens = _first_token_s(unseen, text, None)
            image_s, num_image_tokens = _first_token_s(unseen, ask.question, ask)
            if not number % 2:
                text_s, num_text_tokens = _first_token_s(unseen, text, None)
            pairs.append(Pair(image_s, text_s, num_image_tokens, num_text_tokens, cold_s))
        encodes = int(stack.metric(stack.encoders, "lookonce_encoder_encodes_total"))
    assert encodes == len(asks) + len(warm_up), "a picture was encoded twice"
    return pairs


def _first_token_s(client: Client, prompt: str, ask: Ask | None) -> tuple[float, int]:
    """Returns the seconds to the first token and the number of prompt tokens."""
    images = () if ask is None else ask.pictures
    started_s = time.perf_counter()
    with client.stream(prompt, images, max_tokens=2, temperature=0.0, ignore_eos=True) as stream:
        next(stream)
        first_s = time.perf_counter() - started_s
        for _ in stream:
            pass
        return first_s, stream.usage.prompt_tokens


def _words(model: pathlib.Path) -> list[str]:
    """Returns words that are one token each in any position."""
    vocabulary = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab()
    return sorted(token.replace("Ġ", " ") for token in vocabulary if token.startswith("Ġ") and token[1:].isalpha())


def _text(rng: random.Random, words: Sequence[str], num_tokens: int) -> str:
    return "".join(rng.choices(words, k=num_tokens))


def _section(model: str, pairs: Sequence[Pair]) -> str:
    assert all(pair.num_image_prompt_tokens == pair.num_text_prompt_tokens for pair in pairs), "not as many tokens"
    ratios = [pair.image_s / pair.text_s for pair in pairs]
    head = ["", "median", "least … most"]
    rows = [
        ["cached image ÷ text", f"{statistics.median(ratios):.3f}", _spread(ratios, "")],
        ["cached image", *_milliseconds([pair.image_s for pair in pairs])],
        ["text", *_milliseconds([pair.text_s for pair in pairs])],
        ["unseen image, encode included", *_milliseconds([pair.cold_s for pair in pairs])],
    ]
    question = (
        "## hit_cost\n\nTime to the first token of an image that is cached, on a decoder that has never seen it, over "
        "that of a text with\nas many tokens. Goal: at most 1.05."
    )
    note = (
        f"Model `{model}`, {len(pairs)} pictures, one request at a time; {pairs[0].num_image_prompt_tokens} prompt "
        "tokens or about as many."
    )
    return f"{question}\n\n{report.table(head, rows)}\n\n{note}"


def _milliseconds(seconds: Sequence[float]) -> tuple[str, str]:
    return f"{1000 * statistics.median(seconds):.0f} ms", _spread([1000 * one for one in seconds], " ms", digits=0)


def _spread(values: Sequence[float], unit: str, *, digits: int = 3) -> str:
    return f"{min(values):.{digits}f} … {max(values):.{digits}f}{unit}"


if __name__ == "__main__":
    main()
