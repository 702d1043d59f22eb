"""Models that get a native stack or native linear layers, and weights that leave the mapped weight file."""

from __future__ import annotations

import gc
import logging
import pathlib
from typing import Any

import pytest
import torch

from decoder_svc.runner.attention import PAGED_ATTENTION, register_paged_attention
from decoder_svc.runner.cpu import native_model
from decoder_svc.runner.cpu import runner as cpu_runner
from decoder_svc.runner.cpu.native_stack import NativeStack
from lookonce.model.half_model import load_text_half
from lookonce.model.kernels.kernel_choice import PYTORCH, KernelChoice
from lookonce.model.kernels.native_linear import NativeLinear
from lookonce.model.kernels.packed_embedding import PackedEmbedding
from tests import tiny_models
from tests.decoder_svc.runner.cpu.loaded_runner import load, text_model, tie_head
from tests.tiny_families import FAMILIES

pytestmark = pytest.mark.usefixtures("library")

HAVE_STACKS = {
    "cosmos3_omni", "deepseek_vl", "deepseek_vl_hybrid", "got_ocr2", "idefics2", "idefics3", "internvl", "janus",
    "lighton_ocr", "llava_clip", "llava_next", "llava_next_video", "llava_onevision", "llava_siglip", "mistral3",
    "ovis2", "pixtral", "qianfan_ocr", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm",
    "video_llama_3", "video_llava", "vipllava",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_models.build_llava_clip(tmp_path_factory.mktemp("llava"))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_model_like_llama_gets_a_stack_and_others_our_linear_layers(name: str, tmp_path: pathlib.Path) -> None:
    FAMILIES[name].build(tmp_path)
    runner = load(tmp_path, torch.float32)
    found = text_model(runner)
    assert isinstance(found, NativeStack) == (name in HAVE_STACKS)
    if not isinstance(found, NativeStack):
        assert isinstance(found, torch.nn.Module)
        assert any(isinstance(module, NativeLinear) for module in found.modules())
        assert not any(type(module) is torch.nn.Linear for module in found.modules())
    assert isinstance(runner.model.lm_head, NativeLinear)
    assert runner.is_batch_invariant == (name in HAVE_STACKS)


def test_weights_are_asked_for_before_they_are_read(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[int] = set()
    read: set[int] = set()
    check = native_model._checked_stack

    def checked(text_model: torch.nn.Module, *arguments: Any) -> Any:
        read.update(parameter.data_ptr() for parameter in text_model.parameters())
        assert read <= asked
        return check(text_model, *arguments)

    monkeypatch.setattr(cpu_runner, "read_ahead", lambda all_: asked.update(one.data_ptr() for one in all_))
    monkeypatch.setattr(native_model, "_checked_stack", checked)
    load(folder, torch.float32)
    assert len(read) > 10


# With a stack, with our linear layers, and with experts.
@pytest.mark.parametrize("name", ["llava_clip", "gemma3", "qwen3_vl_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weight_file_is_unmapped(name: str, dtype: torch.dtype, tmp_path: pathlib.Path) -> None:
    if not (maps := pathlib.Path("/proc/self/maps")).exists():
        pytest.skip("this system does not tell what a process has mapped")
    FAMILIES[name].build(tmp_path)
    register_paged_attention()
    model = load_text_half(tmp_path, dtype, PAGED_ATTENTION)
    was_mapped = str(tmp_path) in maps.read_text()
    del model
    gc.collect()
    runner = load(tmp_path, dtype)
    gc.collect()
    assert str(tmp_path) not in maps.read_text()
    assert runner.model is not None
    assert was_mapped or dtype is torch.bfloat16, "else there is nothing to see here"


# With a stack and with our linear layers. Gemma's table scales what it looks up.
@pytest.mark.parametrize(("name", "is_plain"), [("llava_clip", True), ("aya_vision", True), ("gemma3", False)])
def test_a_tied_model_has_its_table_once(name: str, is_plain: bool, tmp_path: pathlib.Path) -> None:
    """The head's kernel had a copy of the table, so both were in memory."""
    FAMILIES[name].build(tmp_path)
    untied = load(tmp_path, torch.bfloat16)
    tie_head(tmp_path)
    tied = load(tmp_path, torch.bfloat16)
    table, head = tied.model.get_input_embeddings(), tied.model.lm_head
    assert isinstance(table, PackedEmbedding) == is_plain
    if not is_plain:
        return
    assert untied.weight_bytes - tied.weight_bytes == untied.model.get_input_embeddings().weight.nbytes
    assert tied.model.dtype is torch.bfloat16
    ids = torch.arange(table.num_embeddings)
    assert torch.equal(table(ids), untied.model.get_input_embeddings()(ids))
    # The head is the table: the identity's logits are its columns.
    identity = torch.eye(table.embedding_dim, dtype=torch.bfloat16)
    assert torch.equal(head(identity).T, table(ids).float())


def test_a_stack_with_wrong_results_is_not_used(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Crooked(NativeStack):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            self._last_norm[3] *= 1.001

    monkeypatch.setattr(native_model, "NativeStack", Crooked)
    with caplog.at_level(logging.WARNING):
        runner = load(folder, torch.float32)
    assert not isinstance(text_model(runner), NativeStack)
    assert "results differ from" in caplog.text


def test_a_stack_that_gives_nan_is_not_used(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(NativeStack):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            self._last_norm.fill_(torch.nan)

    monkeypatch.setattr(native_model, "NativeStack", Broken)
    assert not isinstance(text_model(load(folder, torch.float32)), NativeStack)


def test_the_log_says_where_pytorch_computes_the_products(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bits depend on the batch there, which docs/decoder.md tells by this line."""
    monkeypatch.setattr(
        cpu_runner, "choose_step_linear", lambda _: KernelChoice("linear float32", PYTORCH, {PYTORCH: 1.0})
    )
    with caplog.at_level(logging.INFO):
        runner = load(folder, torch.float32)
    assert not runner.is_batch_invariant
    assert "language model: transformers' modules" in caplog.text
    assert "native stack" not in caplog.text
