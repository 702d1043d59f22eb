"""A model that computes NaN, or whose files cannot be read, is refused when it is loaded, in one line."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any

import grpc
import grpc.aio
import pytest
import torch
from safetensors.torch import load_file, save_file

from decoder_svc.service import load_text
from decoder_svc.settings import DecoderSettings
from lookonce.decoder.v1 import decoder_service_pb2 as pb
from lookonce.errors import ModelFolderError
from lookonce.model.half_model import load_text_half
from lookonce.model.model_folder import ModelFolder
from lookonce.server.settings_parser import parse_settings
from tests.conftest import DEMO_MODEL, REPOSITORY
from tests.decoder_svc.decoders import running_decoder

# Ends of names of tensors.
NORM = ".layers.0.input_layernorm.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"
HEAD = "lm_head.weight"


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    copied = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, copied)
    return copied


def decoder_log(folder: pathlib.Path, *flags: str) -> str:
    """Returns what a decoder logs that must end by itself, with the exit status for wrong configuration."""
    command = [sys.executable, "-m", "decoder_svc", "--model", str(folder), "--listen", "127.0.0.1:0", *flags]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def change_tensor(folder: pathlib.Path, name: str, change: object) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    (found,) = (key for key in tensors if key.endswith(name))
    tensors[found] = change(tensors[found])  # type: ignore[operator]
    save_file(tensors, file, metadata={"format": "pt"})


def untie_head(folder: pathlib.Path) -> None:
    """Gives the last layer a matrix of its own, equal to the table of embeddings."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    (table,) = (tensor for key, tensor in tensors.items() if key.endswith("embed_tokens.weight"))
    save_file(tensors | {HEAD: table.clone()}, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config))


def spoilt(value: float) -> object:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[3] = value
        return tensor

    return change


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("flags", [(), ("--quantize", "int8"), ("--kv-cache-dtype", "int8")], ids=str)
def test_a_weight_that_is_no_number_ends_the_decoder(
    folder: pathlib.Path, value: float, flags: tuple[str, ...]
) -> None:
    change_tensor(folder, QUERY, spoilt(value))
    log = decoder_log(folder, *flags)
    assert "the language model computes NaN" in log
    assert "Traceback" not in log


@pytest.mark.parametrize("flags", [(), ("--dtype", "float32"), ("--engine", "process")], ids=str)
def test_a_token_that_could_never_be_chosen_ends_the_decoder(folder: pathlib.Path, flags: tuple[str, ...]) -> None:
    """Samplers pass a logit of NaN over."""
    untie_head(folder)
    change_tensor(folder, HEAD, spoilt(torch.nan))
    log = decoder_log(folder, *flags)
    assert "the language model computes NaN" in log
    assert "Traceback" not in log


# Settings of decoders: in two processes, in chunks, with drafts, with codes for keys and values.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "process": {"engine": "process"},
    "chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 2},
    "drafts": {"speculative_tokens": 3, "speculative_ngram_min": 1},
    "codes": {"kv_cache_dtype": "int8"},
}
BAD_TOKEN = 100


@pytest.mark.parametrize("way", WAYS)
async def test_a_token_that_makes_nan_ends_its_requests_and_changes_no_answer_of_others(
    folder: pathlib.Path, way: str
) -> None:
    """Others share the blocks in front of the token with its requests."""
    # The last layer is whole, so that the token can be chosen.
    untie_head(folder)
    change_tensor(folder, "embed_tokens.weight", spoil_row)
    prompts = [[60 + (7 * place + length) % 39 for place in range(length)] for length in (5, 17, 33, 60, 90, 17)]
    settings = {"dtype": "float32", "block_size": 8, "num_kv_blocks": 60, "max_context_tokens": 140, **WAYS[way]}
    async with running_decoder(folder, **settings) as decoder:

        async def answer(ids: list[int]) -> list[int] | str:
            request = pb.GenerateRequest(
                params=pb.GenerateParams(
                    tokens=pb.TokenPrompt(token_ids=ids),
                    sampling=pb.SamplingParams(max_tokens=12, min_tokens=12, temperature=0.0),
                )
            )
            try:
                return list((await decoder.stub.Generate(request)).choices[0].token_ids)
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name}: {error.details()}"

        expected = [await answer(ids) for ids in prompts]
        assert all(isinstance(each, list) for each in expected)
        for number, ids in enumerate(prompts * 3):
            half = len(ids) // 2
            ended = await answer([*ids[:half], BAD_TOKEN, *ids[half:]])
            assert isinstance(ended, str)
            assert re.fullmatch("INTERNAL: the model computed NaN: .* may be damaged, incident [0-9a-f]{32}", ended)
            assert [await answer(each) for each in prompts] == expected, number
        # A request that has a block of another one's step may end like it. None gets other tokens.
        mixed = [*prompts, *([*ids[:8], BAD_TOKEN, *ids[8:]] for ids in prompts)]
        found = await asyncio.gather(*map(answer, mixed))
        for one, wanted in zip(found, [*expected, *[None] * len(prompts)], strict=True):
            assert isinstance(one, str) if wanted is None else one == wanted or isinstance(one, str)
        assert [await answer(each) for each in prompts] == expected


def spoil_row(table: torch.Tensor) -> torch.Tensor:
    table[BAD_TOKEN, 3] = torch.nan
    return table


def test_a_norm_that_divides_by_nothing_ends_the_decoder(folder: pathlib.Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["rms_norm_eps"] = -1.0
    (folder / "config.json").write_text(json.dumps(config))
    assert "text_config.rms_norm_eps must be a number" in decoder_log(folder)


def test_a_context_without_room_ends_the_decoder(folder: pathlib.Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    assert "max_position_embeddings is 1" in decoder_log(folder)


@pytest.mark.parametrize("dtype", ["I32", "U32"])
def test_integers_do_not_become_weights(folder: pathlib.Path, dtype: str) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_bytes])
    (found,) = (key for key in header if key.endswith(NORM))
    header[found]["dtype"] = dtype
    changed = json.dumps(header).encode()
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + header_bytes :])
    with pytest.raises(ModelFolderError, match=f"has elements of the type {dtype}"):
        load_text_half(folder, None, "sdpa")


def test_a_header_that_contradicts_itself_is_told(folder: pathlib.Path) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_bytes])
    (found,) = (key for key in header if key.endswith(NORM))
    header[found]["shape"][0] += 1
    changed = json.dumps(header).encode()
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + header_bytes :])
    with pytest.raises(ModelFolderError, match="cannot be read; download them again"):
        load_text_half(folder, None, "sdpa")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer_config.json"])
def test_a_pipe_is_no_file(folder: pathlib.Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ModelFolderError, match="is no regular file"):
        ModelFolder.open(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "processor_config.json"])
def test_json_without_a_bottom_is_told(folder: pathlib.Path, name: str) -> None:
    (folder / name).write_text("[" * 100_000)
    with pytest.raises(ModelFolderError, match="nested too deeply"):
        ModelFolder.open(folder)


def test_pools_beyond_any_memory_are_refused_as_settings(folder: pathlib.Path) -> None:
    assert "--num-kv-blocks: Input should be less" in decoder_log(folder, "--num-kv-blocks", str(2**63 - 1))


def test_an_end_token_that_is_not_there_is_logged(folder: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = parse_settings(DecoderSettings, ["--model", str(folder)], "decoder_svc")
    load_text(settings)
    assert "no end token" not in capfd.readouterr().err
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": 10**9}))
    load_text(settings)
    assert "has no end token of this folder" in capfd.readouterr().err
