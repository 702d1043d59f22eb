"""The playground in a headless Chromium, in front of the real services and of a stand-in for them."""

from __future__ import annotations

import io
import itertools
import pathlib
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import PIL.Image
import pytest
from selenium import webdriver
from selenium.webdriver.common.keys import Keys

from demo.scenes import png_bytes, random_scene, render
from lookonce import Client
from lookonce.decoder.v1 import decoder_service_pb2 as decoder_pb2
from lookonce.local.token_entry import new_token
from lookonce.testing import FakeServer
from lookonce.testing.fake_decoder import FakeDecoder
from lookonce.testing.known_images import KnownImages
from tests.conftest import DEMO_MODEL, SERVICE_FLAGS
from tests.gateway_svc.gateways import ThreadedGateway
from tests.gateway_svc.playground.browser import DESKTOP, PHONE, Playground, missing_programs, running_browser
from tests.in_process_stack import InProcessStack

pytestmark = [
    pytest.mark.skipif(
        bool(missing_programs()), reason="Debian's packages chromium and chromium-driver are not installed"
    ),
    pytest.mark.timeout(600),
]

AXE = pathlib.Path(sys.prefix) / "axe-core/package/axe.min.js"
QUESTION = "What is in the picture?"
# Above one photo of 20 MB in base64, and below two.
MAX_BODY_BYTES = 30 << 20
_seeds = itertools.count(78_000_000)


@dataclass(frozen=True, slots=True)
class Real:
    """The services with the demo model, a gateway that a test may end, and the key of a user."""

    decoder_target: str
    gateway: ThreadedGateway
    key: str


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    folder = tmp_path_factory.mktemp("tokens")
    key, user = new_token("user", "somebody", "client")
    decoder_token, decoder = new_token("decoder", "", "service")
    (folder / "tokens.toml").write_text(user + decoder)
    (folder / "decoder.token").write_text(decoder_token)
    shared = [*SERVICE_FLAGS, "--auth-tokens-file", str(folder / "tokens.toml")]
    decoder_arguments = [*shared, "--encoder-token-file", str(folder / "decoder.token")]
    with (
        InProcessStack(DEMO_MODEL, encoder_arguments=shared, decoder_arguments=decoder_arguments) as stack,
        ThreadedGateway(stack.decoder_targets[0], playground=True, max_body_bytes=MAX_BODY_BYTES) as gateway,
    ):
        yield Real(stack.decoder_targets[0], gateway, key)


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    with running_browser() as driver:
        yield driver


@pytest.fixture
def page(real: Real, browser: webdriver.Chrome) -> Playground:
    """The page in front of the real services, with a key and an empty conversation."""
    opened = Playground(browser, real.gateway.url)
    opened.resize(DESKTOP)
    opened.open(real.key)
    return opened


def picture() -> bytes:
    """A picture that no test has used."""
    return png_bytes(random_scene(next(_seeds), 2))


def as_jpeg(data: bytes) -> bytes:
    file = io.BytesIO()
    PIL.Image.open(io.BytesIO(data)).save(file, "JPEG", quality=92)
    return file.getvalue()


def photo(folder: pathlib.Path) -> pathlib.Path:
    """A picture of 20 MB, since its pixels are not compressed."""
    path = folder / "photo.png"
    render(random_scene(next(_seeds), 2)).resize((2580, 2580)).save(path, compress_level=0)
    assert 19_900_000 < path.stat().st_size < 20 << 20
    return path


def test_a_picture_is_dropped_and_the_second_question_encodes_nothing(page: Playground) -> None:
    page.drop(picture())
    page.ask(QUESTION)
    page.ask("How many shapes are there?")
    first, second = (page.figures(f"#turns > li:nth-child({number})") for number in (1, 2))
    assert (first["Encoded"], first["Fetched"], first["Skipped"]) == ("36", "0", "0")
    assert second["Encoded"] == "0"
    assert int(second["Fetched"]) + int(second["Skipped"]) == 36
    assert all(page.texts("#turns .answer-text"))
    assert page.find("#strip-reused").text == "50 %"
    assert "0 image tokens encoded" in page.find("#announcements").get_attribute("textContent")  # type: ignore[operator]


