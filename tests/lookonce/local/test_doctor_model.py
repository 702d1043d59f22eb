"""The reports of `lookonce doctor --model` and `lookonce models`."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from decoder_svc.prompt.image_layout import layout_of
from decoder_svc.runner.kv_cache_spec import KVCacheSpec
from encoder_svc.settings import EncoderSettings
from encoder_svc.vision.vision_model import VisionModel
from lookonce.families.registry import FAMILIES
from lookonce.local import doctor
from lookonce.local.cli_settings import CliSettings
from lookonce.local.doctor_model import examine_folder
from lookonce.local.finding import Finding
from lookonce.model.family_model import FamilyModel
from lookonce.model.model_folder import ModelFolder
from tests import tiny_families, tiny_models
from tests.decoder_svc.runner.cpu.loaded_runner import load
from tests.folder_verdicts import start_refusal
from tests.lookonce.command import run_here
from tests.quantized_folders import FORMS, store_quantized
from tests.rust_panic import change_tokenizer, with_short_table

ROOT = pathlib.Path(__file__).parents[3]

pytestmark = pytest.mark.usefixtures("only_headers")


def _examined(path: pathlib.Path) -> dict[str, Finding]:
    return {finding.subject: finding for finding in examine_folder(ModelFolder.open(path))}


def _encoders_fingerprint(path: pathlib.Path, **settings: Any) -> str:
    return VisionModel.load(EncoderSettings(model=path, **settings).vision).fingerprint


def _config(path: pathlib.Path) -> Any:
    return transformers.AutoConfig.from_pretrained(path)


def _drop_tensor(path: pathlib.Path, part: str) -> None:
    tensors = load_file(path / "model.safetensors")
    del tensors[next(name for name in sorted(tensors) if part in name)]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", sorted(tiny_families.FAMILIES | tiny_models.BUILDERS))
def test_every_tiny_family_loads(name: str, built: Callable[[str], pathlib.Path]) -> None:
    path = built(name)
    findings = _examined(path)
    assert [finding for finding in findings.values() if not finding.is_fine] == []
    assert findings["loading"].detail == "encoder and decoder can load this folder"
    model = FamilyModel.load(ModelFolder.open(path))
    largest = model.sizing.largest
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    token_id = getattr(_config(path), "image_token_id", None) or _config(path).image_token_index
    layout = layout_of(
        largest,
        tokenizer.convert_ids_to_tokens(token_id),
        token_id,
        lambda text: tokenizer.encode(text, add_special_tokens=False),
    )
    tokens = f"{largest.num_rows:,} rows, {len(layout.token_ids):,} tokens"
    assert findings["largest image"].detail.startswith(tokens)


@pytest.mark.parametrize("name", ["gemma3", "qwen2_vl"])
def test_the_fingerprint_is_the_encoders(name: str, built: Callable[[str], pathlib.Path]) -> None:
    assert _examined(built(name))["encoder fingerprint"].detail == _encoders_fingerprint(built(name))


def test_sizes_follow_from_the_configuration(built: Callable[[str], pathlib.Path]) -> None:
    findings = _examined(built("gemma3"))
    block = KVCacheSpec(num_layers=6, num_kv_heads=2, head_dim=16, dtype=torch.float32, block_size=16).block_bytes
    assert findings["KV cache"].detail == f"{block:,} bytes per block of 16 tokens, 1.6 MB per 1,024 tokens"
    assert findings["row"].detail == "256 bytes; 4.1 kB for the largest image"
    assert findings["rows of images"].detail == "640×480: 16, 1920×1080: 16, 3000×200: 16"
    assert findings["largest image"].detail == "16 rows, 20 tokens of the prompt"
    deepstack = _examined(built("qwen3_vl"))
    assert deepstack["row"].detail.startswith("768 bytes, 512 of them feature levels; ")


def test_the_step_that_a_whole_image_needs_is_told(
    built: Callable[[str], pathlib.Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = _examined(built("gemma3"))["step"]
    assert step.is_fine
    assert step.detail.startswith("the decoder needs --max-num-batched-tokens 79 or more")
    monkeypatch.setenv("LOOKONCE_MAX_NUM_SEQS", "4")
    monkeypatch.setenv("LOOKONCE_MAX_NUM_BATCHED_TOKENS", "18")
    findings = _examined(built("gemma3"))
    assert not findings["step"].is_fine
    assert "loading" not in findings
    assert "--max-num-batched-tokens 19 or more" in findings["step"].detail
    assert "Gemma 3 needs 19" in (start_refusal(built("gemma3")) or "")
    assert "step" not in _examined(built("llava_clip"))


@pytest.mark.parametrize("name", ["gemma4", "gemma4_moe"])
def test_layers_count_with_their_own_heads_if_they_have_keys_of_their_own(
    name: str, built: Callable[[str], pathlib.Path]
) -> None:
    spec = load(built(name), torch.float32).get_kv_cache_spec()
    spec = replace(spec, block_size=16, block_slots=None)
    num_bytes = spec.block_bytes + spec.sliding_block_bytes
    assert _examined(built(name))["KV cache"].detail.startswith(f"{num_bytes:,} bytes per block of 16 tokens")


@pytest.mark.parametrize("name", ["mistral4"])
def test_latents_count_once_for_all_heads(name: str, built: Callable[[str], pathlib.Path]) -> None:
    text = _config(built(name)).get_text_config()
    num_bytes = text.num_hidden_layers * (text.kv_lora_rank + text.qk_rope_head_dim) * 4 * 16
    assert _examined(built(name))["KV cache"].detail.startswith(f"{num_bytes:,} bytes per block of 16 tokens")
    spec = load(built(name), torch.float32).get_kv_cache_spec()
    assert replace(spec, block_size=16, block_slots=None).block_bytes == num_bytes


@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h_omni"])
def test_recurrent_layers_take_no_keys_and_values(name: str, built: Callable[[str], pathlib.Path]) -> None:
    path = built(name)
    text = _config(path).get_text_config()
    num_recurrent, num_full = (text.layer_types.count(kind) for kind in ("linear_attention", "full_attention"))
    assert min(num_recurrent, num_full) > 0
    num_bytes = num_full * 2 * text.num_key_value_heads * text.head_dim * 4 * 16
    detail = _examined(path)["KV cache"].detail
    assert detail.startswith(f"{num_bytes:,} bytes per block of 16 tokens")
    recurrent = load(path, torch.float32).recurrent
    assert recurrent is not None
    state = f"{recurrent.state_bytes / 1000:,.1f} kB"
    assert detail.endswith(f", and {state} per request and per snapshot of {num_recurrent} recurrent layers")


# Layers alone, and experts.
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl_moe"])
def test_the_form_of_quantized_layers_is_told(name: str, copied: Callable[..., pathlib.Path]) -> None:
    path = copied(name)
    whole = _examined(path)
    names = store_quantized(path, FORMS["awq"])
    findings = _examined(path)
    assert all(finding.is_fine for finding in findings.values())
    assert findings["text half"].detail.endswith(f"; {len(names)} linear layers as int4 with a scale for 32 inputs")
    assert findings["vision half"] == whole["vision half"]
    assert findings["encoder fingerprint"] == whole["encoder fingerprint"]


def test_the_checkpoints_element_type_counts(copied: Callable[..., pathlib.Path]) -> None:
    path = copied("gemma3", {"dtype": "bfloat16"})
    findings = _examined(path)
    assert findings["text half"].detail.startswith("709.4 kB as bfloat16 ")
    assert findings["row"].detail.startswith("128 bytes")
    assert findings["KV cache"].detail.startswith("12,288 bytes")
    assert findings["encoder fingerprint"].detail == _encoders_fingerprint(path)


@pytest.mark.parametrize(("part", "half"), [("language_model.model.layers.0.mlp", "text"), ("vision_tower", "vision")])
def test_a_missing_tensor_is_named(part: str, half: str, copied: Callable[..., pathlib.Path]) -> None:
    path = copied("llava_clip")
    _drop_tensor(path, part)
    findings = _examined(path)
    assert [finding.subject for finding in findings.values() if not finding.is_fine] == [f"{half} half"]
    assert f"the {half} weights do not fit the configuration: 1 missing (" in findings[f"{half} half"].detail
    assert "download the model again" in findings[f"{half} half"].detail
    assert "loading" not in findings


@pytest.mark.parametrize(
    ("text", "detail"), [({"intermediate_size": 100}, "mismatched ("), ({"num_attention_heads": 2}, "")]
)
def test_weights_of_another_shape_are_refused(
    text: Mapping[str, Any], detail: str, copied: Callable[..., pathlib.Path]
) -> None:
    findings = _examined(copied("internvl", text=text))
    assert not findings["text half"].is_fine
    assert detail in findings["text half"].detail


def test_a_refused_text_model_is_the_only_finding(copied: Callable[..., pathlib.Path]) -> None:
    path = copied("llava_clip", text={"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}})
    (finding,) = _examined(path).values()
    assert (finding.subject, finding.is_fine) == ("family", False)
    assert "rope type 'dynamic'" in finding.detail


def test_a_tokenizer_without_the_image_token_is_found(copied: Callable[..., pathlib.Path]) -> None:
    findings = _examined(copied("gemma3", {"image_token_index": 1_000_000, "image_token_id": 1_000_000}))
    assert not findings["largest image"].is_fine
    assert "1000000" in findings["largest image"].detail


def test_a_tokenizer_without_bos_is_found_where_prompts_need_it(copied: Callable[..., pathlib.Path]) -> None:
    folder = copied("paligemma", {})
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    del config["bos_token"]
    file.write_text(json.dumps(config))
    findings = _examined(folder)
    assert not findings["tokenizer"].is_fine
    assert "bos_token" in findings["tokenizer"].detail


def test_without_the_services_libraries_the_finding_names_the_extra_to_install(
    built: Callable[[str], pathlib.Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lookonce.local.doctor_model", None)
    *_, last = doctor.examine(CliSettings(), str(built("gemma3")))
    assert not last.is_fine
    assert "pip install 'lookonce[serve]'" in last.detail


def test_the_command_prints_one_line_per_finding(built: Callable[[str], pathlib.Path]) -> None:
    finished = run_here(os.environ, "doctor", "--model", str(built("gemma3")))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (line,) = [line for line in finished.stdout.splitlines() if "encoder fingerprint" in line]
    assert len(line.split()[-1]) == 64
    assert "Loading weights" not in finished.stderr


def test_the_report_tells_whether_videos_are_accepted(copied: Callable[..., pathlib.Path]) -> None:
    path = copied("qwen3_vl")
    assert "16 frames of 640×480" in _examined(path)["videos"].detail
    template = (path / "chat_template.jinja").read_text()
    for without in (template.replace("'video'", "'film'"), "{{ raise_exception('no') }}"):
        (path / "chat_template.jinja").write_text(without)
        findings = _examined(path)
        if without.startswith("{{"):
            assert not findings["chat template"].is_fine
        else:
            assert findings["videos"].detail == "not taken: the chat template does not write them"
    assert "takes no videos" in _examined(copied("gemma3"))["videos"].detail


def test_ignored_generation_defaults_are_named(copied: Callable[..., pathlib.Path]) -> None:
    path = copied("llava_clip")
    assert "generation defaults" not in _examined(path)
    stated = {"no_repeat_ngram_size": 3, "typical_p": 1.0, "num_beams": 4, "suppress_tokens": [5]}
    (path / "generation_config.json").write_text(json.dumps(stated))
    finding = _examined(path)["generation defaults"]
    assert finding == Finding("generation defaults", True, "ignored: num_beams=4, no_repeat_ngram_size=3")
    (path / "generation_config.json").write_text("[]")
    assert [finding.is_fine for finding in _examined(path).values()] == [False]


def test_a_default_that_the_decoder_refuses_is_refused_here(copied: Callable[..., pathlib.Path]) -> None:
    path = copied("llava_clip")
    (path / "generation_config.json").write_text('{"top_p": 2}')
    finding = _examined(path)["generation defaults"]
    assert not finding.is_fine
    assert "top_p must be in (0, 1], got 2" in finding.detail
    assert "loading" not in _examined(path)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}", "cannot be rendered: Unexpected end of template"),
        ("{{ raise_exception('only one image') }}", "cannot be rendered: only one image"),
        ("{{ 1 / 0 }}", "cannot be rendered: division by zero"),
    ],
)
def test_the_error_of_a_template_is_shown(template: str, reason: str, copied: Callable[..., pathlib.Path]) -> None:
    path = copied("llava_clip")
    (path / "chat_template.jinja").write_text(template)
    finding = _examined(path)["chat template"]
    assert not finding.is_fine
    assert finding.detail.startswith(reason)


def test_an_image_token_that_ends_messages_is_refused(copied: Callable[..., pathlib.Path]) -> None:
    path = copied("qwen2_vl")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    # Written once for a message, as the image token is for an image.
    (path / "chat_template.jinja").write_text((path / "chat_template.jinja").read_text().replace("<|im_start|>", ""))
    copied_config = json.loads((path / "config.json").read_text())
    copied_config["image_token_id"] = tokenizer.convert_tokens_to_ids("<|im_end|>")
    (path / "config.json").write_text(json.dumps(copied_config))
    finding = _examined(path)["chat template"]
    assert not finding.is_fine
    assert finding.detail.startswith(
        "writes <|im_end|>, which config.json names as the image token (image_token_id), without an image; use the"
    )


def _without(path: pathlib.Path, pattern: str) -> pathlib.Path:
    for file in path.glob(pattern):
        file.unlink()
    return path


def _unservable(fault: str, tmp_path: pathlib.Path, copied: Callable[..., pathlib.Path]) -> pathlib.Path:
    """Makes a path that newcomers give instead of a complete model folder."""
    if fault == "panicking tokenizer":
        path = copied("llava_clip")
        change_tokenizer(path, normalizer=with_short_table({}, num_entries=0)["normalizer"])
        return path
    if fault in {"no tokenizer", "damaged tokenizer", "no chat template"}:
        path = copied("llava_clip")
        if fault == "damaged tokenizer":
            (path / "tokenizer.json").write_text('{"model": 1}')
            return path
        return _without(path, "tokenizer*" if fault == "no tokenizer" else "chat_template*")
    path = tmp_path / {"GGUF file": "model.gguf", "weight file": "model.safetensors"}.get(fault, "model")
    if path.suffix:
        path.write_bytes(b"GGUF")
        return path
    path.mkdir()
    if fault == "config.json only":
        shutil.copy(copied("llava_clip") / "config.json", path)
    elif fault == "GGUF folder":
        (path / "model-q4.gguf").write_bytes(b"GGUF")
    elif fault == "adapter":
        base = {"peft_type": "LORA", "base_model_name_or_path": "some/base-model"}
        (path / "adapter_config.json").write_text(json.dumps(base))
        (path / "adapter_model.safetensors").write_bytes(b"")
    return path


_FAULTS = {
    "no tokenizer": ["tokenizer.json is missing", "download the tokenizer"],
    "damaged tokenizer": ["tokenizer", "cannot be loaded", "download tokenizer.json"],
    "panicking tokenizer": ["tokenizer", "fails on ordinary texts", "download tokenizer.json"],
    "no chat template": ["refuses chats", "chat_template.jinja"],
    "GGUF file": ["GGUF", "safetensors"],
    "GGUF folder": ["GGUF", "safetensors"],
    "weight file": ["a weight file", "give the folder", "config.json"],
    "empty": ["is empty", "download a model"],
    "config.json only": ["no weights", "model.safetensors", "download the whole model"],
    "adapter": ["adapter", "--adapters", "some/base-model"],
}


@pytest.mark.parametrize("fault", _FAULTS)
def test_a_path_that_newcomers_give_by_mistake_gets_one_line_with_the_remedy(
    fault: str, tmp_path: pathlib.Path, copied: Callable[..., pathlib.Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = _unservable(fault, tmp_path, copied)
    (bad,) = [finding for finding in doctor.examine(CliSettings(), str(path)) if not finding.is_fine]
    assert "\n" not in bad.detail
    for part in _FAULTS[fault]:
        assert part in bad.detail


def test_the_command_ends_with_a_status_and_no_traceback_on_such_a_path(
    tmp_path: pathlib.Path, copied: Callable[..., pathlib.Path]
) -> None:
    finished = run_here(os.environ, "doctor", "--model", str(_unservable("no chat template", tmp_path, copied)))
    assert finished.returncode == 1
    assert "Traceback" not in finished.stdout + finished.stderr
    assert [line for line in finished.stdout.splitlines() if line.startswith("no\t")]


def test_the_command_fails_for_a_folder_that_does_not_load(copied: Callable[..., pathlib.Path]) -> None:
    finished = run_here(os.environ, "doctor", "--model", str(copied("gemma3", text={"sliding_window": None})))
    assert finished.returncode == 1
    assert "sliding_window" in finished.stdout
    assert "Traceback" not in finished.stderr


def test_models_lists_every_family_in_a_line() -> None:
    finished = run_here(os.environ, "models")
    assert finished.returncode == 0, finished.stderr
    lines = [" ".join(line.split()) for line in finished.stdout.splitlines()[1:]]
    assert len(lines) == len(FAMILIES)
    offers = "chunked, max_pixels, M-RoPE, feature levels, videos"
    assert f"Qwen3-VL qwen3_vl Qwen3VLForConditionalGeneration {offers}" in lines
    assert "Gemma 3 gemma3 Gemma3ForConditionalGeneration whole image in a step" in lines
    assert "PaliGemma paligemma PaliGemmaForConditionalGeneration whole prompt in a step" in lines
    assert "SmolVLM smolvlm SmolVLMForConditionalGeneration chunked, videos" in lines


def test_models_imports_neither_torch_nor_transformers() -> None:
    script = (
        "import sys; from lookonce.commands.application import app; app(['models'], standalone_mode=False); "
        "heavy = {'torch', 'transformers', 'numpy', 'PIL'} & sys.modules.keys(); sys.exit(str(heavy) if heavy else 0)"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize(
    ("file", "field", "value", "subject", "reason"),
    [
        ("config.json", "text_config.pad_token_id", None, "family", "pad_token_id of its text model is None"),
        ("config.json", "text_config.pad_token_id", -1, "family", "pad_token_id of its text model is -1"),
        ("config.json", "text_config.pad_token_id", 10**6, "family", "pad_token_id"),
        ("config.json", "text_config.per_layer_config", [], "family", "transformers cannot read"),
        ("config.json", "text_config.per_layer_config", {"2": {"sliding_window": 4}}, "family", "sliding_window"),
        (
            "preprocessor_config.json",
            "pooling_kernel_size",
            0,
            "rows of images",
            "with the numbers in preprocessor_config.json: ZeroDivisionError",
        ),
        ("preprocessor_config.json", "patch_size", 0, "family", "patch_size of the image processor must be a number"),
        ("preprocessor_config.json", "patch_size", None, "rows of images", "TypeError"),
    ],
)
def test_a_number_with_which_nothing_can_be_computed_is_a_finding(
    file: str, field: str, value: Any, subject: str, reason: str, tmp_path: pathlib.Path
) -> None:
    """Found with folders of Gemma 4 by an outsider: each of them ended the program with a traceback."""
    path = tiny_families.FAMILIES["gemma4"].build(tmp_path / "model")
    settings = json.loads((path / file).read_text())
    *outer, last = field.split(".")
    part = settings
    for name in outer:
        part = part[name]
    part[last] = value
    (path / file).write_text(json.dumps(settings))
    finding = _examined(path)[subject]
    assert not finding.is_fine
    assert reason in finding.detail
