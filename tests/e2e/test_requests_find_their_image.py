"""With two decoders behind one client, a second question about a picture meets its keys and values."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import pytest

from benchmarks.workloads import picture
from lookonce import Client
from lookonce.generation import Generation
from lookonce.sdk.routing import replicas
from tests.conftest import DEMO_MODEL, SERVICE_FLAGS
from tests.in_process_stack import InProcessStack

NUM_PICTURES = 6


@pytest.fixture(scope="module")
def stack() -> Iterator[InProcessStack]:
    with InProcessStack(
        DEMO_MODEL, num_decoders=2, encoder_arguments=SERVICE_FLAGS, decoder_arguments=SERVICE_FLAGS
    ) as one:
        yield one


def asked(client: Client, file: bytes, question: str) -> Generation:
    return client.generate(question, images=[file], max_tokens=2)


def test_later_questions_skip_the_picture_at_the_decoder_that_has_it(
    stack: InProcessStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine a client needs longer to connect than it waits in earnest.
    monkeypatch.setattr(replicas, "_OPENING_S", 30.0)
    files = [picture(random.Random(number)) for number in range(NUM_PICTURES)]
    with contextlib.ExitStack() as exits:
        client = exits.enter_context(Client.connect(stack.decoder_targets, timeout_s=60))
        first = [asked(client, file, "What is it?") for file in files]
        later = [asked(client, file, question) for file in files for question in ("Where is it?", "Which colour?")]
        assert all(one.usage.encoded_image_tokens > 0 for one in first)
        assert all(one.usage.skipped_image_tokens > 0 and one.usage.encoded_image_tokens == 0 for one in later)
        reports = client._connection._replicas._placement._reports
        # An answer tells the load. Its own request may still be in it.
        assert set(reports) <= set(stack.decoder_targets)
        assert {report.num_others for report in reports.values()} <= {0, 1}
        assert reports
        alone = [exits.enter_context(Client.connect(target, timeout_s=60)) for target in stack.decoder_targets]
        for file in files:
            skipped = [asked(one, file, "How many?").usage.skipped_image_tokens > 0 for one in alone]
            assert sum(skipped) == 1, "the other decoder has never seen it"
