"""What do masks of structured output cost in a step, and what do forced tokens gain? `--help` lists the options.

The engine alone decodes batches of requests, with and without a constraint in turns. The first three constraints force
next to nothing, so each step gives each answer one token, and the ratio of the times of a step is the cost of the
masks: a text of some characters, JSON strings of limited length, and the same characters counted, whose masks are the
dearest because the state of each is new. The schema is one of many small objects, as extraction from documents has
them: names and brackets are forced, and the ratio is that of the times of whole answers.

The vocabulary of the masks is as large as that of the logits. Its tokens are the words, numbers and signs of Python's
standard library, since a mask costs what there is in the vocabulary that a text can go on with.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import re
import statistics
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models

from benchmarks import models, report
from benchmarks.engine_thread import EngineThread
from decoder_svc.constraint.frames import Vocabulary
from decoder_svc.scheduling.sampling_params import Constraint, ConstraintKind

_NAME = "structured_output"
_END = 2
_SCHEMA = """{"type": "array", "minItems": 500, "items": {"type": "object", "properties": {
    "name": {"type": "string", "maxLength": 6}, "quantity": {"type": "integer", "minimum": 0, "maximum": 99},
    "unit_price": {"type": "number"}, "in_stock": {"type": "boolean"}},
    "required": ["name", "quantity", "unit_price", "in_stock"], "additionalProperties": false}}"""
_STRINGS = '{"type": "array", "minItems": 500, "items": {"type": "string", "maxLength": 400}}'
CONSTRAINTS = {
    "text": Constraint(ConstraintKind.REGEX, "([a-zA-Z ,.]*#){400}"),
    "strings": Constraint(ConstraintKind.JSON_SCHEMA, _STRINGS),
    "counted text": Constraint(ConstraintKind.REGEX, "[a-zA-Z ,.]{8000,}"),
    "schema": Constraint(ConstraintKind.JSON_SCHEMA, _SCHEMA),
}
_OF_ANSWERS = "schema"
_WORD = re.compile(r" ?[A-Za-z_]+| ?[0-9]{1,3}|[^A-Za-z0-9\s]+|\s+")


@dataclass(frozen=True, slots=True)
class Cell:
    """One constraint in batches of one size: seconds of a step of each round, or of whole answers for the schema."""

    constraint: str
    batch: int
    temperature: float
    without_s: list[float]
    with_s: list[float]

    @property
    def ratios(self) -> list[float]:
        """Time with the constraint over that without it, by round."""
        return [one / other for one, other in zip(self.with_s, self.without_s, strict=True)]


def main(given: Sequence[str] | None = None) -> None:
    """Measures every cell, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="per cell, with and without (default: %(default)s)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--answer-tokens", type=int, default=96)
    report.add_quick(parser)
    arguments = parser.parse_args(given)
    folder = models.demo_model() if arguments.quick else models.small_llava()
    vocab_size = 600 if arguments.quick else 49_152
    if arguments.quick:
        arguments.rounds, arguments.batches = 1, [2]
    flags = ["--model", str(folder), "--num-kv-blocks", str(max(arguments.batches) * 16)]
    with EngineThread(flags, Vocabulary(_tokenizer(vocab_size).to_str(), _END)) as engine:
        cells = [
            _measured(engine, Cell(name, batch, temperature, [], []), arguments.answer_tokens, arguments.rounds)
            for temperature in (0.0, 1.0)
            for name in CONSTRAINTS
            for batch in (arguments.batches if temperature == 0 else arguments.batches[-1:])
        ]
    figures = {"model": folder.name, "vocabulary": vocab_size, "cells": [asdict(cell) for cell in cells]}
    report.publish(_NAME, figures, section(folder.name, vocab_size, cells), is_quick=arguments.quick)


def _measured(engine: EngineThread, cell: Cell, num_tokens: int, num_rounds: int) -> Cell:
    """Takes turns, so that a busy machine hits both alike. The first round warms up and does not count."""
    for number in range(num_rounds + 1):
        for is_constrained in (number % 2 == 0, number % 2 == 1):
            prompts = [tuple(range(10, 42 + index)) for index in range(cell.batch)]
            constraint = CONSTRAINTS[cell.constraint] if is_constrained else None
            answers = engine.run(prompts, num_tokens, constraint, cell.temperature)
            if cell.constraint == _OF_ANSWERS:
                took_s = max(answer.decode_s for answer in answers)
            else:
                took_s = statistics.median(answer.step_s for answer in answers)
            if number:
                (cell.with_s if is_constrained else cell.without_s).append(took_s)
    print(f"{cell.constraint} batch {cell.batch}: {statistics.median(cell.ratios):.3f}", flush=True)
    return cell


def section(model: str, vocab_size: int, cells: Sequence[Cell]) -> str:
    """Returns the section of RESULTS.md."""
    rows = [
        (
            cell.constraint,
            cell.batch,
            f"{cell.temperature:g}",
            f"{1000 * statistics.median(cell.without_s):.1f} ms",
            f"{1000 * statistics.median(cell.with_s):.1f} ms",
            f"{statistics.median(cell.ratios):.3f}",
            f"{min(cell.ratios):.3f} … {max(cell.ratios):.3f}",
        )
        for cell in cells
    ]
    head = ["constraint", "batch", "temperature", "without", "with", "with ÷ without", "least … most"]
    return (
        f"## {_NAME}\n\nWhat do masks cost in a step (the first three force next to nothing), and what do forced "
        "tokens gain (schema)?\nGoal: masks cost at most 5 % of a step at batch 32.\n\n"
        f"{report.table(head, rows)}\n\n"
        f"Model `{model}`, a vocabulary of {vocab_size} tokens; mean time of a step, for the schema from the first "
        f"token to the\nlast of the slowest request; {len(cells[0].with_s)} interleaved rounds, medians."
    )


def _tokenizer(size: int) -> Tokenizer:
    """A tokenizer whose tokens are all single bytes, and the most frequent words of many files."""
    special = ["<pad>", "<s>", "</s>"]
    found: collections.Counter[str] = collections.Counter()
    for path in _sources():
        found.update(_WORD.findall(path.read_text(errors="ignore")))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = ("".join(piece for piece, _ in byte_level.pre_tokenize_str(word)) for word, _ in found.most_common())
    tokens = dict.fromkeys([*special, *sorted(byte_level.alphabet()), *(word for word in words if len(word) < 24)])
    # A smaller library has fewer words.
    tokens |= dict.fromkeys(f"Ġx{number}" for number in range(size))
    vocabulary = {token: number for number, token in enumerate(list(tokens)[:size])}
    tokenizer = Tokenizer(token_models.BPE(vocabulary, [], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_WORD.pattern), "isolated"), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer


def _sources() -> Iterator[pathlib.Path]:
    yield from sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))[:3000]


if __name__ == "__main__":
    main()
