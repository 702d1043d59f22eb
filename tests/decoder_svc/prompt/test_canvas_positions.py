"""Positions on canvases equal those of MiniCPM-V 4.7's own model, also where only markers lie between two images."""

from __future__ import annotations

import json
import pathlib
import random
import shutil
from collections.abc import Callable

import pytest
import torch

from decoder_svc.prompt.family import DecoderFamily
from decoder_svc.prompt.prompt_builder import PromptBuilder, PromptLimits, ResolvedImage
from decoder_svc.prompt.prompt_spec import InlineImage, TextPrompt
from decoder_svc.prompt.rotary_positions import _stretched
from decoder_svc.scheduling.kv_cache.block_hash import BlockHasher
from decoder_svc.scheduling.prompt import Positions, Span
from decoder_svc.scheduling.request import Request, RequestId
from decoder_svc.scheduling.sampling_params import SamplingParams
from lookonce.content_key import DEFAULT_TENANT, EncoderFingerprint, ProcessorOptions, content_key, image_digest
from lookonce.errors import ModelFolderError
from lookonce.model.half_model import load_text_half
from tests import tiny_models
from tests.decoder_svc.conftest import loaded
from tests.tiny_families import minicpmv4_7

PLACEHOLDER = "<|image_pad|>"
# Texts between two images: some are markers alone, and some begin with one.
BETWEEN = ("", "\n", "\n\n", "\n\n\n", " and ", "\nand\n", "and\n", "\n what is it")

Folders = Callable[[str], pathlib.Path]


@pytest.fixture(params=[True, False], ids=["numbered", "not numbered"])
def folder(request: pytest.FixtureRequest, family_folder: Folders, tmp_path: pathlib.Path) -> pathlib.Path:
    path = shutil.copytree(family_folder("minicpmv4_7"), tmp_path / "model")
    edit(path, "preprocessor_config.json", use_image_id=request.param)
    return path


def edit(path: pathlib.Path, name: str, **fields: object) -> None:
    (path / name).write_text(json.dumps(json.loads((path / name).read_text()) | fields))


def test_positions_are_those_of_the_model(folder: pathlib.Path) -> None:
    rng = random.Random(8)
    processor, family = minicpmv4_7.load_processor(folder), loaded(folder).family
    processor.image_processor.use_image_id = family.model.source.processor.use_image_id
    model = load_text_half(folder, torch.float32, "sdpa")
    origins = set()
    for _ in range(60):
        sizes = [(rng.randint(1, 400), rng.randint(1, 400)) for _ in range(rng.randint(1, 4))]
        sizes = [(width, height) for width, height in sizes if max(width, height) <= 100 * min(width, height)]
        text = rng.choice(("", "what ", "\n"))
        for _ in sizes:
            text += PLACEHOLDER + rng.choice(BETWEEN)
        if not sizes:
            continue
        images = [tiny_models.random_image(index, *size) for index, size in enumerate(sizes)]
        inputs = processor(text=text, images=[images], return_tensors="pt")
        named = ("input_ids", "mm_token_type_ids", "target_sizes")
        expected, delta = model.model.get_rope_index(**{name: inputs[name] for name in named})
        token_ids = inputs["input_ids"][0].tolist()
        found = positions_of(family, token_ids, sizes)
        assert found is not None
        assert torch.equal(torch.tensor(found.axes), expected[:, 0]), (text, sizes)
        assert found.delta == int(delta)
        origins.add(found.axes[0][token_ids.index(family.image_token_id)])
    assert len(origins) > 2
    # The number of an image precedes it where images are numbered.
    assert (0 in origins) != family.model.source.processor.use_image_id


def positions_of(family: DecoderFamily, token_ids: list[int], sizes: list[tuple[int, int]]) -> Positions | None:
    layouts = [family.image_layout(*size, ProcessorOptions()) for size in sizes]
    spans, offset = [], 0
    for layout in layouts:
        offset = token_ids.index(family.image_token_id, offset)
        spans.append(Span(offset, layout.span_length))
        offset = spans[-1].stop
    return family.positions(token_ids, spans, layouts)


def test_places_are_rounded_as_in_torch() -> None:
    for over in range(1, 200):
        for number in range(1, 40):
            assert _stretched(number, over) == torch.linspace(0, over - 1, number).round().tolist(), (number, over)


@pytest.mark.parametrize("field", minicpmv4_7.MARKERS)
def test_a_configuration_without_a_marker_is_refused(field: str, folder: pathlib.Path) -> None:
    edit(folder, "config.json", **{field: None})
    with pytest.raises(ModelFolderError, match=f"lacks the ids of markers, .*: {field}"):
        loaded(folder)


def test_a_configuration_with_the_id_of_another_token_is_refused(folder: pathlib.Path) -> None:
    edit(folder, "config.json", slice_end_id=7)
    with pytest.raises(ModelFolderError, match=r"'</slice>' is not the token 7 of config.json"):
        loaded(folder)


def test_an_answer_behind_an_image_shares_no_blocks_with_a_prompt_that_goes_on_there(folder: pathlib.Path) -> None:
    """A line break behind an image has a place on the canvas in a prompt, and one behind it in an answer."""
    text = loaded(folder)
    builder = PromptBuilder(text.tokenizer, text.template, text.family, PromptLimits(2000, 8, text.vocab_size))
    image = ResolvedImage(
        content_key(image_digest(b""), EncoderFingerprint("test"), ProcessorOptions(), DEFAULT_TENANT),
        80,
        60,
        ProcessorOptions(),
        None,
    )
    line_break = text.family.model.source.config.newline_id
    hashes, ids = [], []
    for behind, answer in (("", (line_break,)), ("\n", ()), ("\nand", ())):
        prompt = builder.build(TextPrompt(PLACEHOLDER + behind, (InlineImage(b"", ProcessorOptions()),)), [image])
        request = Request(RequestId("r"), prompt, SamplingParams(max_tokens=9), arrival_s=0.0)
        request.token_ids.extend(answer)
        BlockHasher(1).extend(request)
        # The last token is the line break, behind the image's last marker.
        stop = prompt.images[0].span.stop + 2
        hashes.append(request.block_hashes[:stop])
        ids.append(list(request.token_ids[:stop]))
    assert ids[0] == ids[1] == ids[2]
    assert hashes[0][0] == hashes[1][0] == hashes[2][0], "what precedes the image is shared"
    assert len({each[-1] for each in hashes}) == 3
