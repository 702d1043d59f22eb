"""`make demo`: starts the whole system on the demo model, asks six questions about three pictures, checks the answers.

The exit status is 0 if every answer is right, each distinct picture was encoded exactly once, and no question about
an already shown picture encoded anything; otherwise 1.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from demo.questions import DemoQuestion, demo_session
from lookonce.client import Client
from lookonce.commands.running.found_encoders import wait_until_encoders_are_found
from lookonce.errors import LookonceError
from lookonce.generation import Message, Usage
from lookonce.images import ImageRef
from lookonce.local.local_stack import LocalStack

_MODEL = pathlib.Path(__file__).resolve().parents[1] / "models" / "demo"
# A model on the hub whose family is supported.
_REAL_MODEL = "Qwen/Qwen2-VL-2B-Instruct"
_MAX_TOKENS = 128
_WIDTH = 100


@dataclass(frozen=True, slots=True)
class AskedQuestion:
    """A question with its answer and usage."""

    question: DemoQuestion
    answer: str
    usage: Usage
    # Whether every picture of the question had been shown before.
    is_repeat: bool

    @property
    def is_right(self) -> bool:
        """Whether the answer equals the expected one exactly."""
        return self.answer == self.question.expected

    @property
    def encoded_again(self) -> bool:
        """Whether a picture that had been shown before was encoded again."""
        return self.is_repeat and self.usage.encoded_image_tokens > 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m demo.run", description="Asks six questions about three pictures.")
    parser.add_argument("--model", type=pathlib.Path, default=_MODEL, help="folder of the demo model")
    model = parser.parse_args(arguments).model
    console = Console(highlight=False, width=_WIDTH)
    try:
        return _run(model, console)
    except LookonceError as error:
        console.print(f"[bold red]error:[/] {escape(error.message)}")
        return 1


def _run(model: pathlib.Path, console: Console) -> int:
    questions = demo_session()
    started_s = time.monotonic()
    console.print("[bold]Lookonce demo[/]: starting Redis, an encoder and a decoder ...")
    with LocalStack(model) as stack:
        wait_until_encoders_are_found(stack.decoder_targets)
        console.print(f"Up after {time.monotonic() - started_s:.1f} s; everything runs on this machine.")
        console.print("The demo model knows drawn shapes only, not photographs.\n")
        with Client.connect(stack.decoder_targets[0], stack.encoder_targets[0]) as client:
            asked = _ask_all(client, questions, console)
        num_encodes = int(stack.metric(stack.encoders, "lookonce_encoder_encodes_total"))
    console.print(_cost_table(asked))
    return _conclude(asked, num_encodes, console)


def _ask_all(client: Client, questions: Sequence[DemoQuestion], console: Console) -> list[AskedQuestion]:
    numbers: dict[ImageRef, int] = {}
    asked = []
    for number, question in enumerate(questions, 1):
        parts = [part if isinstance(part, str) else ImageRef.from_bytes(part) for part in question.parts]
        images = [part for part in parts if isinstance(part, ImageRef)]
        is_repeat = all(image in numbers for image in images)
        names = [f"picture {numbers.setdefault(image, len(numbers) + 1)}" for image in images]
        text = " ".join(part for part in parts if isinstance(part, str))
        console.print(f"[bold]{number}.[/] [dim]({' and '.join(names)})[/] {escape(text)}")
        answer, usage = _ask(client, Message("user", parts), question, console)
        asked.append(AskedQuestion(question, answer, usage, is_repeat))
        mark = "[green]✓[/]" if asked[-1].is_right else "[bold red]✗[/]"
        console.print(f"   expected  {escape(question.expected)} {mark}\n", soft_wrap=True)
    return asked


def _ask(client: Client, message: Message, question: DemoQuestion, console: Console) -> tuple[str, Usage]:
    """Asks one question and streams the answer to the screen."""
    console.print("   answer    ", end="")
    schema = question.json_schema
    with client.stream([message], temperature=0.0, max_tokens=_MAX_TOKENS, json_schema=schema) as stream:
        for piece in stream:
            console.print(piece, end="", markup=False, style="cyan")
        console.print()
        return stream.generation.text.strip(), stream.usage


def _cost_table(asked: Sequence[AskedQuestion]) -> Table:
    table = Table(title="Where the image rows came from", title_justify="left", title_style="bold")
    table.add_column("question")
    for name in ("encoded", "shared cache", "skipped", "prompt tokens", "first token"):
        table.add_column(name, justify="right")
    for number, entry in enumerate(asked, 1):
        usage = entry.usage
        rows = (usage.encoded_image_tokens, usage.cached_image_tokens, usage.skipped_image_tokens)
        first_token = f"{usage.time_to_first_token_s * 1000:.0f} ms"
        table.add_row(str(number), *(str(count) for count in rows), str(usage.prompt_tokens), first_token)
    return table


def _conclude(asked: Sequence[AskedQuestion], num_encodes: int, console: Console) -> int:
    pictures = {part for entry in asked for part in entry.question.parts if isinstance(part, bytes)}
    num_right = sum(entry.is_right for entry in asked)
    is_good = num_right == len(asked) and num_encodes == len(pictures)
    is_good = is_good and not any(entry.encoded_again for entry in asked)
    console.print(f"\n{num_right} of {len(asked)} answers right; {len(pictures)} pictures, {num_encodes} encodes.")
    if is_good:
        console.print("[bold green]Each picture was looked at once.[/]\n")
        console.print("For photographs, give a real model, by its name on the Hugging Face hub or as a local folder:")
        console.print(f"  lookonce up --model {_REAL_MODEL}")
        console.print('  lookonce generate "What is in the picture?" --image picture.png', markup=False)
        console.print("To ask in a browser:")
        console.print("  lookonce up --playground")
        return 0
    console.print("[bold red]An answer is wrong, or a picture was encoded more than once.[/]")
    return 1


if __name__ == "__main__":
    sys.exit(main())
