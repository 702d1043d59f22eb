"""Faults seeded into what is done with adapters: answers that are not PEFT's show each of them."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoTokenizer

from decoder_svc.runner.adapters import adapter_table
from decoder_svc.runner.adapters.adapter_table import AdaptedTokens, AdapterTable
from decoder_svc.runner.adapters.low_rank import LowRank, read_low_ranks
from decoder_svc.scheduling.kv_cache import block_hash
from decoder_svc.scheduling.request import Request
from decoder_svc.scheduling.scheduler_output import AdmittedRequest, ScheduledChunk
from lookonce.decoder.v1 import decoder_service_pb2 as pb
from lookonce.model import adapter_folder
from lookonce.model.adapter_folder import AdapterFolder
from tests.conftest import DEMO_MODEL
from tests.decoder_svc.decoders import RunningDecoder, running_decoder
from tests.decoder_svc.scheduling.mutation import Mutations, Patch
from tests.lora_folders import generated, lora_folder, with_adapter

mutation = Mutations()
NUM_TOKENS = 6
WEIGHTS = "adapter_model.safetensors"
# The first is longer than some blocks, so that the prefix cache has it.
TEXTS = ["What is in the picture, and where is it? A red star and a blue moon, or so it seems.", "A green one?"]
CONFIGS: dict[str, dict[str, Any]] = {
    "one": {"seed": 1, "lora_alpha": 12, "rank_pattern": {"o_proj": 6}, "alpha_pattern": {"q_proj": 3}},
    "two": {"seed": 2, "use_rslora": True, "r": 8},
    # The content of "one" after its configuration was changed.
    "new": {"seed": 1, "lora_alpha": 30, "rank_pattern": {"o_proj": 6}, "alpha_pattern": {"q_proj": 3}},
}


@mutation
def the_scale_is_left_out(patch: Patch) -> None:
    patch.setattr(AdapterFolder, "scale_of", lambda self, module: 1.0)


@mutation
def every_scale_is_divided_by_the_rank(patch: Patch) -> None:
    patch.setattr(AdapterFolder, "scale_of", lambda self, module: self.alpha / self.rank_of(module))


@mutation
def patterns_of_ranks_do_not_change_the_scale(patch: Patch) -> None:
    original = AdapterFolder.scale_of

    def scale_of(self: AdapterFolder, module: str) -> float:
        factor = self.rank_of(module) / self.rank
        return original(self, module) * (factor**0.5 if self.is_rank_stabilized else factor)

    patch.setattr(AdapterFolder, "scale_of", scale_of)


@mutation
def patterns_of_alphas_are_not_read(patch: Patch) -> None:
    def scale_of(self: AdapterFolder, module: str) -> float:
        rank = self.rank_of(module)
        return self.alpha / (rank**0.5 if self.is_rank_stabilized else rank)

    patch.setattr(AdapterFolder, "scale_of", scale_of)


def change_low_ranks(patch: Patch, change: Any) -> None:
    patch.setattr(adapter_table, "read_low_ranks", lambda *arguments: change(read_low_ranks(*arguments)))


@mutation
def the_last_layer_has_no_adapter(patch: Patch) -> None:
    def change(found: Mapping[str, LowRank]) -> dict[str, LowRank]:
        last = max(name.split(".")[1] for name in found)
        return {name: low for name, low in found.items() if name.split(".")[1] != last}

    change_low_ranks(patch, change)


@mutation
def keys_get_what_belongs_to_values(patch: Patch) -> None:
    def change(found: Mapping[str, LowRank]) -> dict[str, LowRank]:
        return {name: found[name.replace("k_proj", "v_proj")] for name in found}

    change_low_ranks(patch, change)


def change_tokens(patch: Patch, change: Any) -> None:
    original = AdapterTable.begin_step

    def begin_step(self: AdapterTable, chunks: Sequence[ScheduledChunk], adapters: Sequence[str | None]) -> None:
        original(self, chunks, adapters)
        self.tokens = tuple(AdaptedTokens(*change(*each)) for each in self.tokens)

    patch.setattr(AdapterTable, "begin_step", begin_step)


@mutation
def all_tokens_have_the_first_adapter(patch: Patch) -> None:
    change_tokens(patch, lambda start, stop, slot: (start, stop, 0))


@mutation
def the_last_token_of_an_adapter_is_forgotten(patch: Patch) -> None:
    change_tokens(patch, lambda start, stop, slot: (start, stop - 1, slot))


@mutation
def the_first_token_of_an_adapter_is_forgotten(patch: Patch) -> None:
    change_tokens(patch, lambda start, stop, slot: (start + 1, stop, slot))


@mutation
def adapters_begin_where_the_batch_begins(patch: Patch) -> None:
    change_tokens(patch, lambda start, stop, slot: (0, stop - start, slot))


@mutation
def adapters_are_known_by_their_names(patch: Patch) -> None:
    original = AdapterFolder.open

    def opened(name: str, path: pathlib.Path) -> AdapterFolder:
        return replace(original(name, path), fingerprint=hashlib.sha256(name.encode()).hexdigest())

    patch.setattr(AdapterFolder, "open", opened)
    patch.setattr(AdapterFolder, "read_weights", lambda self: (self.path / WEIGHTS).read_bytes())


@mutation
def adapters_are_known_by_their_weights_alone(patch: Patch) -> None:
    original = adapter_folder._fingerprint
    patch.setattr(adapter_folder, "_fingerprint", lambda config, weights: original(b"", weights))


@mutation
def the_prefix_cache_knows_no_adapters(patch: Patch) -> None:
    original = block_hash._extra_keys

    def extra_keys(request: Request, start: int, stop: int) -> bytes:
        scope = request.cache_scope
        request.cache_scope = replace(scope, adapter=None)
        try:
            return original(request, start, stop)
        finally:
            request.cache_scope = scope

    patch.setattr(block_hash, "_extra_keys", extra_keys)


@mutation
def an_adapter_that_goes_leaves_its_matrices(patch: Patch) -> None:
    patch.setattr(AdapterTable, "drop", lambda self, fingerprint: None)
    original = AdapterTable.add

    def add(self: AdapterTable, fingerprint: str, prepared: Any) -> None:
        # The place is taken for free, and what is there stays.
        if self._slots and fingerprint not in self._slots and len(self._slots) >= 2:
            self._slots[fingerprint] = 0
        original(self, fingerprint, prepared)

    patch.setattr(AdapterTable, "add", add)


@mutation
def requests_reach_the_runner_without_their_adapters(patch: Patch) -> None:
    original = AdmittedRequest.of.__func__  # type: ignore[attr-defined]

    def of(cls: type[AdmittedRequest], request: Request) -> AdmittedRequest:
        admitted: AdmittedRequest = original(cls, request)
        object.__setattr__(admitted, "adapter", None)
        return admitted

    patch.setattr(AdmittedRequest, "of", classmethod(of))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: lora_folder(root / name, DEMO_MODEL, **config) for name, config in CONFIGS.items()}


@pytest.fixture(scope="module")
def expected(folders: dict[str, pathlib.Path]) -> dict[str, list[list[int]]]:
    """The answers of PEFT to all prompts, by adapter."""
    found = {}
    for name, folder in {"": None, **folders}.items():
        model = with_adapter(DEMO_MODEL, folder)
        found[name] = [generated(model, ids_of(text), NUM_TOKENS) for text in TEXTS]
    assert len({str(answers) for answers in found.values()}) == len(found), "the adapters change nothing"
    return found


@functools.cache
def ids_of(text: str) -> list[int]:
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_MODEL)
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids


async def ask(decoder: RunningDecoder, adapter: str, text: str) -> list[int]:
    params = pb.GenerateParams(
        tokens=pb.TokenPrompt(token_ids=ids_of(text)),
        sampling=pb.SamplingParams(max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS, temperature=0.0),
        adapter=adapter,
    )
    return list((await decoder.stub.Generate(pb.GenerateRequest(params=params))).choices[0].token_ids)


async def is_right(folders: dict[str, pathlib.Path], expected: dict[str, list[list[int]]], root: pathlib.Path) -> bool:
    """Whether all answers are PEFT's: in one batch, from the prefix cache, and with other content under a name."""
    for name in ("one", "two"):
        shutil.copytree(folders[name], root / name)
    settings: dict[str, Any] = {"adapters": f"one={root / 'one'},two={root / 'two'}", "adapters_folder": root}
    settings["admin_listen"] = "127.0.0.1:0"
    async with running_decoder(DEMO_MODEL, dtype="float32", block_size=8, **settings) as decoder:
        for _ in range(2):
            asked = [(name, index) for name in ("", "one", "two") for index in range(len(TEXTS))]
            found = await asyncio.gather(*(ask(decoder, name, TEXTS[index]) for name, index in asked))
            if found != [expected[name][index] for name, index in asked]:
                return False
        shutil.rmtree(root / "one")
        shutil.copytree(folders["new"], root / "one")
        await decoder.service.adapters.unload("one")
        await decoder.service.adapters.load("one")
        return [await ask(decoder, "one", text) for text in TEXTS] == expected["new"]


async def test_the_code_as_it_is_passes(
    folders: dict[str, pathlib.Path], expected: dict[str, list[list[int]]], tmp_path: pathlib.Path
) -> None:
    assert await is_right(folders, expected, tmp_path)


@pytest.mark.parametrize("name", mutation)
async def test_each_fault_is_noticed(
    name: str,
    folders: dict[str, pathlib.Path],
    expected: dict[str, list[list[int]]],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutation[name](monkeypatch)
    assert not await is_right(folders, expected, tmp_path)
