"""A headless Chromium, and the playground in it as a person uses it."""

from __future__ import annotations

import base64
import contextlib
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

PROGRAMS = ("chromium", "chromedriver")
DESKTOP = (1000, 720)
PHONE = (320, 640)
_WAIT_S = 120
# The last ones keep the browser from calling anybody.
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--no-first-run",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# Arguments: the file in base64, its name and its type.
_TRANSFER = """
const bytes = Uint8Array.from(atob(arguments[0]), (sign) => sign.charCodeAt(0));
const transfer = new DataTransfer();
transfer.items.add(new File([bytes], arguments[1], { type: arguments[2] }));
"""
_DROP = f"""{_TRANSFER}
document.body.dispatchEvent(new DragEvent("drop", {{ dataTransfer: transfer, bubbles: true, cancelable: true }}));
"""
_PASTE = f"""{_TRANSFER}
const paste = {{ clipboardData: transfer, bubbles: true, cancelable: true }};
document.activeElement.dispatchEvent(new ClipboardEvent("paste", paste));
"""

_RUN_AXE = """
const done = arguments[0];
axe.run().then((found) => done(found.violations), (error) => done([String(error)]));
"""


def missing_programs() -> list[str]:
    """Returns the programs that are not on PATH; Debian's packages chromium and chromium-driver bring them."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


@contextlib.contextmanager
def running_browser() -> Iterator[webdriver.Chrome]:
    """Starts a browser with an empty profile and ends it."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which(PROGRAMS[0]))
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory(prefix="lookonce-browser-", ignore_cleanup_errors=True) as profile:
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options=options, service=Service(shutil.which(PROGRAMS[1])))
        try:
            yield driver
        finally:
            driver.quit()


class Playground:
    """The page of one gateway in the browser."""

    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver = driver
        self.url = url

    def open(self, key: str = "") -> None:
        """Loads the page anew, for a caller with a key if there is one, and waits until it knows the service."""
        self.driver.get(self.url)
        self.driver.execute_script("sessionStorage.clear(); sessionStorage.setItem('lookonce-key', arguments[0])", key)
        self.driver.get(self.url)
        self.until(lambda: self.state() == "Serving")

    def resize(self, size: tuple[int, int], scheme: str = "light", scale: int = 1) -> None:
        """Gives the page a size in pixels, a colour scheme and a number of device pixels for each pixel."""
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": scale, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def until(self, condition: Callable[[], object]) -> None:
        """Waits until something is true."""
        WebDriverWait(self.driver, _WAIT_S, 0.05).until(lambda _: condition())

    def find(self, selector: str) -> WebElement:
        """Returns the first element of a CSS selector. Raises selenium's NoSuchElementException if there is none."""
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        """Returns the texts of all elements of a CSS selector, which the page may replace at any time."""
        script = "return Array.from(document.querySelectorAll(arguments[0]), (element) => element.innerText)"
        found: list[str] = self.driver.execute_script(script, selector)
        return found

    def focused(self) -> str:
        """Returns the id of the element that has the focus."""
        return str(self.driver.switch_to.active_element.get_attribute("id"))

    def state(self) -> str:
        """Returns what the strip says of the service."""
        return self.find("#strip-state").text

    def press(self, *keys: str) -> None:
        """Presses keys, one after the other, in whatever element has the focus."""
        for key in keys:
            self.driver.switch_to.active_element.send_keys(key)

    def console(self) -> list[str]:
        """Returns the messages in the browser's console since the last call."""
        entries: list[dict[str, Any]] = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [str(entry["message"]) for entry in entries]

    def drop(self, data: bytes, name: str = "picture.png", kind: str = "image/png") -> None:
        """Drops a file on the page."""
        self.driver.execute_script(_DROP, base64.b64encode(data).decode(), name, kind)

    def paste(self, data: bytes, name: str = "pasted.png", kind: str = "image/png") -> None:
        """Pastes a file into the element that has the focus."""
        self.driver.execute_script(_PASTE, base64.b64encode(data).decode(), name, kind)

    def choose(self, path: pathlib.Path) -> None:
        """Chooses a file in the dialog of the chat."""
        self.find("#chat-file").send_keys(str(path))

    def ask(self, question: str) -> None:
        """Asks in the chat and waits for the end of the answer."""
        number = len(self.texts("article.answer"))
        self.begin(question)
        self.until(lambda: len(self.texts("article.answer:not([aria-busy])")) > number)

    def begin(self, question: str) -> None:
        """Asks in the chat, and returns while the answer comes."""
        self.find("#question").send_keys(question, Keys.ENTER)

    def compare(self) -> tuple[dict[str, str], dict[str, str]]:
        """Asks cold and warm, and returns the figures of both answers."""
        self.find("#compare-ask").click()
        self.until(lambda: self.find("#results").get_attribute("aria-busy") == "false")
        return self.figures("#cold-below"), self.figures("#warm-below")

    def figures(self, selector: str) -> dict[str, str]:
        """Returns the figures in the last element of a CSS selector, by their names."""
        place = self.driver.find_elements(By.CSS_SELECTOR, selector)[-1]
        names, values = (place.find_elements(By.CSS_SELECTOR, f".figures {tag}") for tag in ("dt", "dd"))
        return {name.text: value.text for name, value in zip(names, values, strict=True)}

    def violations(self, axe: str) -> Sequence[Any]:
        """Returns what axe-core, given as a script, finds wrong on the page."""
        self.driver.execute_script(axe)
        found: Sequence[Any] = self.driver.execute_async_script(_RUN_AXE)
        return found
