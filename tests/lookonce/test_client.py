"""Both clients against real servers on loopback; every test runs once per client."""

from __future__ import annotations

import asyncio
import pathlib
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

import lookonce
from lookonce import errors
from lookonce.decoder.v1 import decoder_service_pb2 as decoder_pb2
from lookonce.generation import Generation, Message, TextPrompt
from lookonce.images import ImageRef
from lookonce.sdk.messages import SMALL_IMAGE_BYTES
from lookonce.server.settings import MIB
from tests.lookonce.sdk.sdk_servers import NUM_ROWS, System, running_system, stream_of

LARGE = SMALL_IMAGE_BYTES + 1


def large_image(seed: int) -> bytes:
    return bytes([seed]) * LARGE


class SyncDriver:
    """Calls `lookonce.Client`, each method in a thread so that the servers' event loop keeps running."""

    def __init__(self, system: System, **options: Any) -> None:
        self.client = lookonce.Client.connect(system.decoder_target, **options)

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        return await asyncio.to_thread(getattr(self.client, method), *arguments, **options)

    async def stream(self, *arguments: Any, **options: Any) -> tuple[list[str], Generation]:
        def read() -> tuple[list[str], Generation]:
            with self.client.stream(*arguments, **options) as stream:
                return list(stream), stream.generation

        return await asyncio.to_thread(read)

    async def read_one_and_leave(self, *arguments: Any) -> str:
        def read() -> str:
            with self.client.stream(*arguments) as stream:
                return next(stream)

        return await asyncio.to_thread(read)

    async def close(self) -> None:
        self.client.close()


class AsyncDriver:
    """Calls `lookonce.AsyncClient` in the test's event loop."""

    def __init__(self, system: System, **options: Any) -> None:
        self.client = lookonce.AsyncClient.connect(system.decoder_target, **options)

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        return await getattr(self.client, method)(*arguments, **options)

    async def stream(self, *arguments: Any, **options: Any) -> tuple[list[str], Generation]:
        async with self.client.stream(*arguments, **options) as stream:
            return [piece async for piece in stream], stream.generation

    async def read_one_and_leave(self, *arguments: Any) -> str:
        async with self.client.stream(*arguments) as stream:
            return await anext(stream)

    async def close(self) -> None:
        await self.client.aclose()


@pytest.fixture
async def system() -> AsyncIterator[System]:
    async with running_system() as started:
        yield started


@pytest.fixture(params=[SyncDriver, AsyncDriver], ids=["sync", "async"])
async def driver(request: pytest.FixtureRequest, system: System) -> AsyncIterator[Any]:
    made = request.param(system)
    yield made
    await made.close()


async def test_an_answer_has_its_text_and_usage(driver: Any) -> None:
    answer = await driver.call("generate", "one two three")
    assert answer.text == "one two three +0"
    assert answer.token_ids == (0, 1, 2, 3)
    assert answer.finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.time_to_first_token_s) == (3, 0.25)


async def test_only_the_given_options_are_sent(driver: Any, system: System) -> None:
    await driver.call("generate", "hello", temperature=0.0, stop="END", logit_bias={7: -1.5}, request_id="turn-1")
    sampling = system.decoder.last.sampling
    assert sampling.HasField("temperature")
    assert not sampling.HasField("top_p")
    assert list(sampling.stop) == ["END"]
    assert dict(sampling.logit_bias) == {7: -1.5}
    assert system.decoder.last.request_id == "turn-1"
    assert system.knowledge.calls[-1][1] == "turn-1"


async def test_values_that_no_server_could_take_are_refused_before_sending(driver: Any, system: System) -> None:
    with pytest.raises(errors.InvalidParameterError, match="max_tokens"):
        await driver.call("generate", "hello", max_tokens=-1)
    with pytest.raises(TypeError, match="temprature"):
        await driver.call("generate", "hello", temprature=1.0)
    assert system.knowledge.calls == []


async def test_messages_keep_roles_and_the_order_of_parts(driver: Any, system: System) -> None:
    messages = [
        Message("system", "be brief"),
        Message("user", ["before", ImageRef.from_bytes(b"tiny"), "after"]),
    ]
    answer = await driver.call("generate", messages)
    assert answer.text == "be brief before after +1"
    first, second = system.decoder.last.chat.messages
    assert (first.role, second.role) == (decoder_pb2.ROLE_SYSTEM, decoder_pb2.ROLE_USER)
    assert [part.WhichOneof("part") for part in second.parts] == ["text", "image", "text"]
    with pytest.raises(errors.InvalidParameterError, match="images"):
        await driver.call("generate", messages, images=[b"tiny"])