def test_pictures_are_pasted_removed_and_other_files_refused(page: Playground) -> None:
    page.paste(picture())
    page.drop(b"no picture", "notes.txt", "text/plain")
    assert page.find("#chat-notice").text == "“notes.txt” is no picture, so it was not added."
    assert len(page.texts("#chat-pictures li")) == 1
    page.find("#chat-pictures button").click()
    assert page.texts("#chat-pictures li") == []
    assert page.focused() == "question"
    page.press(Keys.ENTER)
    assert page.find("#chat-notice").text == "Write a question, or add a picture."
    page.drop(b"no image", "broken.png")
    page.ask(QUESTION)
    assert "not an image of an accepted format" in page.find(".note.error").text


def test_a_photo_of_20_mb_is_sent_as_it_is_and_a_second_one_is_refused(
    page: Playground, real: Real, tmp_path: pathlib.Path
) -> None:
    path = photo(tmp_path)
    page.choose(path)
    page.choose(path)
    assert "so it was not added. Pictures are never shrunk here." in page.find("#chat-notice").text
    page.ask(QUESTION)
    # The gateway has pictures above half of a message encoded before it asks, so this answer found the rows.
    assert page.figures(".answer")["Fetched"] == "36"
    with Client.connect(real.decoder_target, token=real.key) as client:
        usage = client.generate(QUESTION, [path.read_bytes()], max_tokens=1).usage
    assert (usage.image_tokens, usage.encoded_image_tokens) == (36, 0)
    page.choose(path)
    page.begin(QUESTION)
    assert page.find("#chat-notice").text.startswith("The pictures of this conversation are too large")


@pytest.mark.parametrize("kind", ["image/png", "image/jpeg"])
def test_cold_is_cold_each_time_and_warm_is_warm(page: Playground, kind: str) -> None:
    page.find("#tab-compare").click()
    data = picture()
    page.drop(data if kind == "image/png" else as_jpeg(data), "picture", kind)
    for _ in range(2):
        cold, warm = page.compare()
        assert (cold["Encoded"], cold["Prefilled"].split()[0]) == ("36", cold["Prefilled"].split()[2])
        assert (warm["Encoded"], warm["Prefilled"] != cold["Prefilled"]) == ("0", True)
        assert page.find("#cold-text").text == page.find("#warm-text").text != ""
        assert page.find("#verdict").text.startswith("First text after ")


def test_other_formats_are_not_compared(page: Playground) -> None:
    page.find("#tab-compare").click()
    file = io.BytesIO()
    PIL.Image.open(io.BytesIO(picture())).save(file, "GIF")
    page.drop(file.getvalue(), "picture.gif", "image/gif")
    page.find("#compare-ask").click()
    page.until(lambda: "PNG and JPEG only" in page.find("#compare-notice").text)
    page.find("#compare-pictures button").click()
    assert (page.texts("#compare-pictures li"), page.focused()) == ([], "compare-question")


def test_more_pictures_than_the_model_takes_are_refused_with_the_limit(page: Playground) -> None:
    page.until(lambda: page.state() == "Serving")
    for index in range(17):
        page.drop(b"a file", f"{index}.png")
    assert len(page.texts("#chat-pictures li")) == 16
    expected = "A question takes at most 16 pictures, so “16.png” was not added."
    assert page.find("#chat-notice").text == expected


