"""The stand-in for the services behaves to clients as they do, in what it offers."""

from __future__ import annotations

import math
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable

import grpc
import pytest

import lookonce
from lookonce.errors import (
    EmbeddingNotCachedError,
    InvalidParameterError,
    OverloadedError,
    UnavailableError,
    UnsupportedError,
)
from lookonce.generation import Message, TextPrompt, TokenPrompt
from lookonce.images import ImageRef
from lookonce.testing import FakeRequest, FakeServer
from lookonce.videos import Video

DOCUMENT = pathlib.Path(__file__).parents[3] / "docs/sdk.md"
LARGE, SMALL = b"x" * 100_000, b"y" * 100


def test_the_documented_example_runs() -> None:
    found = re.search(r"test_fake_server.py -->\n```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert found is not None
    exec(compile(found[1], str(DOCUMENT), "exec"), {})


def test_an_answer_is_a_text_or_what_a_function_returns_or_raises() -> None:
    def answer(request: FakeRequest) -> str:
        if "bad" in request.text:
            raise OverloadedError("too bad", retry_after_s=99.0)
        return f"{request.text} {len(request.images)} {request.options['temperature']} {request.options['stop']}"

    with FakeServer(answer) as server, lookonce.Client.connect(server.target) as client:
        options = {"temperature": 0.3, "stop": ["x"], "seed": 7, "logit_bias": {5: 1.5}, "max_tokens": 9}
        generation = client.generate("good", [SMALL], request_id="mine", **options)  # type: ignore[arg-type]
        assert generation.text == "good 1 0.3 ['x']"
        assert generation.request_id == server.requests[0].request_id == "mine"
        assert server.requests[0].options == options
        with pytest.raises(OverloadedError) as caught:
            client.generate("bad")
        assert (caught.value.retry_after_s, caught.value.reason) == (99.0, "OVERLOADED")
        assert [request.text for request in server.requests] == ["good", "bad"]


@pytest.mark.parametrize("text", ["", "one", "one two  three", " padded "])
async def test_a_stream_has_the_text_in_pieces(text: str) -> None:
    with FakeServer(text) as server:
        async with lookonce.AsyncClient.connect(server.target) as client:
            stream = client.stream("what", [SMALL])
            assert "".join([piece async for piece in stream]) == text
            assert stream.generation.text == text
            usage = stream.usage
        assert (usage.image_tokens, usage.encoded_image_tokens, usage.completion_tokens) == (16, 16, len(text.split()))


def test_an_image_is_uploaded_once_and_again_after_it_was_forgotten() -> None:
    with FakeServer(rows_per_image=5) as server, lookonce.Client.connect(server.target) as client:
        image = ImageRef.from_bytes(LARGE)
        first = client.generate("what", [image]).usage
        again = client.generate("what", [ImageRef.from_digest(image.digest), SMALL]).usage
        assert (first.encoded_image_tokens, first.cached_image_tokens) == (5, 0)
        assert (again.encoded_image_tokens, again.cached_image_tokens) == (5, 5)
        assert [len(upload.data or b"") for upload in server.images.uploads] == [len(LARGE), len(SMALL)]
        server.images.forget()
        with pytest.raises(EmbeddingNotCachedError) as caught:
            client.generate("what", [SMALL, ImageRef.from_digest(image.digest)])
        assert caught.value.indexes == (1,)
        client.generate("what", [image])
        assert len(server.images.uploads) == 4


def test_encode_and_lookup() -> None:
    with FakeServer() as server, lookonce.Client.connect(server.target) as client:
        assert client.lookup([LARGE, SMALL]) == [False, False]
        (encoded,) = client.encode([LARGE])
        assert encoded.encoding is not None
        assert (encoded.encoding.source, encoded.encoding.num_rows) == ("computed", 16)
        assert client.lookup([LARGE, SMALL]) == [True, False]
        with pytest.raises(EmbeddingNotCachedError):
            client.encode([ImageRef.from_digest("0" * 64)])


def test_failures_come_in_turn() -> None:
    with FakeServer() as server, lookonce.Client.connect(server.target, max_retries=0) as client:
        server.fail(UnavailableError("gone"), OverloadedError("full"))
        for kind in (UnavailableError, OverloadedError):
            with pytest.raises(kind):
                client.generate("what")
        assert client.generate("what").text == "an answer"


@pytest.mark.parametrize(
    ("prompt", "options"),
    [("what", {"json_schema": "{}"}), ([Message("user", [Video.from_frames([SMALL, SMALL]), "what"])], {})],
)
def test_what_it_does_not_offer_is_said(prompt: object, options: dict[str, str]) -> None:
    with FakeServer() as server, lookonce.Client.connect(server.target) as client:
        with pytest.raises(UnsupportedError, match="FakeServer"):
            client.generate(prompt, **options)  # type: ignore[arg-type]
        with pytest.raises(UnsupportedError, match="FakeServer"):
            client.tokenize("what")
        with pytest.raises(UnsupportedError, match="FakeServer"):
            client.detokenize([1])


def test_chats_and_prompts_as_text_are_requests_with_a_text_and_images() -> None:
    with FakeServer() as server, lookonce.Client.connect(server.target, token="secret") as client:
        client.generate([Message("system", "be short"), Message("user", [SMALL, "what", LARGE])])
        client.generate(TextPrompt("<image> what", [SMALL]))
        chat, text = server.requests[-2:]
        assert (chat.text, text.text) == ("be short\nwhat", "<image> what")
        assert [len(one.images) for one in (chat, text)] == [2, 1]
        assert chat.metadata["authorization"] == "Bearer secret"
        assert "secret" not in repr(chat)


def test_a_server_that_has_not_started_says_so_and_an_ended_one_is_gone() -> None:
    server = FakeServer()
    with pytest.raises(RuntimeError, match="does not run"):
        _ = server.target
    server.close()
    with server:
        target = server.target
    with lookonce.Client.connect(target, timeout_s=10) as client, pytest.raises(UnavailableError):
        client.generate("what")


def test_it_starts_once_and_again_after_its_end() -> None:
    server = FakeServer()
    with server, pytest.raises(RuntimeError, match="runs already"):
        server.start()
    with pytest.raises(RuntimeError, match="does not run"):
        _ = server.target
    with server, lookonce.Client.connect(server.target) as client:
        assert client.generate("what").text == "an answer"


def test_a_failure_is_an_error_of_the_sdk() -> None:
    with pytest.raises(TypeError, match=r"an error of lookonce\.errors"):
        FakeServer().fail(ValueError("full"))  # type: ignore[arg-type]


def test_health_is_served_and_ends_with_the_server() -> None:
    with FakeServer() as server, grpc.insecure_channel(server.target) as channel:
        watch: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/grpc.health.v1.Health/Watch")
        stream = watch(b"", timeout=60)
        assert next(stream) == b"\x08\x01"
        server.close()
        with pytest.raises((grpc.RpcError, StopIteration)):
            next(stream)


def test_a_refused_request_makes_no_image_known() -> None:
    with FakeServer() as server, lookonce.Client.connect(server.target) as client:
        with pytest.raises(EmbeddingNotCachedError):
            client.generate("what", [SMALL, ImageRef.from_digest("0" * 64)])
        assert client.lookup([SMALL]) == [False]


def test_it_needs_none_of_the_services_packages() -> None:
    code = (
        "import sys, lookonce.testing; "
        "sys.exit(bool({'torch', 'transformers', 'numpy', 'PIL', 'redis', 'lookonce.server'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_several_answers_are_asked_of_the_function_one_by_one() -> None:
    texts = iter(["one", "two words", "three"])
    with FakeServer(lambda request: next(texts)) as server, lookonce.Client.connect(server.target) as client:
        generation = client.generate("which", n=3)
    assert (generation.text, [other.text for other in generation.others]) == ("one", ["two words", "three"])
    assert generation.usage.completion_tokens == 4
    assert len(server.requests) == 1


def test_embeddings_are_equal_for_equal_prompts_only() -> None:
    with FakeServer(adapters=["forms"]) as server, lookonce.Client.connect(server.target) as client:
        first, again = (client.embed("a", [SMALL]).embedding for _ in range(2))
        others = [client.embed("b", [SMALL]), client.embed("a"), client.embed("a", [SMALL], adapter="forms")]
        long = client.embed("a", [SMALL], normalize=False).embedding
        assert first == again
        assert len({first, *(other.embedding for other in others)}) == 4
        assert math.hypot(*first) == pytest.approx(1.0)
        assert math.hypot(*long) > 1.01
        assert client.embed("a", [SMALL]).usage.encoded_image_tokens == 0
        assert {request.method for request in server.requests} == {"embed"}


async def test_embeddings_are_what_the_test_says() -> None:
    def embedding(request: FakeRequest) -> list[float]:
        if "bad" in request.text:
            raise OverloadedError("too bad", retry_after_s=99.0)
        return [3.0, 4.0]

    with FakeServer(embedding=embedding) as server:
        async with lookonce.AsyncClient.connect(server.target) as client:
            assert (await client.embed("a")).embedding == pytest.approx((0.6, 0.8))
            assert (await client.embed("a", normalize=False)).embedding == (3.0, 4.0)
            with pytest.raises(OverloadedError):
                await client.embed("bad")


def test_an_embedding_of_zeros_has_no_length() -> None:
    with FakeServer(embedding=[0.0]) as server, lookonce.Client.connect(server.target) as client:
        assert client.embed("a").embedding == (0.0,)


async def test_scores_are_what_the_test_says() -> None:
    def likelihood(request: FakeRequest, continuation: str | tuple[int, ...]) -> float:
        return {"a red": -0.5, (7, 8, 9): -6.0}[continuation] - len(request.images)

    with FakeServer(likelihood=likelihood) as server:
        async with lookonce.AsyncClient.connect(server.target) as client:
            scoring = await client.score("what", [[7, 8, 9], "a red"], [SMALL], logprobs=0)
    ids, text = scoring.scores
    assert [(one.logprob, one.is_greedy, one.token_ids) for one in scoring.scores] == [
        (-7.0, False, (7, 8, 9)),
        (-1.5, True, (0, 1)),
    ]
    assert sum(ids.token_logprobs) == pytest.approx(-7.0)
    assert text.logprobs == (((0, -0.75),), ((1, -0.75),))
    assert (scoring.usage.completion_tokens, scoring.usage.image_tokens) == (5, 16)
    (request,) = server.requests
    assert (request.method, request.continuations) == ("score", ((7, 8, 9), "a red"))


def test_longer_continuations_are_less_likely_unless_the_test_says_otherwise() -> None:
    with FakeServer() as server, lookonce.Client.connect(server.target) as client:
        assert [one.logprob for one in client.score("what", ["yes", "oh no"]).scores] == [-1.0, -2.0]
        server.fail(OverloadedError("full", retry_after_s=0.01))
        assert client.score("what", ["yes"]).scores[0].logprobs == ()
        for continuations in ([], [""]):
            with pytest.raises(InvalidParameterError, match="continuations"):
                client.score("what", continuations)
        with pytest.raises(UnsupportedError, match="FakeServer"):
            client.score(TokenPrompt([1]), ["yes"])


def test_adapters_are_served_while_they_are_loaded() -> None:
    with (
        FakeServer(lambda request: request.adapter or "base", adapters=["forms"]) as server,
        lookonce.Client.connect(server.target) as client,
        lookonce.AdminClient.connect(server.target) as admin,
    ):
        assert [client.generate("what", adapter=name).text for name in (None, "forms")] == ["base", "forms"]
        assert "".join(client.stream("what", adapter="forms")) == "forms"
        calls: list[Callable[[], object]] = [
            lambda: client.generate("what", adapter="bills"),
            lambda: client.score("what", ["yes"], adapter="bills"),
            lambda: client.embed("what", adapter="bills"),
        ]
        for call in calls:
            with pytest.raises(InvalidParameterError, match="'bills' is not served; this server has forms") as caught:
                call()
            assert caught.value.field == "adapter"
        assert admin.load_adapter("bills") == server.adapters == ["bills", "forms"]
        assert client.generate("what", adapter="bills").text == "bills"
        assert admin.unload_adapter("forms") == ["bills"]
        assert client.model_info(fresh=True).adapters == ("bills",)
        changes: list[Callable[[], object]] = [lambda: admin.unload_adapter("forms"), lambda: admin.load_adapter("")]
        for change in changes:
            with pytest.raises(InvalidParameterError) as caught:
                change()
            assert caught.value.field == "name"