async def test_a_small_image_is_sent_as_bytes_at_once(driver: Any, system: System, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(b"x" * SMALL_IMAGE_BYTES)
    answer = await driver.call("generate", "what", images=[file, str(file), b"tiny"])
    assert answer.text == "what +3"
    assert system.knowledge.count("Generate") == 1


async def test_a_large_image_is_sent_as_bytes_only_if_the_server_lacks_it(driver: Any, system: System) -> None:
    for expected_uploads in ([LARGE], [LARGE]):
        answer = await driver.call("generate", "what", images=[large_image(1)])
        assert answer.text == "what +1"
        assert system.knowledge.uploads == expected_uploads
    assert system.knowledge.count("Generate") == 3


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_evicted_image_is_uploaded_again_once_and_alone(driver: Any, system: System, streamed: bool) -> None:
    kept, vanished = ImageRef.from_bytes(large_image(1)), ImageRef.from_bytes(large_image(2))
    system.knowledge.cached = {(bytes(kept.digest), 0, False)}
    if streamed:
        _, answer = await driver.stream("compare", images=[kept, vanished])
    else:
        answer = await driver.call("generate", "compare", images=[kept, vanished])
    assert answer.text == "compare +2"
    assert system.knowledge.uploads == [LARGE]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_digest_without_bytes_that_is_unknown_is_a_typed_error(
    driver: Any, system: System, streamed: bool
) -> None:
    ref = ImageRef.from_digest("ab" * 32)
    call = driver.stream("what", images=[ref]) if streamed else driver.call("generate", "what", images=[ref])
    with pytest.raises(errors.EmbeddingNotCachedError) as caught:
        await call
    assert caught.value.indexes == (0,)
    assert system.knowledge.uploads == []


async def test_images_too_large_for_one_message_go_to_the_encoder_first(driver: Any, system: System) -> None:
    system.decoder.max_message_bytes = LARGE
    answer = await driver.call("generate", "what", images=[large_image(1), large_image(2)])
    assert answer.text == "what +2"
    assert system.encoder.batch_sizes == [2]
    assert system.knowledge.uploads == [LARGE, LARGE]


@pytest.mark.parametrize("num_images", [1, 2])
async def test_images_encoded_ahead_get_the_encoding_of_their_prompt(
    driver: Any, system: System, num_images: int
) -> None:
    system.decoder.max_message_bytes = LARGE
    system.knowledge.tells_apart = True
    images = [large_image(10 * num_images + number) for number in range(num_images)]
    answer = await driver.call("generate", "what", images=images)
    assert answer.text == f"what +{num_images}"
    assert system.knowledge.uploads == [LARGE] * num_images
    assert {is_beside for _, _, is_beside in system.knowledge.cached} == {num_images > 1}


async def test_a_stream_yields_pieces_then_the_whole(driver: Any) -> None:
    pieces, answer = await driver.stream("one two", images=[b"tiny"])
    assert pieces == ["one", " two", " +1"]
    assert answer.text == "one two +1"
    assert answer.usage.image_tokens == NUM_ROWS
    assert answer.finish_reason == "stop"


async def test_a_stream_that_has_shown_text_is_not_restarted(driver: Any, system: System) -> None:
    system.decoder.error_after_first_word = errors.EmbeddingNotCachedError("evicted", indexes=[0])
    with pytest.raises(errors.EmbeddingNotCachedError):
        await driver.stream("one two", images=[b"tiny"])
    assert system.knowledge.count("GenerateStream") == 1


async def test_other_errors_are_not_retried(driver: Any, system: System) -> None:
    system.decoder.error_after_first_word = errors.UnavailableError("gone")
    with pytest.raises(errors.UnavailableError, match="gone"):
        await driver.stream("one two")
    assert system.knowledge.count("GenerateStream") == 1


@pytest.mark.parametrize("fault", ["gap", "repeat", "no end", "two ends"])
async def test_a_stream_with_a_gap_or_without_one_end_is_an_internal_error(
    driver: Any, system: System, fault: str
) -> None:
    events = stream_of(["a", "b", "c"], decoder_pb2.Usage())
    changed = {
        "gap": [*events[:2], *events[3:]],
        "repeat": [*events[:3], *events[2:]],
        "no end": events[:-1],
        "two ends": [*events, events[-1]],
    }
    system.decoder.events = changed[fault]
    with pytest.raises(errors.InternalError):
        await driver.stream("x")


async def test_leaving_a_stream_early_ends_the_request_on_the_server(driver: Any, system: System) -> None:
    words = ["word"] * 100_000
    system.decoder.events = stream_of(words, decoder_pb2.Usage())
    assert await driver.read_one_and_leave("x") == "word"
    async with asyncio.timeout(10):
        while not system.decoder.ended_streams:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_passed_deadline_is_a_deadline_error(driver: Any, system: System, streamed: bool) -> None:
    system.decoder.delay_s = 30.0
    call = driver.stream("x", timeout_s=0.3) if streamed else driver.call("generate", "x", timeout_s=0.3)
    with pytest.raises(errors.DeadlineError):
        await call


async def test_every_call_has_a_deadline_and_a_request_id(driver: Any, system: System) -> None:
    await driver.call("generate", "x", images=[large_image(1)])
    await driver.stream("x")
    await driver.call("encode", [b"other"])
    await driver.call("lookup", [b"other"])
    methods = {method for method, _, _ in system.knowledge.calls}
    assert methods == {
        "Generate",
        "GenerateStream",
        "GetModelInfo",
        "Encode",
        "LookupEmbeddings",
        "GetEncoderInfo",
    }
    assert all(request_id and remaining_s < 61 for _, request_id, remaining_s in system.knowledge.calls)


async def test_encode_uploads_each_missing_image_once_within_the_limits(driver: Any, system: System) -> None:
    known, new = b"known", [bytes([seed]) * (MIB // 2) for seed in range(3)]
    await driver.call("encode", [known])
    system.encoder.batch_sizes.clear()
    refs = await driver.call("encode", [known, *new, new[0]])
    # Two images of half a MiB do not fit in one message of 1 MiB.
    assert system.encoder.batch_sizes == [1, 1, 1]
    assert [ref.encoding.source for ref in refs] == ["cache", *["computed"] * 4]
    assert {ref.encoding.num_rows for ref in refs} == {NUM_ROWS}
    assert await driver.call("lookup", [*refs, b"never seen"]) == [True] * 5 + [False]
    answer = await driver.call("generate", "what", images=refs)
    assert answer.text == "what +5"


async def test_encode_of_an_unknown_digest_names_its_positions(driver: Any) -> None:
    with pytest.raises(errors.EmbeddingNotCachedError) as caught:
        await driver.call("encode", [b"bytes", ImageRef.from_digest(bytes(32)), ImageRef.from_digest(bytes(32))])
    assert caught.value.indexes == (1, 2)


async def test_an_image_given_by_digest_and_with_bytes_is_uploaded_from_the_bytes(driver: Any) -> None:
    ref = ImageRef.from_bytes(b"picture")
    first, second = await driver.call("encode", [ImageRef.from_digest(ref.digest), ref])
    assert first.encoding == second.encoding


async def test_more_than_256_images_are_looked_up_in_several_calls(driver: Any, system: System) -> None:
    images = [ImageRef.from_digest(index.to_bytes(32, "big")) for index in range(300)]
    system.knowledge.cached = {(bytes(images[299].digest), 0, False)}
    assert await driver.call("lookup", images) == [False] * 299 + [True]
    assert system.knowledge.count("LookupEmbeddings") == 2


async def test_look_ups_carry_the_options_of_their_images(driver: Any, system: System) -> None:
    images = [ImageRef.from_bytes(b"a", max_pixels=pixels) for pixels in (None, 100, 100, 200)]
    await driver.call("encode", images[1:3])
    assert await driver.call("lookup", images) == [False, True, True, False]


async def test_encode_with_a_decoder_that_announces_no_encoder_is_unsupported(driver: Any, system: System) -> None:
    system.decoder.encoder_target = ""
    with pytest.raises(errors.UnsupportedError, match="encoder_target"):
        await driver.call("encode", [b"x"])


@pytest.mark.parametrize("driver_class", [SyncDriver, AsyncDriver])
async def test_each_call_carries_the_token(driver_class: Any, system: System) -> None:
    driver = driver_class(system, token="s3cret")
    await driver.call("generate", "x")
    await driver.close()
    assert system.knowledge.metadata["authorization"] == "Bearer s3cret"


@pytest.mark.parametrize("driver_class", [SyncDriver, AsyncDriver])
async def test_a_target_without_a_server_is_unavailable(driver_class: Any) -> None:
    system = System()
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        system.decoder_target = f"127.0.0.1:{bound.getsockname()[1]}"
        driver = driver_class(system, timeout_s=5)
        with pytest.raises(errors.UnavailableError):
            await driver.call("generate", "x")
        await driver.close()


@pytest.mark.parametrize("driver_class", [SyncDriver, AsyncDriver])
async def test_an_unreadable_certificate_is_a_configuration_error(driver_class: Any, tmp_path: pathlib.Path) -> None:
    system = System()
    system.decoder_target = "127.0.0.1:1"
    with pytest.raises(errors.ConfigurationError, match=r"none\.pem"):
        driver_class(system, tls_ca=tmp_path / "none.pem")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the certificate is made by the openssl command")
@pytest.mark.parametrize("driver_class", [SyncDriver, AsyncDriver])
async def test_a_tls_server_is_trusted_by_its_own_authority_only(driver_class: Any, tmp_path: pathlib.Path) -> None:
    certificate, key = tmp_path / "server.crt", tmp_path / "server.key"
    await asyncio.to_thread(_make_certificate, certificate, key)
    async with running_system(tls_cert=certificate, tls_key=key) as system:
        trusting = driver_class(system, tls_ca=certificate)
        assert (await trusting.call("generate", "hello")).text == "hello +0"
        await trusting.close()
        plaintext = driver_class(system, timeout_s=5)
        with pytest.raises(errors.UnavailableError):
            await plaintext.call("generate", "hello")
        await plaintext.close()


def _make_certificate(certificate: pathlib.Path, key: pathlib.Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=lookonce test", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=60)


UNUSABLE: list[dict[str, Any]] = [
    {"request_id": "a\nb"},
    {"request_id": "ä"},
    {"request_id": 3},
    {"stop": [3]},
    {"stop": ["\udce9"]},
    {"stop_token_ids": ["x"]},
    {"stop_token_ids": 5},
    {"logit_bias": {"x": 1.0}},
    {"logit_bias": 3},
    {"cache_salt": "\udce9"},
    {"seed": 2**64},
]


@pytest.mark.parametrize("options", UNUSABLE, ids=str)
async def test_an_option_that_cannot_be_sent_is_named_and_sends_nothing(
    driver: Any, system: System, options: dict[str, Any]
) -> None:
    (name,) = options
    for call in (driver.call("generate", "x", **options), driver.stream("x", **options)):
        with pytest.raises(errors.InvalidParameterError) as caught:
            await call
        assert caught.value.field == name
    assert system.knowledge.calls == []


async def test_a_prompt_that_is_no_unicode_text_is_refused(driver: Any) -> None:
    for prompt in ("caf\udce9", [Message("user", "caf\udce9")], TextPrompt("caf\udce9")):
        with pytest.raises(errors.InvalidParameterError, match="no Unicode text"):
            await driver.call("generate", prompt)


@pytest.mark.parametrize("token", ["a\nb", "token\n", "a b", "ä"])
@pytest.mark.parametrize("kind", [lookonce.Client, lookonce.AdminClient])
def test_a_token_that_cannot_be_sent_is_refused_without_being_shown(kind: Any, token: str) -> None:
    with pytest.raises(errors.ConfigurationError) as caught:
        kind.connect("127.0.0.1:1", token=token)
    assert token not in str(caught.value)


async def test_a_text_prompt_goes_out_as_text_with_its_images(driver: Any, system: System) -> None:
    images = [b"tiny", large_image(1)]
    prompt = TextPrompt("<image><image>caption", images)
    assert (await driver.call("generate", prompt)).text == "<image><image>caption +2"
    assert system.knowledge.uploads == [4, 4, LARGE]
    pieces, answer = await driver.stream(prompt)
    assert pieces == ["<image><image>caption", " +2"]
    assert answer.usage.image_tokens == 2 * NUM_ROWS
    with pytest.raises(errors.InvalidParameterError, match="those of the TextPrompt"):
        await driver.call("generate", prompt, images=[b"other"])


def test_a_single_image_instead_of_a_list_is_refused() -> None:
    with lookonce.Client.connect("127.0.0.1:1") as client, pytest.raises(errors.InvalidParameterError, match="list"):
        client.generate("x", images="a.png")


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("lookonce", ["grpc", "google", "torch", "redis", "numpy", "PIL", "pydantic"]),
        ("lookonce.client", ["torch", "transformers", "redis", "numpy", "PIL", "pydantic", "structlog", "typer"]),
        ("lookonce.aio", ["torch", "transformers", "redis", "numpy", "PIL", "pydantic", "structlog", "typer"]),
    ],
)
def test_importing_the_sdk_loads_none_of_the_services_libraries(module: str, forbidden: list[str]) -> None:
    code = f"import sys, {module}; print(*[name for name in {forbidden!r} if name in sys.modules])"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert finished.stdout.split() == []