def test_the_gateway_goes_and_comes_back_and_the_conversation_stays(page: Playground, real: Real) -> None:
    page.drop(picture())
    page.ask(QUESTION)
    real.gateway.stop()
    try:
        page.ask("How many shapes are there?")
        assert page.find(".note.error").text.startswith("The gateway does not answer.")
        page.until(lambda: page.state() == "Gateway not reachable")
    finally:
        real.gateway.start()
    page.until(lambda: page.state() == "Serving")
    page.find(".retry").click()
    page.until(lambda: len(page.texts(".timeline")) == 2)
    assert page.texts(".note.error") == []
    assert page.figures(".answer")["Encoded"] == "0"
    assert page.texts(".question p") == [QUESTION, "How many shapes are there?"]


def type_key(page: Playground, key: str) -> None:
    page.find("#key-button").click()
    page.find("#key-field").clear()
    page.find("#key-field").send_keys(key, Keys.ENTER)


def test_a_wrong_key_is_named_and_the_right_one_works(real: Real, page: Playground) -> None:
    page.driver.execute_script("sessionStorage.clear()")
    page.driver.refresh()
    page.until(lambda: page.state() == "API key needed")
    page.ask("What is it?")
    type_key(page, "wrong")
    page.ask("What is it?")
    refusals = page.texts(".note.error")
    assert len(refusals) == 2
    assert all(text.startswith("The gateway needs a key, or does not know this one.") for text in refusals)
    type_key(page, "ключ")
    page.ask("What is it?")
    assert page.texts(".note.error")[-1].startswith("This key has characters that no key has.")
    assert page.state() == "API key needed"
    type_key(page, real.key)
    page.until(lambda: page.state() == "Serving")
    page.ask("What is it?")
    assert len(page.texts(".note.error")) == 3
    assert real.key not in page.driver.page_source
    assert page.driver.execute_script("return [Object.keys(localStorage), document.cookie]") == [[], ""]


def test_everything_works_with_the_keyboard(page: Playground) -> None:
    page.press(Keys.TAB)
    assert page.focused() == "tab-chat"
    page.press(Keys.ARROW_RIGHT)
    assert (page.focused(), page.find("#panel-compare").is_displayed()) == ("tab-compare", True)
    page.press(Keys.ARROW_LEFT, Keys.TAB)
    assert page.focused() == "key-button"
    page.press(Keys.ENTER)
    assert page.focused() == "key-field"
    page.press(Keys.ESCAPE)
    assert page.focused() == "key-button"
    page.press(Keys.TAB, Keys.TAB, Keys.TAB)
    assert page.focused() == "draw"
    page.press(Keys.ENTER)
    page.until(lambda: page.texts("#chat-pictures li"))
    assert page.focused() == "question"
    page.press("first line", Keys.SHIFT + Keys.ENTER + Keys.NULL, "second line", Keys.ENTER)
    page.until(lambda: page.texts(".timeline"))
    assert page.texts(".question p") == ["first line\nsecond line"]


def test_axe_finds_no_violation(page: Playground) -> None:
    if not AXE.exists():
        pytest.skip("axe-core is not installed; `make venv` fetches it where there is npm")
    axe = AXE.read_text()
    page.drop(picture())
    page.ask(QUESTION)
    page.drop(b"no image", "broken.png")
    page.ask(QUESTION)
    page.drop(picture())
    page.find("#tab-compare").click()
    page.drop(picture())
    page.compare()
    page.find("section + details > summary").click()
    for tab in ("#tab-chat", "#tab-compare", "#key-button"):
        page.find(tab).click()
        for size in (DESKTOP, PHONE):
            for scheme in ("light", "dark"):
                page.resize(size, scheme)
                assert page.violations(axe) == []
                assert page.driver.execute_script("return document.documentElement.scrollWidth") <= size[0]


def test_the_page_breaks_no_rule_of_its_own_policy(page: Playground, real: Real) -> None:
    page.console()
    page.open(real.key)
    page.drop(picture())
    page.find("#draw").click()
    page.ask(QUESTION)
    assert [message for message in page.console() if "Content Security Policy" in message] == []


