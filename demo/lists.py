"""Asks a decoder for the shapes of new pictures as JSON, and counts the exact fields.

Run as `python -m demo.lists --num-pictures 500`. Every answer follows LIST_SCHEMA, as the decoder was told; whether it
is right is the model's part.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

import jsonschema

from demo.questions import LIST_SCHEMA, ask, list_shapes
from demo.scenes import NUM_TRAINING_SEEDS, Scene, png_bytes, random_scene
from demo.wordings import QuestionKind, Split
from lookonce.aio import AsyncClient
from lookonce.generation import Message
from lookonce.images import ImageRef
from lookonce.local.local_stack import LocalStack

_MODEL = pathlib.Path(__file__).resolve().parents[1] / "models" / "demo"
_MAX_TOKENS = 256
_NUM_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class ListedShapes:
    """The fields of all shapes of some pictures, and how many of them were answered exactly."""

    num_pictures: int
    num_exact_pictures: int
    """Pictures whose list is right as a whole."""
    num_fields: int
    """Three for each shape in a picture, and three for each that was listed beside them."""
    num_exact_fields: int

    @property
    def share(self) -> float:
        """Share of exact fields, from 0 to 1."""
        return self.num_exact_fields / self.num_fields


async def ask_for_lists(client: AsyncClient, num_pictures: int, seed: int) -> ListedShapes:
    """Asks about pictures that training never drew, in wordings that it never read.

    Raises jsonschema.ValidationError if an answer does not follow the schema.
    """
    rng = random.Random(seed)
    scenes = [random_scene(NUM_TRAINING_SEEDS + rng.randrange(2**40)) for _ in range(num_pictures)]
    texts = [_question(scene, rng) for scene in scenes]
    places = asyncio.Semaphore(_NUM_AT_ONCE)

    async def answer(scene: Scene, text: str) -> str:
        async with places:
            message = Message("user", [ImageRef.from_bytes(png_bytes(scene)), text])
            answer = await client.generate([message], temperature=0.0, max_tokens=_MAX_TOKENS, json_schema=LIST_SCHEMA)
            return answer.text

    answers = await asyncio.gather(*map(answer, scenes, texts))
    return count_exact([list_shapes(scene) for scene in scenes], answers)


def count_exact(expected: Sequence[str], answers: Sequence[str]) -> ListedShapes:
    """Compares lists shape by shape, in their order. Fields of shapes that are missing or too many are wrong."""
    num_fields = num_exact = num_whole = 0
    for wanted_text, text in zip(expected, answers, strict=True):
        wanted, got = json.loads(wanted_text), json.loads(text)
        jsonschema.validate(got, LIST_SCHEMA)
        num_whole += wanted == got
        wanted, got = wanted["shapes"], got["shapes"]
        num_fields += 3 * max(len(wanted), len(got))
        num_exact += sum(one[name] == other[name] for one, other in zip(wanted, got, strict=False) for name in one)
    return ListedShapes(len(answers), num_whole, num_fields, num_exact)


def _question(scene: Scene, rng: random.Random) -> str:
    question = ask(QuestionKind.LIST, (scene,), 0, Split.HELD_OUT, rng)
    assert question is not None, "a picture can always be listed"
    return question.text


async def _run(model: pathlib.Path, num_pictures: int, seed: int) -> ListedShapes:
    with LocalStack(model) as stack:
        async with AsyncClient.connect(stack.decoder_targets[0], stack.encoder_targets[0]) as client:
            return await ask_for_lists(client, num_pictures, seed)


def main() -> None:
    """Starts the system, asks, and prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=pathlib.Path, default=_MODEL)
    parser.add_argument("--num-pictures", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    counted = asyncio.run(_run(options.model, options.num_pictures, options.seed))
    print(f"{counted.num_exact_fields} of {counted.num_fields} fields exact ({counted.share:.4f})")
    print(f"{counted.num_exact_pictures} of {counted.num_pictures} lists exact")


if __name__ == "__main__":
    main()
