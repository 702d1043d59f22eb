"""The longest sequence is computed exactly where something else than positions limits it, and a longer one is not."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping

import pytest
import torch
import transformers

from decoder_svc.scheduling.prompt import Prompt
from lookonce.model.text_support import longest_sequence
from tests import tiny_models
from tests.parity import families, offline
from tests.tiny_families import FAMILIES

NUM_PAST = 40


@pytest.mark.parametrize("name", ["llama4"])
@pytest.mark.parametrize(
    ("fields", "field"),
    [({}, "floor_scale"), ({"attn_temperature_tuning": False}, "attention_chunk_size")],
    ids=["temperature tuning", "chunks"],
)
def test_answers_are_exact_up_to_the_longest_sequence(
    name: str, fields: Mapping[str, bool], field: str, tmp_path: pathlib.Path
) -> None:
    path = FAMILIES[name].build(tmp_path) / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"text_config": config["text_config"] | fields}))
    longest, found = longest_sequence(transformers.AutoConfig.from_pretrained(tmp_path).get_text_config())
    assert found == field
    family, reference = families.build(FAMILIES[name], tmp_path, 1), tiny_models.load_model(tmp_path)
    # The last token of an exact answer is computed from the longest sequence.
    num_exact = offline.MAX_NEW_TOKENS
    ids = torch.randint(20, 1000, (1, longest - num_exact + 1), generator=torch.Generator().manual_seed(0))
    num_tokens = num_exact + NUM_PAST
    with torch.inference_mode():
        output = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
        )  # fmt: skip
    expected = output[0, ids.shape[1] :].tolist()
    for budget in (2048, 37):
        session = offline.Session(family.offline, max_num_batched_tokens=budget)
        for answer in session.ask([Prompt(tuple(ids[0].tolist()))] * 2, max_tokens=num_tokens).token_ids:
            assert answer[:num_exact] == expected[:num_exact]
            assert answer != expected