HTML = "<b>bold</b> <img src=x onerror=\"document.title='broken'\"> <script>document.title='broken'</script>"


class EndlessDecoder(FakeDecoder):
    """A decoder whose answers end only when their callers go."""

    def __init__(self) -> None:
        super().__init__("", KnownImages(16), 1 << 20)
        self.gone = threading.Event()

    def GenerateStream(
        self, request: decoder_pb2.GenerateStreamRequest, context: Any
    ) -> Iterator[decoder_pb2.GenerateStreamResponse]:
        context.add_callback(self.gone.set)
        yield decoder_pb2.GenerateStreamResponse(started=decoder_pb2.StreamStarted(request_id="endless"))
        for index in itertools.count():
            delta = decoder_pb2.StreamDelta(text="word ", token_ids=[index], token_index=index)
            yield decoder_pb2.GenerateStreamResponse(delta=delta)
            if self.gone.wait(0.05):
                return


def test_an_answer_is_cancelled_in_the_middle_and_its_request_ends(browser: webdriver.Chrome) -> None:
    server, decoder = FakeServer(), EndlessDecoder()
    server._decoder = decoder
    with server, ThreadedGateway(server.target, playground=True) as gateway:
        page = Playground(browser, gateway.url)
        page.open()
        page.begin("Talk on.")
        page.until(lambda: "word word" in page.texts("#turns .answer-text")[0])
        assert not decoder.gone.is_set()
        page.press(Keys.ESCAPE)
        page.until(lambda: page.texts(".note") == ["You stopped this answer."])
        assert decoder.gone.wait(60)
        assert "word word" in page.texts("#turns .answer-text")[0]
        assert page.find("#ask").is_displayed()


class ThinkingDecoder(FakeDecoder):
    """A decoder whose answers begin with reasoning."""

    def GenerateStream(
        self, request: decoder_pb2.GenerateStreamRequest, context: Any
    ) -> Iterator[decoder_pb2.GenerateStreamResponse]:
        yield decoder_pb2.GenerateStreamResponse(started=decoder_pb2.StreamStarted(request_id="thinking"))
        for index, (reasoning, text) in enumerate([(HTML, ""), ("", "two")]):
            delta = decoder_pb2.StreamDelta(reasoning=reasoning, text=text, token_ids=[index], token_index=index)
            yield decoder_pb2.GenerateStreamResponse(delta=delta)
        finished = decoder_pb2.StreamFinished(
            finish_reason=decoder_pb2.FINISH_REASON_STOP, usage=decoder_pb2.Usage(completion_tokens=2)
        )
        yield decoder_pb2.GenerateStreamResponse(finished=finished)


def test_reasoning_stands_in_a_closed_box_above_the_answer(browser: webdriver.Chrome) -> None:
    server = FakeServer()
    server._decoder = ThinkingDecoder("", KnownImages(16), 1 << 20)
    with server, ThreadedGateway(server.target, playground=True) as gateway:
        page = Playground(browser, gateway.url)
        page.open()
        page.ask("How many?")
        assert page.texts("#turns .answer-text") == ["two"]
        assert not page.find("#turns .reasoning-text").is_displayed()
        page.find("#turns summary").click()
        assert page.texts("#turns .reasoning-text") == [HTML]
        assert page.texts("#turns .reasoning-text *") == []


def test_an_answer_is_text_and_the_model_hears_the_conversation(browser: webdriver.Chrome) -> None:
    with FakeServer(HTML) as server, ThreadedGateway(server.target, playground=True) as gateway:
        page = Playground(browser, gateway.url)
        page.open()
        page.ask("<i>one</i>")
        page.ask("two")
        assert page.texts("#turns .answer-text") == [HTML, HTML]
        assert page.driver.title == "Lookonce playground"
        assert page.texts("#turns .answer-text *, .question i") == []
        assert server.requests[-1].text == f"<i>one</i>\n{HTML}\ntwo"
