"""llama.cpp behind JSON lines, run by the peer's own interpreter. Started by beside_llama_cpp.py.

Needs nothing of Lookonce, but llama-cpp-python, gguf, numpy and safetensors. The first line names a folder with a model
of type LLaVA, whose language model is written as GGUF, a folder for these files, the number of threads and the largest
batch. Each further line is one command, and each gets one line of answer on what was standard output.
"""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any

_PREFIX = "language_model."
# Names of GGUF by the last parts of names of Hugging Face.
_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
_OTHER_NAMES = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
# Numbers of `llama_ftype` in llama.h.
_FILE_TYPES = {"F16": 1, "Q8_0": 7, "Q4_0": 2}


class Engine:
    """Computes with one model in one form, for a number of sequences."""

    def __init__(self, file: pathlib.Path, num_threads: int, max_batch: int, max_tokens: int) -> None:
        import llama_cpp  # type: ignore[import-not-found,unused-ignore]

        self._lib = llama_cpp
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {file}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = max_batch * max_tokens
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = max_batch
        params.n_threads = params.n_threads_batch = num_threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(512, 0, 1)

    def decode(self, batch: int, context: int, num_steps: int) -> list[float]:
        """Returns the seconds of each step of single tokens behind `context` tokens, with the choice of the tokens."""
        self._forget()
        for sequence in range(batch):
            self._prefill([5] * (context - 1), sequence)
        tokens, seconds = [5] * batch, []
        for step in range(num_steps + 1):
            started_s = time.perf_counter()
            entries = [(token, context - 1 + step, sequence, True) for sequence, token in enumerate(tokens)]
            self._run(entries)
            tokens = [self._best(index) for index in range(batch)]
            seconds.append(time.perf_counter() - started_s)
        # The first step belongs to the prompt.
        return seconds[1:]

    def first_token(self, prompt: list[int]) -> int:
        """Returns the likeliest token behind a prompt."""
        self._forget()
        self._prefill(prompt[:-1], 0)
        self._run([(prompt[-1], len(prompt) - 1, 0, True)])
        return self._best(0)

    def close(self) -> None:
        """Releases the memory of the model and its context."""
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)

    def _forget(self) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)

    def _prefill(self, tokens: list[int], sequence: int) -> None:
        for first in range(0, len(tokens), 512):
            part = tokens[first : first + 512]
            self._run([(token, first + index, sequence, False) for index, token in enumerate(part)])

    def _run(self, entries: list[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(entries)
        for index, (token, position, sequence, has_logits) in enumerate(entries):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = has_logits
        if self._lib.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")

    def _best(self, index: int) -> int:
        import numpy as np

        logits = self._lib.llama_get_logits_ith(self._context, index)
        array = np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self._vocab_size,))
        return int(array.argmax())


def write_gguf(folder: pathlib.Path, file: pathlib.Path) -> None:
    """Writes the language model of a LLaVA folder with a Llama: matrices in float16, norms in float32."""
    import gguf  # type: ignore[import-not-found,unused-ignore]
    import numpy as np

    text = json.loads((folder / "config.json").read_text("utf-8"))["text_config"]
    writer = gguf.GGUFWriter(file, "llama")
    num_heads, num_kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_block_count(text["num_hidden_layers"])
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    writer.add_rope_dimension_count(text["hidden_size"] // num_heads)
    writer.add_rope_freq_base(text["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(text["vocab_size"])
    writer.add_tokenizer_model("none")
    num_rotated = {"attn_q.weight": num_heads, "attn_k.weight": num_kv_heads}
    for name, weight in _weights(folder).items():
        if (found := _gguf_name(name)) is None:
            continue
        heads = num_rotated.get(".".join(found.split(".")[-2:]))
        own = weight if heads is None else _interleaved(weight, heads)
        writer.add_tensor(found, own.astype(np.float32 if weight.ndim == 1 else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _weights(folder: pathlib.Path) -> dict[str, Any]:
    """Returns all tensors in float32. NumPy has no bfloat16, of which each number is the upper half of a float32."""
    import numpy as np

    content = (folder / "model.safetensors").read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    found = {}
    for name, entry in json.loads(content[8 : 8 + header_bytes]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
        if entry["dtype"] == "BF16":
            halves = np.frombuffer(content[begin:end], np.uint16).astype(np.uint32) << 16
            found[name] = halves.view(np.float32).reshape(entry["shape"])
        else:
            found[name] = np.frombuffer(content[begin:end], np.float32).reshape(entry["shape"])
    return found


def _gguf_name(name: str) -> str | None:
    """Returns the name of a tensor of the language model; None for one of the vision half."""
    if _PREFIX not in name:
        return None
    own = name.split(_PREFIX, 1)[1].removeprefix("model.").removesuffix(".weight")
    if own in _OTHER_NAMES:
        return f"{_OTHER_NAMES[own]}.weight"
    _, layer, rest = own.split(".", 2)
    return f"blk.{layer}.{_LAYER_NAMES[rest]}.weight"


def _interleaved(weight: Any, num_heads: int) -> Any:
    """Returns the rows of a projection in llama.cpp's order: the two halves that a rotation pairs take turns."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def gguf_file(first: Mapping[str, Any], form: str) -> pathlib.Path:
    """Returns the model in a form, and writes it if it is not there."""
    import llama_cpp

    whole = pathlib.Path(first["files"]) / "F16.gguf"
    if not whole.exists():
        write_gguf(pathlib.Path(first["model"]), whole)
    file = whole.with_name(f"{form}.gguf")
    if not file.exists():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = _FILE_TYPES[form]
        if llama_cpp.llama_model_quantize(str(whole).encode(), str(file).encode(), params) != 0:
            raise RuntimeError(f"llama.cpp does not quantize to {form}")
    return file


def main() -> None:
    """Serves commands until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import llama_cpp

    first = json.loads(sys.stdin.readline())
    engines = {
        form: Engine(gguf_file(first, form), first["num_threads"], first["max_batch"], first["max_tokens"])
        for form in first["forms"]
    }
    print(json.dumps({"version": llama_cpp.__version__}), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        engine = engines[command["form"]]
        if "prompt" in command:
            answer: dict[str, Any] = {"token": engine.first_token(command["prompt"])}
        else:
            answer = {"steps_s": engine.decode(command["batch"], command["context"], command["steps"])}
        print(json.dumps(answer), file=answers)
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
