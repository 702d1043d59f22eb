"""A trace of one Generate with an image, across client, decoder, encoder and Redis, asserted span by span."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from lookonce import tracing
from lookonce.client import Client
from lookonce.local.local_stack import LocalStack
from tests.conftest import DEMO_MODEL, SERVICE_FLAGS
from tests.e2e.pictures import QUESTION, Picture, fresh
from tests.otlp_collector import SeenSpan, running_collector

GENERATE = "lookonce.decoder.v1.DecoderService/Generate"
INFO = "lookonce.encoder.v1.EncoderService/GetEncoderInfo"
ENCODE = "lookonce.encoder.v1.EncoderService/Encode"

CLIENT, DECODER, ENCODER = "asking", "lookonce-decoder", "lookonce-encoder"

# Service and name of each span, and the name of its parent. The order has no meaning.
FIRST_LOOK = [
    (CLIENT, "client.generate", None),
    (DECODER, GENERATE, "client.generate"),
    (DECODER, "generate.lookup", GENERATE),
    (DECODER, "generate.queue", GENERATE),
    (DECODER, "generate.fetch", GENERATE),
    (DECODER, "redis.read_rows", "generate.fetch"),
    (ENCODER, ENCODE, "generate.fetch"),
    # Before taking the lease, and while holding it.
    (ENCODER, "redis.stat", ENCODE),
    (ENCODER, "redis.stat", ENCODE),
    (ENCODER, "encode.decode_image", ENCODE),
    (ENCODER, "encode.preprocess", ENCODE),
    (ENCODER, "encode.forward", ENCODE),
    (ENCODER, "encode.store", ENCODE),
    (ENCODER, "redis.write", "encode.store"),
    # The lease is taken, released, and its end published.
    (ENCODER, "redis.lease", ENCODE),
    (ENCODER, "redis.lease", ENCODE),
    (ENCODER, "redis.lease", ENCODE),
    (DECODER, "redis.read_rows", "generate.fetch"),
    (DECODER, "generate.prefill", GENERATE),
    (DECODER, "generate.decode", GENERATE),
]
SECOND_LOOK = [
    (CLIENT, "client.generate", None),
    (DECODER, GENERATE, "client.generate"),
    (DECODER, "generate.lookup", GENERATE),
    (DECODER, "generate.queue", GENERATE),
    (DECODER, "generate.prefill", GENERATE),
    (DECODER, "generate.decode", GENERATE),
]

# All attributes that a span may have.
ATTRIBUTES = {
    "rpc.system.name",
    "rpc.method",
    "rpc.response.status_code",
    "db.system.name",
    "db.operation.name",
    *(
        f"lookonce.{name}"
        for name in (
            "request_id num_images num_rows num_image_rows num_bytes tier source outcome width height "
            "prompt_tokens cached_prompt_tokens image_tokens completion_tokens"
        ).split()
    ),
}


@dataclass(frozen=True)
class Traced:
    """The spans and log lines of two questions about one picture."""

    picture: Picture
    # The spans of each question, in order.
    spans: tuple[list[SeenSpan], list[SeenSpan]]
    # The access lines of each service.
    lines: dict[str, list[dict[str, str]]]


@pytest.fixture(scope="module")
def traced() -> Traced:
    """Asks both questions, stops all services, and returns their spans and log lines."""
    (picture,) = fresh(1)
    with pytest.MonkeyPatch.context() as patch, running_collector() as collector:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.target)
        with LocalStack(DEMO_MODEL, encoder_arguments=SERVICE_FLAGS, decoder_arguments=SERVICE_FLAGS) as stack:
            tracing.start(CLIENT, ["otlp_proto_grpc"])
            try:
                with Client.connect(stack.decoder_targets[0]) as client:
                    for _ in range(2):
                        assert client.generate(QUESTION, images=[picture.data], max_tokens=16).text == picture.answer
            finally:
                tracing.stop()
            lines = {DECODER: _access_lines(stack, DECODER), ENCODER: _access_lines(stack, ENCODER)}
        first, second = (
            [span for span in collector.spans if span.trace_id == root.trace_id]
            for root in collector.named("client.generate")
        )
        others = [span for span in collector.spans if span not in first and span not in second]
        assert {span.name for span in others} == {INFO}, "the decoder's search for an encoder at its start"
        return Traced(picture, (first, second), lines)


def _access_lines(stack: LocalStack, service: str) -> list[dict[str, str]]:
    (process,) = stack.decoders if service == DECODER else stack.encoders
    lines = [json.loads(line) for line in process.log_path.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == "rpc"]


def _edges(spans: Sequence[SeenSpan]) -> list[tuple[str, str, str | None]]:
    names = {span.span_id: span.name for span in spans}
    return [(span.service, span.name, names[span.parent_id] if span.parent_id else None) for span in spans]


def test_the_first_look_is_one_trace_of_exactly_these_spans(traced: Traced) -> None:
    assert sorted(map(str, _edges(traced.spans[0]))) == sorted(map(str, FIRST_LOOK))


def test_the_second_look_asks_neither_the_encoder_nor_redis(traced: Traced) -> None:
    assert sorted(map(str, _edges(traced.spans[1]))) == sorted(map(str, SECOND_LOOK))


def test_the_parts_of_a_generation_do_not_overlap(traced: Traced) -> None:
    for spans in traced.spans:
        took_ns = {span.name: span.ended_ns - span.started_ns for span in spans}
        parts_ns = [took_ns[f"generate.{name}"] for name in ("lookup", "queue", "prefill", "decode")]
        assert min(parts_ns) > 0
        # A millisecond of tolerance: the times come from two clocks.
        assert sum(parts_ns) <= took_ns[GENERATE] + 1_000_000


def test_attributes_tell_sizes_and_outcomes(traced: Traced) -> None:
    parts = {span.name: span.attributes for span in traced.spans[0]}
    num_rows = parts["generate.fetch"]["lookonce.num_rows"]
    assert parts["encode.forward"]["lookonce.num_rows"] == num_rows > 0
    assert parts["generate.fetch"]["lookonce.source"] == "encoded"
    assert parts["encode.decode_image"]["lookonce.num_bytes"] == len(traced.picture.data)
    assert parts["encode.store"]["lookonce.outcome"] == "stored"
    assert parts["redis.write"]["lookonce.num_bytes"] > parts["encode.store"]["lookonce.num_bytes"]
    reads = [span.attributes["lookonce.outcome"] for span in traced.spans[0] if span.name == "redis.read_rows"]
    assert reads == ["absent", "ok"]
    later = {span.name: span.attributes for span in traced.spans[1]}
    assert later["generate.prefill"]["lookonce.cached_prompt_tokens"] > 0


def test_no_span_contains_the_question_the_answer_or_the_digest(traced: Traced) -> None:
    digest = hashlib.sha256(traced.picture.data).hexdigest()
    words = [word for word in (*QUESTION.split(), *traced.picture.answer.split()) if len(word) > 3]
    assert len(words) > 2
    for span in (span for group in traced.spans for span in group):
        assert set(span.attributes) <= ATTRIBUTES, span.name
        assert all(len(str(value)) <= 64 for value in span.attributes.values()), span.name
        assert digest[:16] not in span.text
        for word in words:
            # Whole words only: "star" is part of the field name start_time_unix_nano.
            assert re.search(rf"\b{re.escape(word)}\b", span.text) is None


def test_access_lines_of_all_services_name_the_trace(traced: Traced) -> None:
    roots = [spans[0] for spans in traced.spans]
    generates = [line for line in traced.lines[DECODER] if line["method"] == f"/{GENERATE}"]
    assert [line["trace_id"] for line in generates] == [root.trace_id for root in roots]
    encodes = [line for line in traced.lines[ENCODER] if line["method"] == f"/{ENCODE}"]
    assert [(line["trace_id"], line["request_id"]) for line in encodes] == [
        (roots[0].trace_id, generates[0]["request_id"])
    ]


def test_services_that_export_no_traces_import_only_the_api_of_opentelemetry(stack: LocalStack) -> None:
    """The modules that a process imports are in its log. redis-py imports some of OpenTelemetry by itself."""
    program = (
        "import sys, redis, redis.asyncio, lookonce.tracing; "
        "print(*(name for name in sys.modules if name.startswith('opentel')))"
    )
    expected = set(
        subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout.split()
    )
    assert not {name for name in expected if name.startswith(("opentelemetry.sdk.trace", "opentelemetry.exporter"))}
    for process in (*stack.encoders, *stack.decoders):
        imported = [
            line.rpartition("|")[2].strip()
            for line in process.log_path.read_text().splitlines()
            if line.startswith("import time:")
        ]
        assert "lookonce.tracing" in imported
        assert {name for name in imported if name.startswith("opentelemetry")} <= expected
