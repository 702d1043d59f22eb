"""Writes the figures of `benchmarks.gpu` as a section of RESULTS.md."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import report


def section(figures: Mapping[str, Any]) -> str:
    """Returns the Markdown of all figures that are there."""
    parts = [
        "## gpu\n\nIs the CUDA path right, and how near to the device's limits is it? "
        f"{figures['device']}, PyTorch {figures['torch']}, bfloat16. 2b and 7b are a Qwen2.5-VL with the language "
        "models of Qwen2-VL-2B and Qwen2.5-VL-7B and random weights. Stages were run at several times, on machines of "
        "the same kind. Steps are launched ahead as in the engine. Contexts are taken from the cache. Sampled: "
        "temperature, top-p, top-k and a repetition penalty."
    ]
    for rows, write in (
        ("checks", _checks), ("decode", _decode), ("mixed", _mixed), ("prefill", _prefill),
        ("products", _products), ("recurrent", _recurrent), ("latents", _latents),
        ("attention_s", _attention), ("encoder", _encoder), ("service", _service), ("peer", _peer),
    ):  # fmt: skip
        if figures.get(rows):
            parts += write(figures[rows])
    if figures.get("vllm"):
        parts += _vllm(figures["vllm"], figures.get("service", ()))
    return "\n\n".join(parts)


_Rows = Sequence[Mapping[str, Any]]


def _checks(rows: _Rows) -> list[str]:
    table = [[row["name"], "passed" if row["passed"] else "**failed**", row["found"]] for row in rows]
    return [report.table(["check", "", "found"], table)]


def _decode(rows: _Rows) -> list[str]:
    def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return row["model"], row["context"], row["batch"], row["sampling"]

    eager = {key(row): row for row in rows if not row["has_graphs"]}
    table = []
    for row in rows:
        if row["has_graphs"]:
            without = eager.get(key(row))
            table.append(
                [
                    row["model"], str(row["context"]), str(row["batch"]), row["sampling"], _step(row),
                    "" if without is None else f"{without['step_s'] / row['step_s']:.2f} ×",
                    f"{100 * row['memory_limit_s'] / row['step_s']:.0f} %",
                ]
            )  # fmt: skip
    head = ["model", "context", "batch", "", "step (10–90 %)", "without graphs", "of the memory's speed"]
    return ["Steps of single tokens:", report.table(head, table)]


def _mixed(rows: _Rows) -> list[str]:
    table = [
        [
            row["model"], str(row["context"]), str(row["batch"]), str(row["chunk_tokens"]),
            "with" if row["has_graphs"] else "without", _step(row),
        ]
        for row in rows
    ]  # fmt: skip
    head = ["model", "context", "decoding", "tokens of a new request", "graphs", "step (10–90 %)"]
    return ["Steps in which requests decode and a new one brings its prompt:", report.table(head, table)]


def _prefill(rows: _Rows) -> list[str]:
    table = [
        [
            row["model"], str(row["batch"]), str(row["prompt_tokens"]), f"{1000 * row['prefill_s']:.1f} ms",
            f"{100 * row['matrix_limit_s'] / row['prefill_s']:.0f} %",
        ]
        for row in rows
    ]  # fmt: skip
    return ["Prompts:", report.table(["model", "prompts", "tokens", "step", "of the matrix peak"], table)]


def _products(rows: _Rows) -> list[str]:
    table = [
        [
            row["layer"], row["form"], row["rows"], f"{1e6 * row['codes_s']:.0f}", f"{1e6 * row['whole_s']:.0f}",
            f"{row['whole_s'] / row['codes_s']:.2f}",
        ]
        for row in rows
    ]  # fmt: skip
    head = ["outputs × inputs", "codes", "rows", "codes, µs", "whole, µs", "whole ÷ codes"]
    return ["One product with a quantized weight, and with the whole one in bfloat16:", report.table(head, table)]


def _recurrent(rows: _Rows) -> list[str]:
    table = [
        [
            row["layer"], str(row["sequences"]), str(row["tokens"]), f"{1e6 * row['kernels_s']:.0f}",
            f"{1e6 * row['operators_s']:.0f}", f"{row['operators_s'] / row['kernels_s']:.2f}",
        ]
        for row in rows
    ]  # fmt: skip
    head = ["layer", "sequences", "tokens of each", "kernels, µs", "operators, µs", "operators ÷ kernels"]
    return ["One recurrent layer with 1,024 hidden elements, with kernels and without:", report.table(head, table)]


def _latents(rows: _Rows) -> list[str]:
    seconds = {(row["model"], row["step"], row["backend"]): row["attention_s"] for row in rows}
    steps = dict.fromkeys((model, step) for model, step, _ in seconds)
    backends = [*dict.fromkeys(backend for *_, backend in seconds)]
    table = [[*step, *(f"{1e6 * seconds[(*step, backend)]:.0f}" for backend in backends)] for step in steps]
    head = ["heads of", "step", *backends]
    return ["Attention of one layer over latents, µs by backend:", report.table(head, table)]


def _attention(rows: _Rows) -> list[str]:
    table = [
        [name, *(f"{1e6 * each:.0f}" for each in of_trial.values())] for row in rows for name, of_trial in row.items()
    ]
    head = ["step", *next(iter(rows[0].values()))]
    return ["Attention of one layer of an 8B model (32 heads on 8 of 128), µs by backend:", report.table(head, table)]


def _encoder(rows: _Rows) -> list[str]:
    table = [
        [row["model"], f"{row['side']} × {row['side']}", row["batch"], f"{row['images_per_s']:.1f}"] for row in rows
    ]
    head = ["model", "pixels", "images at once", "images per second"]
    return ["The encoder's forward pass, from prepared pixels to rows in main memory:", report.table(head, table)]


def _service(rows: _Rows) -> list[str]:
    table = [
        [
            row["model"], str(row["callers"]), "known" if row["reuse"] else "new",
            f"{row['completion_tokens_per_s']:.0f}", f"{1000 * row['first_text_s']['p50']:.0f} ms",
            f"{1000 * row['first_text_s']['p99']:.0f} ms", str(row["num_failed"]),
            ", ".join(f"{name} {used:.0f}" for name, used in row.get("processor_us", {}).items()),
        ]
        for row in rows
        if "callers" in row
    ]  # fmt: skip
    starts = ", ".join(f"{row['start_s']:.0f} s for {row['model']}" for row in rows if "start_s" in row)
    head = [
        "model",
        "callers",
        "pictures",
        "tokens per second",
        "first text, median",
        "99 %",
        "failed",
        "processor time per token, µs",
    ]
    text = (
        "The whole system on one device, a picture of 448 × 448 in each request. "
        f"From the first process until it answers: {starts}."
    )
    return [text, report.table(head, table)]


def _peer(rows: _Rows) -> list[str]:
    table = []
    for row in rows:
        theirs = row["transformers_s"]
        told = theirs if isinstance(theirs, str) else f"{theirs / row['ours_s']:.2f}"
        table.append([row["model"], str(row["batch"]), f"{1000 * row['ours_s']:.0f} ms", told])
    one = rows[0]
    text = (
        f"Prompts of {one['prompt']} tokens and {one['tokens']} tokens each, beside transformers' continuous batching:"
    )
    return [text, report.table(["model", "batch", "ours", "transformers ÷ ours"], table)]


def _vllm(rows: _Rows, service: _Rows) -> list[str]:
    def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return row["model"], row["callers"], row["reuse"]

    ours = {key(row): row["completion_tokens_per_s"] for row in service if "callers" in row}
    pictures = [
        [
            row["model"], str(row["callers"]), "known" if row["reuse"] else "new",
            f"{row['completion_tokens_per_s']:.0f}",
            f"{ours[key(row)] / row['completion_tokens_per_s']:.2f}" if key(row) in ours else "",
        ]
        for row in rows
        if "callers" in row
    ]  # fmt: skip
    steps = []
    for row in rows:
        if "batch" in row:
            ratios = [theirs / own for own, theirs in zip(row["ours_s"], row["theirs_s"], strict=True)]
            middle = [f"{1000 * statistics.median(row[name]):.2f} ms" for name in ("ours_s", "theirs_s")]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
            steps.append([row["model"], str(row["context"]), str(row["batch"]), *middle, spread])
    started = next(row for row in rows if "version" in row)
    return [
        f"vLLM {started['version']} on the same device, without HTTP, asked the same about pictures; it is ready after "
        f"{started['start_s']:.0f} s:",
        report.table(["model", "callers", "pictures", "vLLM, tokens per second", "ours ÷ vLLM"], pictures),
        "Time between tokens of requests without pictures, both engines in turns:",
        report.table(["model", "context", "batch", "ours", "vLLM", "vLLM ÷ ours"], steps),
    ]


def _step(row: Mapping[str, Any]) -> str:
    return f"{1000 * row['step_s']:.2f} ms ({1000 * row['low_s']:.2f}–{1000 * row['high_s']:.2f})"
