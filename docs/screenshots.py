"""Photographs the playground for the README: `python -m docs.screenshots`, with chromium and chromium-driver installed.

It runs the services with the demo model on this machine. The times in the pictures are those of this run.
"""

from __future__ import annotations

import pathlib

from demo.questions import DEMO_SCENES
from demo.scenes import png_bytes, random_scene
from tests.conftest import DEMO_MODEL
from tests.gateway_svc.gateways import ThreadedGateway
from tests.gateway_svc.playground.browser import Playground, running_browser
from tests.in_process_stack import InProcessStack

FOLDER = pathlib.Path(__file__).parent / "images"
SCHEMES = ("light", "dark")
_CHAT_SIZE = (840, 1040)
_COMPARE_SIZE = (1000, 820)


def take_screenshots(page: Playground, folder: pathlib.Path) -> None:
    """Asks two questions, compares a cold answer with a warm one, and writes both views in both colour schemes."""
    picture = png_bytes(random_scene(*DEMO_SCENES[0]))
    # The first picture after the start waits for a process that decodes images.
    page.open()
    page.drop(png_bytes(random_scene(*DEMO_SCENES[1])))
    page.ask("What is in the picture?")
    page.open()
    page.resize(_CHAT_SIZE)
    page.drop(picture, "shapes.png")
    page.ask("What colour is the circle?")
    page.ask("How many shapes are there?")
    _photograph(page, folder, "playground-chat", _CHAT_SIZE)
    page.find("#tab-compare").click()
    page.drop(picture, "shapes.png")
    page.compare()
    _photograph(page, folder, "playground-compare", _COMPARE_SIZE)


def _photograph(page: Playground, folder: pathlib.Path, name: str, size: tuple[int, int]) -> None:
    for scheme in SCHEMES:
        page.resize(size, scheme)
        page.driver.execute_script("document.activeElement.blur(); document.documentElement.scrollTop = 0")
        page.driver.save_screenshot(str(folder / f"{name}-{scheme}.png"))


def main() -> None:
    """Starts the services, the gateway and a browser, and writes the pictures."""
    with (
        InProcessStack(DEMO_MODEL) as stack,
        ThreadedGateway(stack.decoder_targets[0], playground=True) as gateway,
        running_browser() as driver,
    ):
        take_screenshots(Playground(driver, gateway.url), FOLDER)


if __name__ == "__main__":
    main()
